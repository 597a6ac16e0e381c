"""From a run to its figures. The beginning, when caches are empty, does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.cluster_simulation.cluster import Cluster, Setup
from benchmarks.cluster_simulation.policies import Policy
from benchmarks.cluster_simulation.traffic import Request, Traffic
from prefixwise.bench.rules import percentile
from prefixwise.bench.run.load import find_rate

WARM_UP_SHARE = 0.25  # of the time
P99_BOUND_SECONDS = 0.25


@dataclass(frozen=True)
class Figures:
    """Of one run."""

    offered_items_per_second: float
    items_per_second: float  # answered
    hit_rate: float  # tokens of prefixes that were found, of all
    p50_ms: float
    p99_ms: float
    load_spread: float  # the busiest replica's time on its device over the average's

    def to_json(self) -> dict[str, Any]:
        return {name: float(f"{value:.6g}") for name, value in asdict(self).items()}


def simulate(setup: Setup, traffic: Traffic, policy: Policy, seed: int = 0) -> Figures:
    return figures_of(Cluster(setup, traffic, policy, seed).run(), traffic)


def figures_of(cluster: Cluster, traffic: Traffic) -> Figures:
    begin = WARM_UP_SHARE * traffic.seconds
    counted = [request for request in cluster.requests if request.arrived >= begin]
    waits = [1000 * (request.done - request.arrived) for request in counted]
    busy = [replica.busy_seconds for replica in cluster.replicas.values()]
    last = cluster.requests[-1].arrived
    in_time = sum(begin <= request.done <= last for request in cluster.requests)
    return Figures(
        offered_items_per_second=traffic.requests_per_second * traffic.items,
        items_per_second=in_time * traffic.items / (last - begin),
        hit_rate=hit_rate(counted, traffic),
        p50_ms=percentile(waits, 50),
        p99_ms=percentile(waits, 99),
        load_spread=max(busy) * len(busy) / sum(busy),
    )


def hit_rate(requests: Sequence[Request], traffic: Traffic) -> float:
    """Of tokens."""
    return sum(request.hit_tokens for request in requests) / (len(requests) * traffic.query_tokens)


def most_within_bound(
    setup: Setup, traffic: Traffic, make_policy: Callable[[], Policy], seed: int = 0
) -> Figures | None:
    """At the highest rate whose p99 is within the bound, by the search of `bench load`; None where there is none."""
    found: dict[float, Figures] = {}

    async def is_met(rate: float) -> bool:
        found[rate] = simulate(setup, replace(traffic, requests_per_second=rate), make_policy(), seed)
        return found[rate].p99_ms <= 1000 * P99_BOUND_SECONDS

    best = asyncio.run(find_rate(is_met, traffic.requests_per_second, precision=1.03))
    return None if best is None else found[best]
