"""What is measured: the model, the geometries, what a search may try; the exact ones, and tiny ones for a test.

And what a peer is told at its start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.contract import LABELS
from benchmarks.goals.cases import TINY as TINY_GOALS
from benchmarks.goals.cases import Geometry
from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.models.config import ModelConfig

CASES = ("hf", "llama", "gemm", "gemm-short", "jax", "score", "serve")
SEARCH_SEED = 1_000_000  # requests of searches and warm-ups: rounds have others


@dataclass(frozen=True)
class Scale:
    """A model, its requests, and what peers may try."""

    model: ModelConfig  # of `hf`, `gemm` and `jax`; the other cases have the embedded one
    hf: Geometry
    llama: Geometry
    contract: Geometry
    prefix_batches: tuple[int, ...]  # items of a batch, Hugging Face behind its prefix cache
    full_batches: tuple[int, ...]  # whole sequences of a batch
    full_items: int  # about so many of the items are timed in a round of whole sequences
    llama_batches: tuple[int, ...]  # sequences of a batch, llama.cpp
    llama_steps: tuple[int, ...]  # most tokens that it computes at a time
    gemm_rows: tuple[int, ...]  # rows of the GEMMs
    gemm_repeats: int  # of all four products in a round
    rounds: int  # where the user leaves it open


FULL = Scale(
    model=QWEN3_06B,
    hf=Geometry(500, 64, 20),
    llama=Geometry(200, 50, 20),
    contract=Geometry(2000, 500, 20),
    prefix_batches=(8, 16, 32, 64),
    full_batches=(1, 2, 4, 8, 16),
    full_items=16,
    llama_batches=(1, 5, 10, 25, 50),
    llama_steps=(256, 512, 1024),
    gemm_rows=(1024, 10_000),
    gemm_repeats=8,
    rounds=5,
)

TINY = Scale(
    model=TINY_GOALS.model,
    hf=Geometry(40, 6, 5),
    llama=Geometry(10, 4, 3),
    contract=Geometry(160, 24, 5),
    prefix_batches=(2, 4),
    full_batches=(1, 2),
    full_items=2,
    llama_batches=(1, 4),
    llama_steps=(64,),
    gemm_rows=(32, 120),
    gemm_repeats=2,
    rounds=2,
)


@dataclass(frozen=True)
class Role:
    """What a peer is to be; as JSON it is the argument of its process."""

    peer: str  # a name in `child.PEERS`
    geometry: tuple[int, int, int]  # query tokens, items, tokens of an item
    model: str | None = None  # a folder in Hugging Face's layout; None: the embedded model
    tiny: bool = False

    @property
    def scale(self) -> Scale:
        return TINY if self.tiny else FULL


@dataclass(frozen=True)
class Drawn:
    """A request that all peers get, as token ids."""

    query: NDArray[np.int64]  # [S]
    items: NDArray[np.int64]  # [I, tokens of an item]
    labels: tuple[int, int]


def draw(vocab_size: int, geometry: tuple[int, int, int], seed: int) -> Drawn:
    """The same in every process; another seed is another query, and other items."""
    query_tokens, items, item_tokens = geometry
    random = np.random.default_rng(seed)
    query = random.integers(0, vocab_size, query_tokens)
    first, second = (label % vocab_size for label in LABELS)
    return Drawn(query, random.integers(0, vocab_size, (items, item_tokens)), (first, second))
