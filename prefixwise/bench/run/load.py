"""`bench load`: one run, and the search for the highest rate that a server takes within a bound.

The search doubles or halves to find a border, then bisects it. A p99 of few arrivals says nothing, so a probe has at
least 200, and goes on for as long as they take, two minutes at most. A miss may be chance: it counts when it repeats.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any, Literal

from prefixwise.bench.files import now_utc
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LOAD_VERSION, LoadPhase, LoadResult, RateProbe, Spread
from prefixwise.bench.run.load_driver import (
    LoadDriver,
    LoadSender,
    LoadTarget,
    PhaseLength,
    Schedule,
    fine_event_loop,
    poisson_schedule,
)
from prefixwise.bench.run.load_overhead import MOST_IN_FLIGHT, measure_client_overhead
from prefixwise.bench.run.load_processes import ClientProcesses
from prefixwise.bench.run.load_stats import Call, ClientUse, notes_of, summarise

MIN_ARRIVALS = 200


MOST_SECONDS = 120.0  # that a probe is lengthened to


TRIES = 2


_MAX_STRIDES = 12  # with doublings or halvings a factor of 4096 either way


def probe_length(rate_qps: float, length: PhaseLength, min_arrivals: int = MIN_ARRIVALS) -> PhaseLength:
    """As asked for, or longer where that would be too few arrivals."""
    limits = (length.seconds and rate_qps * length.seconds, length.requests)
    if min(limit for limit in limits if limit is not None) >= min_arrivals:
        return length
    return PhaseLength(seconds=max(length.seconds or 0.0, MOST_SECONDS), requests=min_arrivals)


async def find_rate(
    is_met: Callable[[float], Awaitable[bool]], first: float, *, precision: float = 1.05, stride: float = 2.0
) -> float | None:
    """The highest rate tried that met the bound, None where none did. The border is at most a factor `precision`
    above it, unless no rate was found that is too high. `stride`: the factor between rates until there is a border;
    a small one is faster where `first` is close to it."""
    low, high = await _find_border(is_met, first, stride)
    while low is not None and high is not None and high / low > precision:
        middle = sqrt(low * high)
        if await is_met(middle):
            low = middle
        else:
            high = middle
    return low


async def _find_border(
    is_met: Callable[[float], Awaitable[bool]], first: float, stride: float
) -> tuple[float | None, float | None]:
    """A rate that is met and one that is not, a factor of `stride` apart; None for what was not found."""
    met = await is_met(first)
    rate = first
    for _ in range(_MAX_STRIDES):
        following = rate * stride if met else rate / stride
        if await is_met(following) != met:
            return (rate, following) if met else (following, rate)
        rate = following
    return (rate, None) if met else (None, rate)


OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class LoadPlan:
    """How requests are sent, and for how long."""

    mode: Literal["open", "closed"]
    length: PhaseLength
    warmup: PhaseLength | None = None
    rate_qps: float | None = None  # open; where a search begins
    concurrency: int | None = None  # closed
    bound_ms: float | None = None
    search: bool = False
    stride: float = 2.0  # of a search
    min_arrivals: int = MIN_ARRIVALS  # of a probe of a search
    seed: int = 0
    client_processes: int = 1


_RATE_EACH = 1000.0  # requests/s: a client process is then busy for a quarter of its time


_SEARCHED_RATE = 3000.0  # that a search may come to


_IN_FLIGHT_EACH = 32


def choose_client_processes(
    rate_qps: float | None, concurrency: int | None, *, search: bool = False, cores: int | None = None
) -> int:
    """As many as keep each of them far from its limit, and at most half of the cores: the server may need the rest."""
    if rate_qps is None:
        wanted = ceil((concurrency or 1) / _IN_FLIGHT_EACH)
    else:
        wanted = ceil(max(rate_qps, _SEARCHED_RATE if search else 0.0) / _RATE_EACH)
    return max(1, min(wanted, (cores or os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class _Measured:
    """A phase that counts, and its rate where it has one."""

    rate_qps: float | None
    phase: LoadPhase


class LoadRun:
    """Sends a load to a server.

    Calls `on_progress` at the start of a phase, and `keep` with the result after each probe.
    """

    def __init__(
        self,
        target: LoadTarget,
        maker: RequestMaker,
        plan: LoadPlan,
        on_progress: OnProgress,
        *,
        server_config: dict[str, Any],
        keep: Callable[[LoadResult], None] = lambda result: None,
    ) -> None:
        self._target = target
        self._maker = maker
        self._plan = plan
        self._on_progress = on_progress
        self._server_config = server_config
        self._keep = keep
        self._warmup: LoadPhase | None = None
        self._overhead: Spread | None = None
        self._overhead_in_flight = 1
        self._measured: list[_Measured] = []  # all probes, of a search
        self._num_clients = min(plan.client_processes, plan.concurrency or target.max_in_flight)

    def run(self) -> LoadResult:
        """Run from outside of an event loop."""
        with asyncio.Runner(loop_factory=fine_event_loop) as runner:
            best = runner.run(self._run())
        return self._result(best)

    def result_so_far(self) -> LoadResult | None:
        """The result of an interrupted run; None where nothing was measured."""
        return self._result(self._best_so_far(), cut_short=True) if self._measured else None

    async def _run(self) -> _Measured:
        plan = self._plan
        async with self._sender() as driver:
            if plan.warmup is not None:
                self._warmup = await self._phase(driver, "warm-up", plan.rate_qps, plan.warmup)
            self._overhead_in_flight = self._expected_in_flight()
            self._overhead = await measure_client_overhead(self._maker, self._overhead_in_flight)
            if plan.search:
                return await self._search(driver)
            return await self._measure(driver, "measuring", plan.rate_qps, plan.length)

    def _sender(self) -> LoadDriver | ClientProcesses:
        if self._num_clients == 1:
            return LoadDriver(self._target, self._maker)
        return ClientProcesses(self._target, self._maker, self._num_clients)

    def _expected_in_flight(self) -> int:
        """By one client process. In an open loop by its rate and by how long the warm-up's requests took: 1 where there
        was none."""
        plan, service = self._plan, None if self._warmup is None else self._warmup.service_latency
        expected = plan.concurrency or 1
        if plan.rate_qps is not None and service is not None:
            expected = min(ceil(plan.rate_qps * service.p50_ms / 1000), self._target.max_in_flight)
        return max(1, min(ceil(expected / self._num_clients), MOST_IN_FLIGHT))

    async def _search(self, driver: LoadSender) -> _Measured:
        plan = self._plan
        assert plan.rate_qps is not None

        async def is_met(rate: float) -> bool:
            length = probe_length(rate, plan.length, plan.min_arrivals)
            for attempt in range(TRIES):
                name = "trying again" if attempt else "trying"
                tried = await self._measure(driver, name, rate, length, seed=plan.seed + attempt)
                self._keep(self._result(self._best_so_far(), cut_short=True))
                if _is_met(tried.phase):
                    return True
            return False

        await find_rate(is_met, plan.rate_qps, stride=plan.stride)
        return self._best_so_far()

    def _best_so_far(self) -> _Measured:
        """The highest rate that met the bound, the lowest tried where none did."""
        met = [each for each in self._measured if _is_met(each.phase)]
        if met:
            return max(met, key=lambda each: each.rate_qps or 0.0)
        return min(self._measured, key=lambda each: each.rate_qps or 0.0)

    async def _measure(
        self, driver: LoadSender, name: str, rate: float | None, length: PhaseLength, seed: int | None = None
    ) -> _Measured:
        try:
            measured = _Measured(rate, await self._phase(driver, name, rate, length, seed))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            # A probe that was cut short says nothing of its rate; of the only phase it is all that there is.
            if not self._plan.search and driver.finished:
                sent_sec = None if rate is None else max(call.sent for call in driver.finished)
                self._measured.append(_Measured(rate, self._summarise(driver.finished, sent_sec, driver.clients)))
            raise
        self._measured.append(measured)
        return measured

    async def _phase(
        self, driver: LoadSender, name: str, rate: float | None, length: PhaseLength, seed: int | None = None
    ) -> LoadPhase:
        plan = self._plan
        if rate is None:
            assert plan.concurrency is not None
            self._on_progress(f"{name}, {plan.concurrency:,} in flight")
            return self._summarise(await driver.run_closed(plan.concurrency, length), None, driver.clients)
        schedule = poisson_schedule(rate, length, plan.seed if seed is None else seed)
        self._on_progress(f"{name}, {rate:.4g} requests/s, {_phrase(schedule)}")
        return self._summarise(await driver.run_open(schedule), schedule.send_sec, driver.clients)

    def _summarise(self, calls: list[Call], send_sec: float | None, clients: list[ClientUse]) -> LoadPhase:
        num_items, bound_ms = self._maker.geometry.num_items, self._plan.bound_ms
        return summarise(calls, num_items=num_items, send_sec=send_sec, bound_ms=bound_ms, clients=clients)

    def _result(self, best: _Measured, *, cut_short: bool = False) -> LoadResult:
        plan, target = self._plan, self._target
        return LoadResult(
            schema_version=LOAD_VERSION,
            generated_at_utc=now_utc(),
            url=target.base_url,
            server_config=self._server_config,
            geometry=self._maker.geometry,
            mode=plan.mode,
            rate_qps=best.rate_qps,
            concurrency=plan.concurrency,
            seed=plan.seed,
            timeout_sec=target.timeout_sec,
            max_in_flight=plan.concurrency or target.max_in_flight,
            client_overhead=self._overhead,
            client_overhead_in_flight=self._overhead_in_flight,
            warmup=self._warmup,
            measured=best.phase,
            rate_search=[_probe(each) for each in self._measured] if plan.search else [],
            cut_short=cut_short,
            notes=[*self._notes(cut_short), *notes_of(best.phase)],
        )

    def _notes(self, cut_short: bool) -> list[str]:
        """Notes on the whole run."""
        notes = ["cut short: these are the metrics of what was done until then"] if cut_short else []
        met = {each.rate_qps for each in self._measured if _is_met(each.phase)}
        limited = {each.rate_qps or 0.0 for each in self._measured if each.phase.client_limited} - met
        if self._plan.search and limited:
            notes.append(
                f"CLIENT LIMITED: at {min(limited):,.4g} requests/s this machine sent late or had no CPU time left, "
                "and the bound was missed: the server may take more than was found"
            )
        return notes


def _is_met(phase: LoadPhase) -> bool:
    return phase.goodput is not None and phase.goodput.bound_met


def _phrase(schedule: Schedule) -> str:
    return f"{len(schedule.times):,} arrivals in {schedule.send_sec:,.1f} s"


def _probe(measured: _Measured) -> RateProbe:
    phase = measured.phase
    assert phase.goodput is not None and measured.rate_qps is not None
    return RateProbe(
        rate_qps=measured.rate_qps,
        arrivals=phase.arrivals,
        p99_ms=None if phase.latency is None else phase.latency.p99_ms,
        share_within_bound=phase.goodput.share_within_bound,
        bound_met=phase.goodput.bound_met,
        client_limited=phase.client_limited,
    )
