"""Metrics for Prometheus: of requests (the middleware), of scores (`scoring.py`) and of the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixwise.engine.health import EngineState

if TYPE_CHECKING:
    from prefixwise.engine.engine import ScoringEngine

log = logging.getLogger("prefixwise")

PREFIX = "prefixwise:"
OTHER_ROUTE = "other"  # the label of all unknown paths, so that clients cannot create labels

_COUNTS = ("counter", "histogram")  # the types of metrics that never fall
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """One server's metrics, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()  # of this process
        self._engine: EngineCollector | None = None
        self._lock = threading.Lock()
        self._before: list[Metric] = []  # the counts of processes whose place this one has taken
        self._kept: Path | None = None  # the counts that were shown last, for the process that takes its place
        self._can_keep = True
        self._restarts: Callable[[], Mapping[str, int]] | None = None

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self._registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(PREFIX + name, text, labels, registry=self._registry, buckets=_SECONDS)

        self._requests = counter("requests_total", "Requests by route and status.", "route", "status")
        self._request_seconds = histogram("request_seconds", "From a request's arrival to its answer.", "route")
        self._queue_seconds = histogram("queue_seconds", "From a request's submission to its first forward pass.")
        self._items = counter("items_scored_total", "Items that were scored.")
        self._tokens = counter("tokens_scored_total", "Tokens of scored requests: the query once, and all items.")
        self._algorithms = counter("algorithm_chosen_total", "Requests by the algorithm that runs them.", "algorithm")
        self._connections = Gauge(PREFIX + "connections", "Open connections.", registry=self._registry)
        self._bodies = Gauge(
            PREFIX + "body_bytes", "Memory of large bodies and responses (--max-body-memory).", registry=self._registry
        )
        self._refused = counter(
            "connections_refused_total", "Connections refused, or closed before a response, by reason.", "reason"
        )
        # Looking a label up in prometheus_client costs as much as counting.
        self._of_request: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._of_algorithm: dict[str, Counter] = {}

    def watch(self, engine: ScoringEngine) -> None:
        """Show the metrics of this engine, too."""
        self._engine = EngineCollector(engine)

    def watch_connections(self, number: Callable[[], int]) -> None:
        """Show how many connections are open."""
        self._connections.set_function(number)

    def watch_bodies(self, number: Callable[[], int]) -> None:
        """Show how many bytes bodies and responses take."""
        self._bodies.set_function(number)

    def watch_log(self, number: Callable[[], int]) -> None:
        """Show how many lines the log has lost."""
        self._registry.register(LogCollector(number))

    def watch_restarts(self, numbers: Callable[[], Mapping[str, int]]) -> None:
        """Show how often a process was started again, by its name. The number is the server's, not this process's."""
        self._restarts = numbers

    def keep_counts(self, file: Path) -> None:
        """Go on from the counts in the file, and keep there what is shown: counts outlive the process that is killed,
        so that the sum over all processes never falls."""
        self._kept = file
        if file.exists():
            self._before = list(_families(file.read_bytes()))

    def count_refused(self, reason: str) -> None:
        """Count a connection that a limit has ended. Reasons are ours, so clients cannot create labels."""
        self._refused.labels(reason).inc()

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered, or whose client has disconnected (499)."""
        found = self._of_request.get((route, status))
        if found is None:
            found = (self._requests.labels(route, str(status)), self._request_seconds.labels(route))
            self._of_request[route, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def count_algorithm(self, algorithm: str) -> None:
        """Count a request that was planned."""
        found = self._of_algorithm.get(algorithm)
        if found is None:
            found = self._of_algorithm[algorithm] = self._algorithms.labels(algorithm)
        found.inc()

    def count_scores(self, num_items: int, num_tokens: int) -> None:
        """Count the items and tokens of a request that was scored."""
        self._items.inc(num_items)
        self._tokens.inc(num_tokens)

    def observe_queue(self, seconds: float) -> None:
        """Record how long a request has waited, also if it failed."""
        self._queue_seconds.observe(seconds)

    def render(self, others: Sequence[bytes] = ()) -> bytes:
        """All metrics in Prometheus' text format. `others`: the snapshots of the server's other processes."""
        families = self._collect()
        if others:
            families = sum_families([families, *map(_families, others)])
        if self._restarts is not None:
            families.append(_restarts_family(self._restarts()))
        return generate_latest(_Collected([*families, *(() if self._engine is None else self._engine.collect())]))

    def snapshot(self) -> bytes:
        """The metrics of this process, for another one to add up. The engine's are not among them."""
        return _dump(self._collect())

    def _collect(self) -> list[Metric]:
        """The metrics of this process and the counts before it. They are kept, as they are shown now."""
        with self._lock:
            families = list(self._registry.collect())
            if self._before:
                families = sum_families([families, self._before])
            if self._kept is not None:
                self._keep(self._kept, families)
        return families

    def _keep(self, file: Path, families: Iterable[Metric]) -> None:
        """Metrics are shown also where they cannot be kept, as on a full disk."""
        partial = file.with_suffix(".partial")
        try:
            partial.write_bytes(_dump(each for each in families if each.type in _COUNTS))
            partial.replace(file)
        except OSError as error:
            if self._can_keep:
                log.warning("the counts of this process would be lost if it ended now: %s: %s", file, error.strerror)
            self._can_keep = False
        else:
            self._can_keep = True


