"""Searches the highest rate that a server takes within a bound: doubles or halves to find a border, then bisects it.

A p99 of few arrivals says nothing, so a probe has at least 200, and goes on for as long as they take, two minutes at
most. A miss may be chance: it counts only when it is missed again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import sqrt

from prefixwise.bench.load.arrivals import PhaseLength

MIN_ARRIVALS = 200
MOST_SECONDS = 120.0  # that a probe is lengthened to
TRIES = 2
_MAX_STRIDES = 12  # doublings or halvings: a factor of 4096 either way


def probe_length(rate_qps: float, length: PhaseLength, min_arrivals: int = MIN_ARRIVALS) -> PhaseLength:
    """As asked for, or longer where that would be too few arrivals."""
    limits = (length.seconds and rate_qps * length.seconds, length.requests)
    if min(limit for limit in limits if limit is not None) >= min_arrivals:
        return length
    return PhaseLength(seconds=max(length.seconds or 0.0, MOST_SECONDS), requests=min_arrivals)


async def find_rate(
    is_met: Callable[[float], Awaitable[bool]], first: float, *, precision: float = 1.05
) -> float | None:
    """The highest rate tried that met the bound, None where none did. The border is at most a factor `precision`
    above it, unless no rate was found that is too high."""
    low, high = await _find_border(is_met, first)
    while low is not None and high is not None and high / low > precision:
        middle = sqrt(low * high)
        if await is_met(middle):
            low = middle
        else:
            high = middle
    return low


async def _find_border(is_met: Callable[[float], Awaitable[bool]], first: float) -> tuple[float | None, float | None]:
    """A rate that is met and one that is not, a factor of two apart; None for what was not found."""
    met = await is_met(first)
    rate = first
    for _ in range(_MAX_STRIDES):
        following = rate * 2 if met else rate / 2
        if await is_met(following) != met:
            return (rate, following) if met else (following, rate)
        rate = following
    return (rate, None) if met else (None, rate)
