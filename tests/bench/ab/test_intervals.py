"""Ratios and their intervals on data whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from prefixwise.bench.ab.intervals import geometric_mean, round_medians, speed_ratio, student_quantile
from prefixwise.bench.artifacts import AbRun


def test_the_ratio_is_the_geometric_mean_over_rounds() -> None:
    """1 and 4: their geometric mean is 2. The logarithms are ln 2 off it, so the error of their mean is ln 2, too."""
    found = speed_ratio([1.0, 4.0], [1.0, 1.0])
    assert found is not None
    assert (found.ratio, found.low, found.high) == pytest.approx((2.0, 2.0 / 2**12.7062, 2.0 * 2**12.7062), rel=1e-4)
    assert (found.confidence, found.num_rounds) == (0.95, 2)


def test_the_ratio_is_that_of_the_geometric_means() -> None:
    first, other = [1.0, 1.2, 0.9, 1.1, 1.3], [0.5, 0.7, 0.6, 0.5, 0.4]
    found = speed_ratio(first, other)
    assert found is not None
    assert found.ratio == pytest.approx(geometric_mean(first) / geometric_mean(other), rel=1e-12)


def test_a_round_counts_the_median_of_its_runs() -> None:
    rows = [(0, 3.0), (1, 5.0), (0, 1.0), (1, 6.0), (0, 100.0)]
    assert round_medians([AbRun(round_index=index, place=0, seconds=time) for index, time in rows]) == [3.0, 5.5]


@pytest.mark.parametrize(
    ("freedom", "at_95", "at_99"),
    [
        (1, 12.7062, 63.6567),
        (2, 4.30265, 9.92484),
        (3, 3.18245, 5.84091),
        (4, 2.77645, 4.60409),
        (9, 2.26216, 3.24984),
        (10, 2.22814, 3.16927),
        (30, 2.04227, 2.75000),
        (99, 1.98422, 2.62641),
        (1000, 1.96234, 2.58075),
    ],
)
def test_the_quantiles_are_those_of_the_tables(freedom: int, at_95: float, at_99: float) -> None:
    found = (student_quantile(0.95, freedom), student_quantile(0.99, freedom))
    assert found == pytest.approx((at_95, at_99), rel=5e-6)


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


@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_the_interval_has_the_true_ratio_as_often_as_it_says(rounds: int) -> None:
    """2,000 measurements with noise of 20 % in both variants, true ratio 1.5: 95 of 100 intervals have it."""
    rng = np.random.default_rng(rounds)
    hits = 0
    for _ in range(2000):
        first, other = 1.5 * np.exp(rng.normal(0, 0.2, rounds)), np.exp(rng.normal(0, 0.2, rounds))
        found = speed_ratio(list(first), list(other))
        assert found is not None and found.low is not None and found.high is not None
        hits += found.low <= 1.5 <= found.high
    assert 0.92 <= hits / 2000 <= 0.98