class _Collected(Collector):
    """Metrics that were collected already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """They are written as they are."""
        return self._families


def _restarts_family(numbers: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(
        PREFIX + "process_restarts", "Processes that ended and were started again.", labels=("process",)
    )
    for process, number in numbers.items():
        family.add_metric((process,), number)
    return family


def _dump(families: Iterable[Metric]) -> bytes:
    return orjson.dumps(
        [
            [each.name, each.documentation, each.type, [[s.name, s.labels, s.value] for s in each.samples]]
            for each in families
        ]
    )


def _families(snapshot: bytes) -> Iterator[Metric]:
    for name, text, kind, samples in orjson.loads(snapshot):
        family = Metric(name, text, kind)
        for sample in samples:
            family.add_sample(*sample)
        yield family


def sum_families(processes: Iterable[Iterable[Metric]]) -> list[Metric]:
    """The metrics of all processes as one server's: counts add up, and the time of creation is the earliest one's."""
    summed: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (each for families in processes for each in families):
        summed.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        seen = values.setdefault(family.name, {})
        for sample in family.samples:
            key = (sample.name, tuple(sample.labels.items()))
            before = seen.get(key)
            if before is None:
                seen[key] = sample.value
            else:
                is_time = sample.name.endswith("_created")
                seen[key] = min(before, sample.value) if is_time else before + sample.value
    for name, family in summed.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    return list(summed.values())


class LogCollector(Collector):
    """Reads the number of dropped lines at each scrape."""

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number

    def collect(self) -> Iterator[Metric]:
        """The one counter."""
        yield CounterMetricFamily(
            PREFIX + "log_lines_dropped", "Lines that stderr did not take in time.", self._number()
        )


class EngineCollector(Collector):
    """Reads the engine's counters at each scrape."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering it reads nothing."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One metric family per counter."""
        stats = self._engine.scheduler.stats()

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(PREFIX + name, text, value)

        def counter(name: str, text: str, value: float) -> Metric:
            return CounterMetricFamily(PREFIX + name, text, value)

        yield gauge("requests_running", "Requests that the engine has started.", stats.running_requests)
        yield gauge("requests_waiting", "Requests that the engine has not started.", stats.waiting_requests)
        yield gauge("tokens_running", "Tokens of running requests still to be computed.", stats.running_tokens)
        yield gauge("tokens_waiting", "Tokens of waiting requests.", stats.waiting_tokens)
        yield gauge("tokens_per_second", "Measured token rate of the device; 0: unknown.", stats.tokens_per_second)
        yield gauge("step_tokens_max", "Most tokens of a step: those of its time.", stats.max_step_tokens)
        cost = GaugeMetricFamily(PREFIX + "cost_seconds", "Measured cost of a forward by its parts.", labels=("per",))
        cost.add_metric(("forward",), stats.seconds_per_forward)
        cost.add_metric(("token",), stats.seconds_per_token)
        cost.add_metric(("pair",), stats.seconds_per_pair)
        yield cost
        yield counter("requests_shed", "Requests given up before their deadline.", stats.shed_requests)
        refused = CounterMetricFamily(
            PREFIX + "requests_refused", "Calls that were not admitted, by the error's code.", labels=("code",)
        )
        for code, number in stats.refused_requests.items():
            refused.add_metric((code,), number)
        yield refused
        yield gauge("batch_fill_ratio", "Tokens computed, as a fraction of tokens with padding.", stats.fill_ratio)
        yield counter("device_seconds", "Seconds of forward passes.", stats.device_seconds)
        yield counter("steps_failed", "Steps that failed.", stats.failed_steps)
        yield counter("requests_rerun", "Requests run again after a step that failed.", stats.reruns)
        is_ok = self._engine.scheduler.health.state is EngineState.OK
        text = "1: the engine scores; 0: its device hangs or has failed, or its process is started again."
        yield gauge("engine_healthy", text, is_ok)
        yield counter("prefix_cache_queried_tokens", "Prefix tokens looked up.", stats.prefix_queried_tokens)
        yield counter("prefix_cache_hit_tokens", "Prefix tokens found cached.", stats.prefix_hit_tokens)
        yield counter("compilations", "Programs compiled.", self._engine.backend.num_compilations)
        yield gauge("prefix_cache_blocks", "Cached KV blocks.", stats.cached_blocks)
        yield gauge("prefix_cache_pinned_blocks", "Pinned KV blocks.", stats.pinned_blocks)
        yield gauge("prefix_cache_capacity_blocks", "KV blocks that fit into the cache.", stats.cache_capacity_blocks)
