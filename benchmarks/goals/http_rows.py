"""What is measured through HTTP, from this machine: the clients and the rate search of `prefixwise bench load`.

Bodies are token ids, put together from JSON that was made before; no two requests have the same query.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.request import urlopen

from benchmarks.goals.beside import measure_beside
from benchmarks.goals.cases import BESIDE_CASES, SEARCH_CASES, WARM_UP_ROUNDS, Geometry, Settings
from benchmarks.goals.targets import Measured, attempt
from prefixwise.bench.geometry import RequestMaker, choose_labels
from prefixwise.bench.kinds.load import LoadGeometry, LoadPhase, LoadResult
from prefixwise.bench.run.load import LoadPlan, LoadRun, choose_client_processes, probe_length
from prefixwise.bench.run.load_driver import LoadTarget, PhaseLength

CLIENTS = 8
_ROUNDS_EACH = 2  # times --rounds requests of each client
_SMALL_ROUNDS = 10  # times --rounds small requests

Report = Callable[[str], None]


def report_figures(rows: Sequence[Measured], report: Report) -> None:
    """Tell them at once: a run that is ended early has no table."""
    for row in rows:
        report(f"{row.title}: {'unknown' if row.value is None else f'{row.value:,.4g}'} {row.unit}")


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
            **{name: partial(self._search, name) for name in SEARCH_CASES},
            **{name: partial(self._beside, name) for name in BESIDE_CASES},
        }
        rows: list[Measured] = []
        for name in self._settings.http_cases:
            found = attempt(name, cases[name], self._engine["errors"])
            report_figures(found, self._report)
            rows += found
        return rows

    def _one_client(self) -> Measured:
        geometry = self._scale.contract
        phase = self._closed(geometry, 1, _ROUNDS_EACH * self._settings.rounds)
        seconds, engine = phase.p50_ms / 1000, self._engine["cold_seconds"]
        note = f"{phase.p50_ms:.2f} ms" + (f", {100 * engine / seconds:.1f} % of the engine's" if engine else "")
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
        engine = self._engine["small_seconds"]
        note = f"in the engine {1000 * engine:.2f} ms" if engine else ""
        flops = geometry.flops(self._scale.model) * 1000 / phase.p50_ms
        return Measured("small", title, phase.p50_ms, "ms", flops, note=note, details=phase.details)

    def _search(self, name: str) -> list[Measured]:
        """The search, then once more at the rate that it found: there is how full forwards are, and a second p99."""
        search = self._scale.searches[name]
        length = PhaseLength(seconds=search.probe_seconds)
        plan = LoadPlan(
            mode="open",
            length=length,
            warmup=length,
            rate_qps=search.first_rate,
            bound_ms=search.bound_ms,
            search=True,
            stride=search.stride,
            min_arrivals=search.min_arrivals,
        )
        found = self._run(search.geometry, plan)
        rate, goodput = found.result.rate_qps, found.measured.goodput
        assert rate is not None and goodput is not None, "of an open loop with a bound"
        again_length = probe_length(rate, length, search.min_arrivals)  # long enough for arrivals at a low rate, too
        again = self._run(search.geometry, replace(plan, length=again_length, warmup=None, rate_qps=rate, search=False))
        latency = again.measured.latency
        p99 = None if latency is None else latency.p99_ms
        note = "; ".join([f"again at {rate:,.0f}/s: p99 {p99 or 0:.1f} ms", *found.result.notes])
        row = self._search_row(name, rate if goodput.bound_met else 0.0, again, note)
        probes = [probe.model_dump() for probe in found.result.rate_search]
        row = replace(row, details={**row.details, "search_fill": found.fill, "probes": probes})
        return [row, Measured(f"{name} fill", "tokens computed / padded, at that rate", again.fill, "%")]

    def _search_row(self, name: str, rate: float, again: Phase, note: str) -> Measured:
        """In requests/s, or in items/s as peers report this workload."""
        search = self._scale.searches[name]
        is_by_item = name == "sglang"
        unit = "items/s" if is_by_item else "requests/s"
        title = f"{search.geometry.title}, Poisson, most {unit} with p99 <= {search.bound_ms:g} ms"
        row = self._row(name, title, search.geometry, rate, again, note)
        return row if is_by_item else replace(row, value=rate, unit=unit)

    def _beside(self, name: str) -> list[Measured]:
        """Latencies of the small requests, and the large ones' share of the rate that they have alone."""
        beside, small = self._scale.besides[name], self._scale.small
        self._report(f"HTTP, {small.title} beside {beside.large.title}")
        self._seed += 2
        makers = self._maker(small, self._seed - 1), self._maker(beside.large, self._seed)
        found = measure_beside(LoadTarget(self._url), *makers, beside)
        title = f"{small.title}, one at a time, beside {beside.large.title}"
        items = beside.large.items
        rates = f"{items * found.rate:,.1f} items/s, {items * found.rate_alone:,.1f} alone"
        details = {"answered": len(found.small), "large_answered": len(found.large)}
        alone = found.alone
        return [
            Measured(f"{name} p50", f"{title}, p50", found.beside.p50_ms, "ms", note=f"alone {alone.p50_ms:.2f} ms"),
            Measured(f"{name} p99", f"{title}, p99", found.beside.p99_ms, "ms", note=f"alone {alone.p99_ms:.2f} ms"),
            Measured(f"{name} rate", "the large ones' rate / alone", found.share, "%", note=rates, details=details),
        ]

    def _row(self, name: str, title: str, geometry: Geometry, rate: float, phase: Phase, note: str) -> Measured:
        """`rate`: requests per second; shown as items."""
        flops = rate * geometry.flops(self._scale.model)
        return Measured(name, title, rate * geometry.items, "items/s", flops, note=note, details=phase.details)

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
        self._report(f"HTTP, {geometry.title}")
        num_clients = choose_client_processes(plan.rate_qps, plan.concurrency, search=plan.search)
        plan, maker = replace(plan, client_processes=num_clients), self._maker(geometry, self._seed)
        run = LoadRun(LoadTarget(self._url), maker, plan, self._report, server_config={})
        before = self._stats()
        result = run.run()
        after = self._stats()
        computed, padded = (after[name] - before[name] for name in ("tokens_computed", "tokens_padded"))
        return Phase(result, computed / padded if padded else 0.0)

    def _maker(self, geometry: Geometry, seed: int) -> RequestMaker:
        vocab_size = self._scale.model.vocab_size
        described = LoadGeometry(
            query_tokens=geometry.query_tokens,
            num_items=geometry.items,
            item_tokens=geometry.item_tokens,
            label_token_ids=choose_labels(None, vocab_size),
            vocab_size=vocab_size,
            distinct_queries=0,
        )
        return RequestMaker(described, seed)

    def _stats(self) -> dict[str, Any]:
        with urlopen(f"{self._url}/server_info") as answer:
            stats: dict[str, Any] = json.load(answer)["stats"]
        return stats
