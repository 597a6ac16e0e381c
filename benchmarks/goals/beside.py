"""Small requests, one at a time, while large ones run all the time: what they wait, and what the large ones lose.

The large ones come from a client process of their own, which makes their bodies and reads their long answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from benchmarks.goals.cases import Beside
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import Spread
from prefixwise.bench.run.load_driver import LoadDriver, LoadTarget, PhaseLength, fine_event_loop
from prefixwise.bench.run.load_processes import ClientProcesses
from prefixwise.bench.run.load_stats import Call, spread_of

WARM_UP_REQUESTS = 3
_MORE_SECONDS = 0.25  # of the small ones, so that they are there until the last large one of the phase has begun


class BesideError(Exception):
    """A request got no scores, or there were too few of them for a figure."""


@dataclass(frozen=True)
class BesideFigures:
    """The calls that count, and the spreads of the small ones' latencies."""

    alone: Spread  # small ones without large ones
    beside: Spread
    small: Sequence[Call]
    large: Sequence[Call]  # beside small ones
    rate_alone: float  # large requests per second without small ones
    rate: float

    @property
    def share(self) -> float:
        return self.rate / self.rate_alone


def measure_beside(target: LoadTarget, small: RequestMaker, large: RequestMaker, beside: Beside) -> BesideFigures:
    """Run from outside of an event loop. Raises BesideError, ClientProcessError."""
    with asyncio.Runner(loop_factory=fine_event_loop) as runner:
        return runner.run(_measure(target, small, large, beside))


async def _measure(target: LoadTarget, small: RequestMaker, large: RequestMaker, beside: Beside) -> BesideFigures:
    async with LoadDriver(target, small) as driver, ClientProcesses(target, large, 1) as background:
        await _checked(background.run_closed(1, PhaseLength(requests=WARM_UP_REQUESTS)))
        await _checked(driver.run_closed(1, PhaseLength(requests=WARM_UP_REQUESTS)))
        small_alone = await _checked(driver.run_closed(1, PhaseLength(seconds=beside.small_seconds)))
        large_alone = await _checked(background.run_closed(1, PhaseLength(seconds=beside.seconds)))
        both = await asyncio.gather(
            _checked(driver.run_closed(1, PhaseLength(seconds=beside.seconds + _MORE_SECONDS))),
            _checked(background.run_closed(1, PhaseLength(seconds=beside.seconds))),
        )
    small_beside, large_beside = both
    last_small = max(call.done for call in small_beside)
    counted = [call for call in large_beside if call.done <= last_small] or large_beside[:1]
    return BesideFigures(
        _spread(small_alone), _spread(small_beside), small_beside, counted, _rate(large_alone), _rate(counted)
    )


async def _checked(running: Awaitable[list[Call]]) -> list[Call]:
    calls = await running
    failed = sorted({call.failure for call in calls if call.failure is not None})
    if failed or not calls:
        raise BesideError(f"expected scores for each of {len(calls)} requests, got {', '.join(failed) or 'no request'}")
    return calls


def _spread(calls: Sequence[Call]) -> Spread:
    spread = spread_of([call.service_ms for call in calls])
    assert spread is not None, "there are calls"
    return spread


def _rate(calls: Sequence[Call]) -> float:
    """Of requests that follow each other."""
    return len(calls) / (max(call.done for call in calls) - min(call.sent for call in calls))
