"""Ratios and their intervals on data whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from itemwise.harness.ab.intervals import speed_ratio


def test_the_ratio_is_the_geometric_mean_over_rounds() -> None:
    """1 and 4: their geometric mean is 2. Drawn again, two rounds give 1, 2, 2 or 4: the interval has all."""
    found = speed_ratio([1.0, 4.0], [1.0, 1.0])
    assert found is not None
    assert (found.ratio, found.low, found.high) == pytest.approx((2.0, 1.0, 4.0))
    assert (found.confidence, found.num_rounds) == (0.95, 2)


def test_rounds_that_agree_leave_no_doubt_however_slow_they_were() -> None:
    """A machine that is ten times slower in one round slows both down: paired, it cancels."""
    found = speed_ratio([3.0, 30.0, 3.0], [2.0, 20.0, 2.0])
    assert found is not None
    assert (found.ratio, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_inverse_has_the_inverse_interval() -> None:
    first, other = [1.0, 1.2, 0.9, 1.1, 1.3], [0.5, 0.7, 0.6, 0.5, 0.4]
    there, back = speed_ratio(first, other), speed_ratio(other, first)
    assert there is not None and back is not None
    assert there.low is not None and there.high is not None
    assert (back.ratio, back.low, back.high) == pytest.approx((1 / there.ratio, 1 / there.high, 1 / there.low))


def test_one_round_says_nothing_about_doubt() -> None:
    found = speed_ratio([2.0], [1.0])
    assert found is not None
    assert (found.ratio, found.low, found.high) == (2.0, None, None)
    assert speed_ratio([], []) is None


def test_the_same_times_give_the_same_interval() -> None:
    assert speed_ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]) == speed_ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])


def test_the_interval_has_the_true_ratio_about_as_often_as_it_says() -> None:
    """100 measurements of 20 rounds, true ratio 1.5: some 93 of 100 intervals of this kind and size have it."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        found = speed_ratio(list(1.5 * np.exp(rng.normal(0, 0.2, 20))), [1.0] * 20)
        assert found is not None and found.low is not None and found.high is not None
        hits += found.low <= 1.5 <= found.high
    assert 86 <= hits <= 99
