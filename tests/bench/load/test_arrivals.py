"""Poisson arrivals: of the right rate, by their seed, ended by time or number."""

from __future__ import annotations

import pytest

from prefixwise.bench.load.arrivals import PhaseLength, poisson_schedule


def gaps(times: tuple[float, ...]) -> list[float]:
    return [after - before for before, after in zip((0.0, *times), times, strict=False)]


def test_gaps_have_the_mean_and_the_spread_of_a_poisson_process() -> None:
    """Exponential gaps: the deviation is the mean, and 1 - 1/e of them are shorter than it."""
    found = gaps(poisson_schedule(50.0, PhaseLength(requests=20_000), seed=1).times)
    mean = sum(found) / len(found)
    deviation = (sum((gap - mean) ** 2 for gap in found) / len(found)) ** 0.5
    assert mean == pytest.approx(0.02, rel=0.03)
    assert deviation == pytest.approx(0.02, rel=0.05)
    assert sum(gap < 0.02 for gap in found) / len(found) == pytest.approx(0.632, abs=0.015)


def test_as_many_arrive_in_a_time_as_the_rate_says() -> None:
    schedule = poisson_schedule(100.0, PhaseLength(seconds=100.0), seed=2)
    assert len(schedule.times) == pytest.approx(10_000, abs=300)  # three deviations
    assert schedule.times[-1] < 100.0
    assert schedule.send_sec == 100.0
    assert all(gap >= 0 for gap in gaps(schedule.times))


def test_a_number_ends_it_at_its_last_arrival() -> None:
    schedule = poisson_schedule(100.0, PhaseLength(requests=5), seed=3)
    assert len(schedule.times) == 5
    assert schedule.send_sec == schedule.times[-1]


def test_what_comes_first_ends_it() -> None:
    assert len(poisson_schedule(100.0, PhaseLength(seconds=60.0, requests=5), seed=3).times) == 5
    short = poisson_schedule(100.0, PhaseLength(seconds=0.5, requests=10_000), seed=3)
    assert len(short.times) < 100
    assert short.send_sec == 0.5


def test_the_seed_decides() -> None:
    length = PhaseLength(requests=10)
    assert poisson_schedule(5.0, length, 1) == poisson_schedule(5.0, length, 1)
    assert poisson_schedule(5.0, length, 1) != poisson_schedule(5.0, length, 2)


def test_nothing_may_arrive_at_all() -> None:
    schedule = poisson_schedule(0.001, PhaseLength(seconds=0.001), seed=0)
    assert (schedule.times, schedule.send_sec) == ((), 0.001)
