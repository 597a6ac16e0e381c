"""What is measured through HTTP, from this machine: the clients and the rate search of `prefixwise bench load`.

Bodies are token ids, put together from JSON that was made before; no two requests have the same query.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.request import urlopen

from benchmarks.goals.cases import BOUND_MS, WARM_UP_ROUNDS, Geometry, Settings
from benchmarks.goals.targets import Measured, attempt
from prefixwise.bench.geometry import RequestMaker, choose_labels
from prefixwise.bench.kinds.load import LoadGeometry, LoadPhase, LoadResult
from prefixwise.bench.run.load import LoadPlan, LoadRun, choose_client_processes, probe_length
from prefixwise.bench.run.load_driver import LoadTarget, PhaseLength

CLIENTS = 8
_ROUNDS_EACH = 2  # times --rounds requests of each client
_SMALL_ROUNDS = 10  # times --rounds small requests

Report = Callable[[str], None]


class FailedRequestsError(Exception):
    """Some of the requests that a figure is to be made of got no scores."""


@dataclass(frozen=True)
class Phase:
    """A run of the load generator, and how full the server's forwards were meanwhile."""

    result: LoadResult
    fill: float

    @property
    def measured(self) -> LoadPhase:
        return self.result.measured

    @property
    def p50_ms(self) -> float:
        assert self.measured.service_latency is not None, "something was answered"
        return self.measured.service_latency.p50_ms

    @property
    def details(self) -> dict[str, Any]:
        shown = self.measured.model_dump(
            include={"arrivals", "answered", "errors_by_code", "latency", "client_limited", "client_processes"}
        )
        overhead = self.result.client_overhead
        return {**shown, "fill": self.fill, "client_overhead_ms": overhead and overhead.p50_ms}


