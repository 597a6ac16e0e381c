"""Where a request goes: the product's routing, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from prefixwise.cluster.routing import ReplicaLoad, RoutingOptions, order_replicas, rank_replicas

# From a query's key and the loads that a front knows to a replica's name.
Policy = Callable[[bytes, Mapping[str, ReplicaLoad]], str]


def prefixwise(options: RoutingOptions) -> Policy:
    """The product's: home, unless that is overloaded."""
    return lambda key, loads: order_replicas(key, loads, options)[0]


def home(key: bytes, loads: Mapping[str, ReplicaLoad]) -> str:
    """Home, whatever happens there."""
    return rank_replicas(key, list(loads))[0]


def least_loaded(key: bytes, loads: Mapping[str, ReplicaLoad]) -> str:
    """As the product routes what has no key."""
    return order_replicas(None, loads, RoutingOptions())[0]


def at_random(seed: int) -> Policy:
    """Any."""
    random = Random(seed)
    return lambda key, loads: random.choice(list(loads))


def all_policies(seed: int, options: RoutingOptions | None = None) -> dict[str, Policy]:
    """Made anew for every run, so that no run depends on those before it."""
    return {
        "prefixwise": prefixwise(options or RoutingOptions()),
        "home": home,
        "least loaded": least_loaded,
        "random": at_random(seed),
    }
