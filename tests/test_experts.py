"""Mixtures of experts: an item's score does not change by one bit, whichever experts the items beside it go to, on both
backends; parity with transformers is in `test_parity.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from prefixwise import Scorer
from tests.reference import Floats, is_emulated

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")

PATHS: dict[str, dict[str, Any]] = {
    "serial": {"algorithm": "serial"},
    "packed": {"algorithm": "packed"},
    "prefill_extend": {"algorithm": "prefill_extend"},
}
LABELS = (3, 5, 300)
RANDOM = np.random.default_rng(5)
QUERY: list[int] = RANDOM.integers(0, 512, 140).tolist()
ITEMS: list[list[int]] = [RANDOM.integers(0, 512, length).tolist() for length in (20, 1, 33, 0, 130, 7)]


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """JAX compiles programs for every dtype and path. PyTorch has one path in a dtype that the CPU emulates, and all of
    them in float32."""
    dtype, path = parameters.get("dtype", "float32"), parameters.get("path")
    if parameters.get("cpu") == "jax":
        return (dtype, path) != ("bfloat16", "packed")
    return is_emulated(dtype) and path != "packed"


def scores(scorer: Scorer, items: list[list[int]]) -> Floats:
    """Raw logits: any bit that moves in the model shows in them."""
    return np.array(scorer.score(QUERY, items, label_token_ids=LABELS, score_mode="logit").scores)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def scorer(scorer_of: Callable[..., Scorer], cpu: dict[str, Any], dtype: str, path: str) -> Scorer:
    return scorer_of("medium-experts", dtype=dtype, **cpu, **PATHS[path], token_budget=512)


def test_an_item_has_the_bits_that_it_has_alone(scorer: Scorer) -> None:
    """Beside items of one token each, which all go to the same experts, beside items that go to other ones, and
    beside none."""
    expected = scores(scorer, ITEMS)
    assert np.ptp(expected, 0).min() > 0.1, "scores hardly differ between items, so an error would not show"
    same = [[9] * length for length in (1, 3, 12, 40)]
    others = [np.random.default_rng(length).integers(0, 512, length).tolist() for length in (1, 2, 9, 60)]
    for beside in (same, others):
        np.testing.assert_array_equal(scores(scorer, [*beside, *ITEMS])[len(beside) :], expected)
        np.testing.assert_array_equal(scores(scorer, [*ITEMS, *beside])[: len(ITEMS)], expected)
    alone = [scores(scorer, [item])[0] for item in ITEMS]
    np.testing.assert_array_equal(np.stack(alone), expected)


@pytest.mark.gpu
def test_bits_on_a_gpu(scorer_of: Callable[..., Scorer], path: str) -> None:
    """In bfloat16, through grouped GEMMs."""
    scorer = scorer_of("medium-experts", backend="torch", device="cuda", dtype="bfloat16", **PATHS[path])
    expected, same = scores(scorer, ITEMS), [[9] * length for length in (1, 3, 12, 40)]
    np.testing.assert_array_equal(scores(scorer, [*same, *ITEMS])[len(same) :], expected)
    np.testing.assert_array_equal(np.stack([scores(scorer, [item])[0] for item in ITEMS]), expected)
    reference = scorer_of("medium-experts", backend="torch", device="cpu", dtype="float32", **PATHS[path])
    # Of the other two the last token nearly goes to another expert: router logits differ by less than 0.015.
    sure = [0, 1, 2, 5]
    assert np.abs(expected - scores(reference, ITEMS))[sure].max() < 0.1


@pytest.mark.parametrize("dtype", ["float32"])
def test_every_path_gives_the_same_bits(scorer_of: Callable[..., Scorer], dtype: str) -> None:
    found = [scores(scorer_of("medium-experts", device="cpu", dtype=dtype, **each), ITEMS) for each in PATHS.values()]
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])
