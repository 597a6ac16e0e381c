"""The search for a rate, against a border that is known."""

from __future__ import annotations

import asyncio

import pytest

from prefixwise.bench.load.arrivals import PhaseLength
from prefixwise.bench.load.rate_search import find_rate, probe_length


def search(border: float, first: float) -> tuple[float | None, list[float]]:
    """What is found, and what was tried on the way."""
    tried: list[float] = []

    async def is_met(rate: float) -> bool:
        tried.append(rate)
        return rate <= border

    return asyncio.run(find_rate(is_met, first, precision=1.05)), tried


@pytest.mark.parametrize("border", [37.0, 100.0, 119.9, 120.0, 1000.0])
@pytest.mark.parametrize("first", [1.0, 120.0, 700.0])
def test_the_border_is_found_from_below_and_from_above(border: float, first: float) -> None:
    found, tried = search(border, first)
    assert found is not None
    assert border / 1.05 <= found <= border
    assert len(tried) == len(set(tried)) <= 16


def test_the_way_is_doubling_and_then_halving_the_gap() -> None:
    """10 and 20 are met, 40 is not; then the geometric middle of 20 and 40, which is 28.3."""
    _, tried = search(30.0, 10.0)
    assert tried[:4] == pytest.approx([10.0, 20.0, 40.0, 28.284], abs=0.001)


def test_a_bound_that_no_rate_meets() -> None:
    found, tried = search(0.0, 64.0)
    assert found is None
    assert tried[-1] == 64.0 / 2**12


def test_a_server_that_takes_everything_gives_the_highest_rate_tried() -> None:
    assert search(float("inf"), 1.0)[0] == 2.0**12


@pytest.mark.parametrize(
    ("rate", "asked", "found"),
    [
        (100.0, PhaseLength(seconds=6.0), PhaseLength(seconds=6.0)),  # 600 arrivals
        (10.0, PhaseLength(seconds=6.0), PhaseLength(seconds=120.0, requests=200)),  # 60
        (10.0, PhaseLength(seconds=600.0, requests=3), PhaseLength(seconds=600.0, requests=200)),
        (1000.0, PhaseLength(requests=3), PhaseLength(seconds=120.0, requests=200)),
        (1.0, PhaseLength(requests=500), PhaseLength(requests=500)),
    ],
)
def test_a_probe_is_long_enough_for_a_p99(rate: float, asked: PhaseLength, found: PhaseLength) -> None:
    assert probe_length(rate, asked) == found


def test_how_many_arrivals_are_enough_may_be_said() -> None:
    assert probe_length(1.0, PhaseLength(requests=3), min_arrivals=3) == PhaseLength(requests=3)
