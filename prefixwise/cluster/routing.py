"""Which replica a request goes to: the one that its query belongs to, unless that one is overloaded.

Every query has an order of all replicas, made by hashing the two together (rendezvous hashing). Its first replica is
its home: all its requests go there, so its prefix is computed once and found in that replica's cache. Nobody keeps a
table: every front computes the same order, and when a replica comes or goes, only the queries that it is or was first
for move.

A replica is overloaded when more tokens wait there than `patience` of its steps compute, and more than `share` times
the average. Its requests then go to the next in their order, so that a query that is too hot for one replica settles
on two, not on all. (Consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam, 2016.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True)
class RoutingOptions:
    """When a home is left."""

    patience: float = 2.0  # steps of a replica that a request may wait for its home
    share: float = 1.25  # of the average load, which a home may carry before requests go elsewhere

    def __post_init__(self) -> None:
        if not self.patience >= 0:
            raise ValueError(f"patience must be 0 steps or more, got {self.patience!r}")
        if not self.share >= 1:
            raise ValueError(f"share must be 1 or more times the average load, got {self.share!r}")


@dataclass(frozen=True)
class ReplicaLoad:
    """What is known of one replica."""

    tokens: int  # that are to be computed there
    step_tokens: int  # that one of its steps computes


def rank_replicas(key: bytes, replicas: Sequence[str]) -> list[str]:
    """All of them in the order in which this query prefers them; the same for everybody who asks."""
    return sorted(replicas, key=lambda name: blake2b(key + b"\0" + name.encode(), digest_size=8).digest())


def estimate_tokens(sent: Mapping[str, int], said: Mapping[str, int]) -> dict[str, int]:
    """Tokens to be computed on each replica that `said` names, as one front can know them.

    What it has `sent` and has not got back is of this moment, and a part of the whole; what replicas `said` is the
    whole of a second ago, when other requests were there. So what it sent tells how the tokens lie, and the sum of what
    they said how many there are. (To believe an old figure of a single replica makes every front leave it and come back
    together.)
    """
    own = sum(sent.get(name, 0) for name in said)
    scale = max(1.0, sum(said.values()) / own) if own else 1.0
    return {name: round(sent.get(name, 0) * scale) for name in said}


def order_replicas(key: bytes | None, loads: Mapping[str, ReplicaLoad], options: RoutingOptions) -> list[str]:
    """All replicas, best first. A request without a key (there is nothing to be found in a cache) goes to the idlest.

    Those that are overloaded come last, the least loaded of them first. Of equals the one that `loads` has first.
    """
    by_load = sorted(loads, key=lambda name: loads[name].tokens)
    if key is None:
        return by_load
    overloaded = overloaded_replicas(loads, options)
    return [
        *(name for name in rank_replicas(key, list(loads)) if name not in overloaded),
        *(name for name in by_load if name in overloaded),
    ]


def overloaded_replicas(loads: Mapping[str, ReplicaLoad], options: RoutingOptions) -> frozenset[str]:
    """Those that requests are kept away from; never all, as the least loaded is at most average."""
    if not loads:
        return frozenset()
    bound = options.share * sum(load.tokens for load in loads.values()) / len(loads)
    return frozenset(
        name
        for name, load in loads.items()
        if load.tokens > bound and load.tokens > options.patience * load.step_tokens
    )