class HttpRows:
    """One server's figures. Each run has queries of its own, so that none finds another's prefix."""

    def __init__(self, url: str, settings: Settings, found: dict[str, Any], report: Report) -> None:
        self._url = url
        self._settings = settings
        self._scale = settings.scale
        self._engine = found  # what the server's process has measured
        self._report = report
        self._seed = 0

    def measure(self) -> list[Measured]:
        cases: dict[str, Callable[[], Sequence[Measured]]] = {
            "http": lambda: [self._one_client()],
            "http8": lambda: [self._several_clients()],
            "small": lambda: [self._small()],
            "poisson": self._poisson,
        }
        found = [attempt(name, cases[name], self._engine["errors"]) for name in self._settings.http_cases]
        return [row for rows in found for row in rows]

    def _one_client(self) -> Measured:
        geometry = self._scale.contract
        phase = self._closed(geometry, 1, _ROUNDS_EACH * self._settings.rounds)
        seconds = phase.p50_ms / 1000
        share = self._engine["cold_seconds"] / seconds
        note = f"{phase.p50_ms:.2f} ms, {100 * share:.1f} % of the engine's"
        return self._row("http", f"{geometry.title}, HTTP, one client", geometry, 1 / seconds, phase, note)

    def _several_clients(self) -> Measured:
        """All items over all the time, the beginning and the end with fewer in flight included."""
        geometry = self._scale.contract
        phase = self._closed(geometry, CLIENTS, CLIENTS * _ROUNDS_EACH * self._settings.rounds)
        rate = phase.measured.answered / phase.measured.wall_sec
        note = f"p50 {phase.p50_ms:.1f} ms, fill {100 * phase.fill:.1f} %"
        return self._row("http8", f"{geometry.title}, HTTP, {CLIENTS} in flight", geometry, rate, phase, note)

    def _small(self) -> Measured:
        geometry = self._scale.small
        phase = self._closed(geometry, 1, _SMALL_ROUNDS * self._settings.rounds)
        title = f"{geometry.title}, HTTP, one at a time, p50"
        note = f"in the engine {1000 * self._engine['small_seconds']:.2f} ms"
        flops = geometry.flops(self._scale.model) * 1000 / phase.p50_ms
        return Measured("small", title, phase.p50_ms, "ms", flops, note=note, details=phase.details)

    def _poisson(self) -> list[Measured]:
        """The search, then once more at the rate that it found: there is how full forwards are, and a second p99."""
        geometry, scale = self._scale.small, self._scale
        length = PhaseLength(seconds=scale.probe_seconds)
        plan = LoadPlan(
            mode="open",
            length=length,
            warmup=length,
            rate_qps=scale.first_rate,
            bound_ms=BOUND_MS,
            search=True,
            min_arrivals=scale.min_arrivals,
        )
        found = self._run(geometry, plan)
        rate, goodput = found.result.rate_qps, found.measured.goodput
        assert rate is not None and goodput is not None, "of an open loop with a bound"
        again_length = probe_length(rate, length, scale.min_arrivals)  # long enough for arrivals at a low rate, too
        again = self._run(geometry, replace(plan, length=again_length, warmup=None, rate_qps=rate, search=False))
        latency = again.measured.latency
        p99 = None if latency is None else latency.p99_ms
        title = f"{geometry.title}, Poisson, most requests/s with p99 <= {BOUND_MS:g} ms"
        note = "; ".join([f"again at {rate:,.0f}/s: p99 {p99 or 0:.1f} ms", *found.result.notes])
        row = self._row("poisson", title, geometry, rate if goodput.bound_met else 0.0, again, note)
        probes = [probe.model_dump() for probe in found.result.rate_search]
        row = replace(row, details={**row.details, "search_fill": found.fill, "probes": probes})
        return [row, Measured("poisson fill", "tokens computed / padded, at that rate", again.fill, "%")]

    def _row(self, name: str, title: str, geometry: Geometry, rate: float, phase: Phase, note: str) -> Measured:
        """`rate`: requests per second; shown as such under Poisson traffic, else as items."""
        value, unit = (rate, "requests/s") if name == "poisson" else (rate * geometry.items, "items/s")
        flops = rate * geometry.flops(self._scale.model)
        return Measured(name, title, value, unit, flops, note=note, details=phase.details)

    def _closed(self, geometry: Geometry, concurrency: int, requests: int) -> Phase:
        """Raises FailedRequestsError where one fails: the figure would be of the others."""
        warm_up = PhaseLength(requests=concurrency * WARM_UP_ROUNDS)
        plan = LoadPlan("closed", PhaseLength(requests=requests), warm_up, concurrency=concurrency)
        phase = self._run(geometry, plan)
        if phase.measured.answered < phase.measured.arrivals:
            raise FailedRequestsError(f"{phase.measured.errors_by_code} of {phase.measured.arrivals} requests")
        return phase

    def _run(self, geometry: Geometry, plan: LoadPlan) -> Phase:
        self._seed += 1
        vocab_size = self._scale.model.vocab_size
        described = LoadGeometry(
            query_tokens=geometry.query_tokens,
            num_items=geometry.items,
            item_tokens=geometry.item_tokens,
            label_token_ids=choose_labels(None, vocab_size),
            vocab_size=vocab_size,
            distinct_queries=0,
        )
        self._report(f"HTTP, {geometry.title}")
        num_clients = choose_client_processes(plan.rate_qps, plan.concurrency, search=plan.search)
        plan = replace(plan, client_processes=num_clients)
        run = LoadRun(LoadTarget(self._url), RequestMaker(described, self._seed), plan, self._report, server_config={})
        before = self._stats()
        result = run.run()
        after = self._stats()
        computed, padded = (after[name] - before[name] for name in ("tokens_computed", "tokens_padded"))
        return Phase(result, computed / padded if padded else 0.0)

    def _stats(self) -> dict[str, Any]:
        with urlopen(f"{self._url}/server_info") as answer:
            stats: dict[str, Any] = json.load(answer)["stats"]
        return stats
