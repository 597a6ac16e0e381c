"""A checkpoint that is not on disk: the exact shape of a known model with random weights, for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import TokenizerError
from prefixwise.models.checkpoint import Checkpoint, StoredTensor, TokenizerFiles
from prefixwise.models.config import ModelConfig, RopeConfig, parameter_shapes

QWEN3_06B = ModelConfig(
    family="qwen3",
    vocab_size=151_936,
    model_size=1024,
    mlp_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    norm_eps=1e-6,
    rope=RopeConfig(1e6),
    qkv_bias=False,
    qk_norm=True,
    tied_head=True,
    max_context_len=40_960,
)


@dataclass(frozen=True)
class RandomTensor(StoredTensor):
    """Normal numbers: 0.02 wide for matrices, around 1 for norms."""

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        drawn = np.random.default_rng(start).standard_normal((stop - start, *self.shape[1:]), dtype=np.float32)
        return drawn * 0.02 if len(self.shape) > 1 else 1 + 0.1 * drawn


def random_checkpoint(config: ModelConfig = QWEN3_06B) -> Checkpoint:
    """The model, ready for a backend."""

    def no_tokenizer() -> TokenizerFiles:
        raise TokenizerError("random weights have no tokenizer")

    tensors = {name: RandomTensor(shape, "float32") for name, shape in parameter_shapes(config).items()}
    return Checkpoint("random", Path(), config, tensors, no_tokenizer)
