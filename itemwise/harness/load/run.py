"""One run of `bench load`: what the client costs, the warm-up, then what is measured, or a search for the best rate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from itemwise.harness.artifacts import LOAD_VERSION, LoadPhase, LoadResult, RateProbe
from itemwise.harness.files import now_utc
from itemwise.harness.geometry import RequestMaker
from itemwise.harness.load.arrivals import PhaseLength, poisson_schedule
from itemwise.harness.load.client_overhead import measure_client_overhead
from itemwise.harness.load.driver import LoadDriver, LoadTarget
from itemwise.harness.load.rate_search import find_rate
from itemwise.harness.load.stats import notes_of, summarise

Tell = Callable[[str], None]


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
    seed: int = 0


@dataclass(frozen=True)
class LoadRun:
    """A server and what it is sent."""

    target: LoadTarget
    maker: RequestMaker
    plan: LoadPlan
    tell: Tell  # hears when a phase begins

    def run(self, server_config: dict[str, Any]) -> LoadResult:
        """From outside of any event loop."""
        return asyncio.run(self._run(server_config))

    async def _run(self, server_config: dict[str, Any]) -> LoadResult:
        plan = self.plan
        overhead = await measure_client_overhead(self.maker)
        async with LoadDriver(self.target, self.maker) as driver:
            warmup = None
            if plan.warmup is not None:
                warmup = await self._phase(driver, "warm-up", plan.rate_qps, plan.warmup)
            rate, measured, probes = await self._measure(driver)
        return LoadResult(
            schema_version=LOAD_VERSION,
            generated_at_utc=now_utc(),
            url=self.target.base_url,
            server_config=server_config,
            geometry=self.maker.geometry,
            mode=plan.mode,
            rate_qps=rate,
            concurrency=plan.concurrency,
            seed=plan.seed,
            timeout_sec=self.target.timeout_sec,
            max_in_flight=self.target.max_in_flight,
            client_overhead=overhead,
            warmup=warmup,
            measured=measured,
            rate_search=probes,
            notes=notes_of(measured),
        )

    async def _measure(self, driver: LoadDriver) -> tuple[float | None, LoadPhase, list[RateProbe]]:
        """The rate, its figures, and the way to it where there was one."""
        rate = self.plan.rate_qps
        if not self.plan.search:
            return rate, await self._phase(driver, "measuring", rate, self.plan.length), []
        assert rate is not None
        phases: dict[float, LoadPhase] = {}

        async def is_met(tried: float) -> bool:
            phases[tried] = await self._phase(driver, "trying", tried, self.plan.length)
            return _probe(tried, phases[tried]).bound_met

        found = await find_rate(is_met, rate)
        shown = min(phases) if found is None else found
        return shown, phases[shown], [_probe(tried, phase) for tried, phase in phases.items()]

    async def _phase(self, driver: LoadDriver, name: str, rate: float | None, length: PhaseLength) -> LoadPhase:
        plan, num_items = self.plan, self.maker.geometry.num_items
        if rate is None:
            assert plan.concurrency is not None
            self.tell(f"{name}, {plan.concurrency} in flight")
            calls = await driver.run_closed(plan.concurrency, length)
            return summarise(calls, num_items=num_items, bound_ms=plan.bound_ms)
        schedule = poisson_schedule(rate, length, plan.seed)
        self.tell(f"{name}, {rate:.4g} requests/s, {len(schedule.times)} arrivals in {schedule.send_sec:.1f} s")
        calls = await driver.run_open(schedule)
        return summarise(calls, num_items=num_items, send_sec=schedule.send_sec, bound_ms=plan.bound_ms)


def _probe(rate: float, phase: LoadPhase) -> RateProbe:
    assert phase.goodput is not None
    return RateProbe(
        rate_qps=rate,
        p99_ms=None if phase.latency is None else phase.latency.p99_ms,
        share_within_bound=phase.goodput.share_within_bound,
        bound_met=phase.goodput.bound_met,
    )
