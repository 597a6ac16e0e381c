"""Models with sliding windows and capped scores, on contexts longer than the windows: no bit moves, and the scores are
those of transformers. Items of all lengths, of which some are computed in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise import Scorer
from tests.reference import LOGIT_BOUND, Floats, Reference, is_emulated

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")

Items = list[list[int]]
RANDOM = np.random.default_rng(17)
QUERY: list[int] = RANDOM.integers(0, 512, 290).tolist()
LENGTHS = (20, 530, 1, 0, 140, 33, 300)
ITEMS: Items = [RANDOM.integers(0, 512, length).tolist() for length in LENGTHS]
OTHERS: Items = [RANDOM.integers(0, 512, length).tolist() for length in (520, 5, 64)]
LABELS = (3, 5, 300)
WINDOWS = {"medium-window": (300, 300), "medium-gemma2": (100, 0)}
PATHS: dict[str, dict[str, Any]] = {
    "serial": {"algorithm": "serial"},
    "packed-segment": {"algorithm": "packed", "mask": "segment"},
    "packed-dense": {"algorithm": "packed", "mask": "dense"},
    "prefill_extend": {"algorithm": "prefill_extend"},
}


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """JAX compiles for each model and dtype; every day it has one of them. All paths with one dtype of each model,
    and nothing on PyTorch in one that the CPU emulates."""
    pair = (parameters["model"], parameters.get("dtype", "float32"))
    if parameters["cpu"] == "jax":
        return pair != ("medium-gemma2", "float32") or test != "test_neighbours_do_not_move_a_bit"
    if test == "test_every_path_and_chunk_size_gives_the_same_bits":
        return pair != ("medium-gemma2", "float32") and (pair != ("medium-window", "bfloat16") or is_emulated(pair[1]))
    return is_emulated(pair[1])


@pytest.fixture(scope="module", params=WINDOWS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def scores(scorer: Scorer, items: Items, query: list[int] = QUERY) -> Floats:
    """Raw logits: any bit that moves in the model shows in them."""
    return np.array(scorer.score(query, items, label_token_ids=LABELS, score_mode="logit").scores)


def load(scorer_of: Callable[..., Scorer], model: str, cpu: dict[str, Any], **options: Any) -> Scorer:
    """JAX gets forwards of one size, so that few programs are compiled."""
    return scorer_of(model, **cpu, token_budget=512 if cpu["backend"] == "jax" else 1024, **options)


def test_neighbours_do_not_move_a_bit(
    scorer_of: Callable[..., Scorer], model: str, cpu: dict[str, Any], dtype: str
) -> None:
    scorer = load(scorer_of, model, cpu, dtype=dtype)
    assert scorer.engine.backend.config.windows == WINDOWS[model]
    assert max(LENGTHS) > scorer.engine.backend.info.max_whole_item
    base = scores(scorer, ITEMS)
    assert np.array_equal(np.concatenate([scores(scorer, [item]) for item in ITEMS]), base)
    mixed = [OTHERS[0], ITEMS[4], OTHERS[1], ITEMS[1], ITEMS[0], OTHERS[2], ITEMS[3]]
    assert np.array_equal(scores(scorer, mixed)[[1, 3, 4, 6]], base[[4, 1, 0, 3]])
    cold = [7, *QUERY[1:]]
    together, again = (scores(scorer, ITEMS[:3], cold) for _ in range(2))
    assert np.array_equal(together, again), "a cached query gives other bits"


def test_every_path_and_chunk_size_gives_the_same_bits(
    scorer_of: Callable[..., Scorer], model: str, cpu: dict[str, Any], dtype: str
) -> None:
    base = scores(load(scorer_of, model, cpu, dtype=dtype), ITEMS)
    for options in (*PATHS.values(), {"chunk_size": 1}, {"chunk_size": 2, "algorithm": "packed"}):
        found = scores(load(scorer_of, model, cpu, dtype=dtype, **options), ITEMS)
        assert np.array_equal(found, base), options


def test_scores_equal_transformers(
    scorer_of: Callable[..., Scorer], model: str, cpu: dict[str, Any], checkpoint_of: Callable[[str], Path]
) -> None:
    reference = Reference.load(checkpoint_of(model))
    expected = reference.label_logits([QUERY + item for item in ITEMS])[:, list(LABELS)]
    assert np.abs(scores(load(scorer_of, model, cpu), ITEMS) - expected).max() <= LOGIT_BOUND
