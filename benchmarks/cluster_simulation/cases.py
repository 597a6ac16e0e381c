"""What is simulated: each case gives the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.cluster_simulation.cluster import ESTIMATES, Cluster, Loss, Scaling, Setup
from benchmarks.cluster_simulation.figures import P99_BOUND_SECONDS, figures_of, hit_rate, most_within_bound, simulate
from benchmarks.cluster_simulation.policies import Policy, all_policies, prefixwise
from benchmarks.cluster_simulation.traffic import Traffic, route_key
from prefixwise.bench.rules import percentile
from prefixwise.cluster.routing import RoutingOptions, rank_replicas

Row = dict[str, Any]

_SKEWS = (0.0, 0.6, 0.9, 1.2, 1.5)
_FRONTS = (1, 2, 8, 32)
_MAX_WAIT_STEPS = (0.0, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Scale:
    """How much of it."""

    setup: Setup
    contract: Traffic  # many items a query: the prefix is an eighth of the work
    few_items: Traffic  # few items a query: the prefix is most of it
    loss_seconds: float
    million_replicas: Sequence[int]
    million: float = 1e6
    seed: int = 0


FULL = Scale(
    Setup(),
    Traffic(requests_per_second=200),
    Traffic(items=10, requests_per_second=1600, seconds=5),
    loss_seconds=80.0,
    million_replicas=(56, 60, 64, 72, 80),
)
TINY = Scale(
    Setup(replicas=4),
    Traffic(num_queries=500, requests_per_second=100, seconds=4),
    Traffic(items=10, num_queries=500, requests_per_second=400, seconds=2),
    loss_seconds=12.0,
    million_replicas=(4,),
    million=4e4,
)


def policies(scale: Scale) -> list[Row]:
    """The most items per second with a p99 within the bound."""
    return [
        {"traffic": title, "policy": name, **_most(scale, traffic, partial(_policy, scale, name))}
        for title, traffic in _both(scale)
        for name in all_policies(scale.seed)
    ]


def max_wait_steps(scale: Scale) -> list[Row]:
    """The same, by when a home is left: after how many steps."""
    return [
        {"traffic": title, "max_wait_steps": steps, **_most(scale, traffic, partial(prefixwise, RoutingOptions(steps)))}
        for title, traffic in _both(scale)
        for steps in _MAX_WAIT_STEPS
    ]


def _both(scale: Scale) -> list[tuple[str, Traffic]]:
    return [(traffic.title, traffic) for traffic in (scale.contract, scale.few_items)]


def _policy(scale: Scale, name: str) -> Policy:
    return all_policies(scale.seed)[name]


def _most(scale: Scale, traffic: Traffic, make_policy: Callable[[], Policy]) -> Row:
    found = most_within_bound(scale.setup, traffic, make_policy, scale.seed)
    return {} if found is None else found.to_json()


def skew(scale: Scale) -> list[Row]:
    """One rate, hotter and hotter queries. The hottest is so much of all traffic."""
    rows = []
    for value in _SKEWS:
        traffic = replace(scale.contract, skew=value)
        hottest = 1 / sum(n**-value for n in range(1, traffic.num_queries + 1))
        for name, policy in all_policies(scale.seed).items():
            figures = simulate(scale.setup, traffic, policy, scale.seed)
            rows.append({"skew": value, "hottest": round(hottest, 4), "policy": name, **figures.to_json()})
    return rows


def fronts(scale: Scale) -> list[Row]:
    """The same traffic through more fronts, by how these make one load of what they sent and what they heard."""
    return [
        {
            "fronts": number,
            "estimate": estimate,
            **simulate(
                replace(scale.setup, fronts=number, estimate=estimate),
                scale.contract,
                prefixwise(RoutingOptions()),
                scale.seed,
            ).to_json(),
        }
        for number in _FRONTS
        for estimate in ESTIMATES
    ]


def loss(scale: Scale) -> list[Row]:
    """A replica dies at 30 % of the time; another, empty, is there after a third of it."""
    seconds = scale.loss_seconds
    traffic = replace(scale.contract, seconds=seconds, requests_per_second=0.9 * scale.contract.requests_per_second)
    at, back_after = 0.3 * seconds, seconds / 3
    setup = replace(scale.setup, loss=Loss(at, back_after))
    cluster = Cluster(setup, traffic, prefixwise(RoutingOptions()), scale.seed).run()
    before = [f"replica-{number}" for number in range(setup.replicas)]
    without, after = before[1:], list(cluster.replicas)
    phases = (
        ("before", seconds * 0.15, at, 0.0),
        ("the first tenth without it", at, at + seconds / 10, moved_share(before, without, traffic)),
        ("then, without it", at + seconds / 10, at + back_after, 0.0),
        (
            "the first tenth with another",
            at + back_after,
            at + back_after + seconds / 10,
            moved_share(without, after, traffic),
        ),
        ("then", at + back_after + seconds / 10, seconds, 0.0),
    )
    return [_phase(cluster, traffic, *phase) for phase in phases]


def moved_share(before: Sequence[str], after: Sequence[str], traffic: Traffic) -> float:
    """Of all queries, those that have another home than before."""
    keys = [route_key(query) for query in range(traffic.num_queries)]
    return sum(rank_replicas(key, before)[0] != rank_replicas(key, after)[0] for key in keys) / len(keys)


def _phase(cluster: Cluster, traffic: Traffic, title: str, begin: float, end: float, moved: float) -> Row:
    requests = [request for request in cluster.requests if begin <= request.arrived < end]
    waits = [1000 * (request.done - request.arrived) for request in requests]
    return {
        "phase": title,
        "seconds": f"{begin:.0f} - {end:.0f}",
        "queries_moved": round(moved, 4),
        "sent_again": sum(request.attempts > 1 for request in requests),
        "hit_rate": round(hit_rate(requests, traffic), 4),
        "p50_ms": round(percentile(waits, 50), 1),
        "p99_ms": round(percentile(waits, 99), 1),
    }


def million(scale: Scale) -> list[Row]:
    """A million items per second, the queries as many for each replica as above: how many replicas?"""
    rows = []
    for replicas in scale.million_replicas:
        share = replicas / scale.setup.replicas
        traffic = replace(
            scale.contract,
            requests_per_second=scale.million / scale.contract.items,
            num_queries=int(scale.contract.num_queries * share),
            seconds=min(15.0, scale.contract.seconds),
        )
        setup = replace(scale.setup, replicas=replicas, fronts=max(1, replicas // 8))
        for name in ("prefixwise", "random"):
            figures = simulate(setup, traffic, all_policies(scale.seed)[name], scale.seed)
            is_met = figures.p99_ms <= 1000 * P99_BOUND_SECONDS
            rows.append(
                {
                    "replicas": replicas,
                    "fronts": setup.fronts,
                    "policy": name,
                    "within_bound": is_met,
                    **figures.to_json(),
                }
            )
    return rows


def autoscale(scale: Scale) -> list[Row]:
    """More than twice what the first replicas take, and ten seconds of waiting before any is added."""
    setup = replace(scale.setup, replicas=max(1, scale.setup.replicas // 4))
    setup = replace(setup, scaling=Scaling(most=scale.setup.replicas))
    traffic = replace(
        scale.contract,
        seconds=4 * scale.contract.seconds,
        requests_per_second=0.75 * scale.contract.requests_per_second,
    )
    cluster = Cluster(setup, traffic, prefixwise(RoutingOptions()), scale.seed).run()
    last = cluster.requests[-len(cluster.requests) // 10 :]
    waits = [1000 * (request.done - request.arrived) for request in last]
    return [
        {
            "replicas_at_first": setup.replicas,
            "replicas_at_last": len(cluster.replicas),
            "added_at_seconds": round(cluster.sizes[-1][0], 1),
            "p99_ms_of_all": round(figures_of(cluster, traffic).p99_ms, 1),
            "p99_ms_of_the_last_tenth": round(percentile(waits, 99), 1),
        }
    ]


CASES: dict[str, Callable[[Scale], list[Row]]] = {
    "policies": policies,
    "skew": skew,
    "max_wait_steps": max_wait_steps,
    "fronts": fronts,
    "loss": loss,
    "million": million,
    "autoscale": autoscale,
}
