"""The estimate behind `auto`, on numbers that can be done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.plan.cost_model import (
    STATIC_FIGURES,
    DeviceFigures,
    SegmentSums,
    Work,
    estimate_seconds,
    extend_work,
    packed_work,
)

# One layer, D = H = 8, one head, F = 16: q, k, v and o are 64 weights each, the MLP is 3 * 128.
CONFIG = FakeBackend().config
WEIGHTS = 4 * 64 + 3 * 128


def segments(*lens: int) -> SegmentSums:
    return SegmentSums.of(np.array(lens, np.int64))


def test_seconds_are_operations_over_rate_plus_a_cost_per_forward() -> None:
    figures = DeviceFigures(flops_per_second=100.0, seconds_per_forward=5.0)
    seconds = estimate_seconds(CONFIG, Work(num_tokens=10, num_pairs=7, num_forwards=2), figures)
    assert seconds == pytest.approx((2 * WEIGHTS * 10 + 4 * 8 * 7) / 100 + 2 * 5)


def test_packed_computes_the_prefix_once_per_row() -> None:
    work = packed_work(100, segments(10, 20), num_sequences=2, token_budget=115, multiple=1)
    own_pairs = 10 * 10 // 2 + 20 * 20 // 2
    assert work == Work(230, 2 * 100 * 100 // 2 + 100 * 30 + own_pairs, num_forwards=2)


def test_extend_computes_the_prefix_once() -> None:
    work = extend_work(100, segments(10, 20), token_budget=20, multiple=1)
    assert work == Work(130, 100 * 100 // 2 + 100 * 30 + 50 + 200, num_forwards=1 + 2)


def test_extend_without_a_prefix_has_no_prefill() -> None:
    assert extend_work(0, segments(10, 20), token_budget=30, multiple=1).num_forwards == 1


def test_a_prefix_that_is_joined_with_its_items_has_no_forward_of_its_own() -> None:
    separate = extend_work(100, segments(10, 20), token_budget=1000, multiple=256)
    joined = extend_work(100, segments(10, 20), token_budget=1000, multiple=256, joins=True)
    assert joined.num_pairs == separate.num_pairs
    assert (separate.num_forwards, joined.num_forwards) == (2, 1)
    assert (separate.num_tokens, joined.num_tokens) == (2 * 256, 256), "and is padded together with them"
    assert extend_work(100, segments(10, 20), token_budget=65, multiple=1, joins=True).num_forwards == 2
    assert extend_work(0, segments(10, 20), token_budget=30, multiple=1, joins=True).num_forwards == 1


def test_padding_counts() -> None:
    assert packed_work(100, segments(10), 1, 1000, multiple=256).num_tokens == 256
    assert extend_work(100, segments(10), 1000, multiple=256).num_tokens == 2 * 256


@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu"])
def test_every_kind_of_device_has_figures(kind: str) -> None:
    assert estimate_seconds(CONFIG, Work(1, 1, 1), STATIC_FIGURES[kind]) > 0
