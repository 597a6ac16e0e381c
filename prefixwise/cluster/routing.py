"""Which replica a request goes to, and how many replicas there should be. Pure: no Ray.

A request goes to the replica that its query belongs to, unless that one is overloaded. Every query has an order of all
replicas, made by hashing the two together (rendezvous hashing). Its first replica is its home: all its requests go
there, so its prefix is computed once and is a cache hit afterwards. There is no table: every front computes the same
order, and when a replica comes or goes, only the queries that it is or was first for move.

A replica is overloaded when more tokens wait there than `max_wait_steps` of its steps compute, and more than `share`
times the average. Its requests then go to the next in their order, so that a query that is too hot for one replica
settles on two, not on all. (Consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam, 2016.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from prefixwise.contract.errors import RequestError

if TYPE_CHECKING:
    from prefixwise.cluster.exchange import HttpRequest


@dataclass(frozen=True)
class RoutingOptions:
    """When a request goes to another replica than its home."""

    max_wait_steps: float = 2.0  # steps that a request may wait for its home
    share: float = 1.25  # of the average load, which a home may carry before requests go elsewhere

    def __post_init__(self) -> None:
        if not self.max_wait_steps >= 0:
            raise ValueError(f"max_wait_steps must be 0 steps or more, got {self.max_wait_steps!r}")
        if not self.share >= 1:
            raise ValueError(f"share must be 1 or more times the average load, got {self.share!r}")


@dataclass(frozen=True)
class ReplicaLoad:
    """The load of one replica."""

    tokens: int  # queued or running
    step_tokens: int  # computed by one of its steps


def rank_replicas(key: bytes, replicas: Sequence[str]) -> list[str]:
    """All replicas in the order in which this query prefers them; the same in every process."""
    return sorted(replicas, key=lambda name: blake2b(key + b"\0" + name.encode(), digest_size=8).digest())


def estimate_tokens(sent: Mapping[str, int], reported: Mapping[str, int]) -> dict[str, int]:
    """One front's estimate of the tokens on each replica that `reported` names.

    The tokens that the front has `sent` and that are not scored yet are current, but they are only a part. The tokens
    that replicas have `reported` are all, but a second old. So the first give the distribution, and the sum of the
    second gives the total. (With an old number of a single replica, all fronts would leave it and come back together.)
    """
    own = sum(sent.get(name, 0) for name in reported)
    scale = max(1.0, sum(reported.values()) / own) if own else 1.0
    return {name: round(sent.get(name, 0) * scale) for name in reported}


def order_replicas(key: bytes | None, loads: Mapping[str, ReplicaLoad], options: RoutingOptions) -> list[str]:
    """All replicas, best first. A request without a key, which no cache can help, goes to the least loaded.

    Overloaded replicas come last, the least loaded of them first. Ties keep the order of `loads`.
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
    """Replicas that requests avoid; never all, because the least loaded is at most average."""
    if not loads:
        return frozenset()
    bound = options.share * sum(load.tokens for load in loads.values()) / len(loads)
    return frozenset(
        name
        for name, load in loads.items()
        if load.tokens > bound and load.tokens > options.max_wait_steps * load.step_tokens
    )


# Routes whose prefix consists of a query, under one of its names, and these fields.
_KEYED_PATHS = frozenset(
    {
        *("/v1/score", "/score", "/generative_scoring", "/v1/prefix", "/v1/judge"),
        *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/ranking", "/v1/reranking"),
    }
)
_QUERY_FIELDS = ("query", "text_1", "queries", "data_1", "messages")
_PREFIX_FIELDS = ("profile", "instruction")
_ITEM_FIELDS = ("items", "documents", "texts", "text_2", "data_2", "input", "passages", "messages")
_BYTES_PER_TOKEN = 4  # of text, approximately
_NUMBERS_PER_BYTE = 0.2  # of token ids as JSON: four digits and a comma


@dataclass(frozen=True)
class RequestKey:
    """A request's routing key and approximate size: all that a front reads of a body.

    The front does not validate. An illegal body has no key, goes to any replica, and gets that replica's error.
    """

    key: bytes | None = None  # equal for requests that share a prefix; None: any replica
    tokens: int = 0  # approximate


def key_of(request: HttpRequest) -> RequestKey:
    """The key is a hash of the query and the other fields of the prefix; item-first requests have none, and neither
    have calls with many queries. Of a large body it is work for a thread."""
    import orjson  # of the extra `server`, which the command line can do without

    from prefixwise.server.json_body import parse_json

    if request.method != "POST" or request.path.rstrip("/") not in _KEYED_PATHS:
        return RequestKey()
    try:
        body = parse_json(request.body)
    except (orjson.JSONDecodeError, RequestError):  # the replica says what is wrong
        return RequestKey()
    if not isinstance(body, dict):
        return RequestKey()
    tokens = _approximate_tokens(request.body, body)
    query = _query(body)
    if query is None or body.get("item_first") is True:
        return RequestKey(None, tokens)
    try:
        prefix = orjson.dumps([query, *(body.get(name) for name in _PREFIX_FIELDS)])
    except TypeError:  # nested deeper than orjson writes
        return RequestKey(None, tokens)
    return RequestKey(blake2b(prefix, digest_size=16).digest(), tokens)


def _approximate_tokens(raw: bytes, body: Mapping[str, object]) -> int:
    """By the size of the body: fronts have no tokenizer."""
    is_text = isinstance(_query(body), str) or any(_holds_text(body.get(name)) for name in _ITEM_FIELDS)
    return int(len(raw) / _BYTES_PER_TOKEN if is_text else len(raw) * _NUMBERS_PER_BYTE)


def _query(body: Mapping[str, object]) -> object:
    """The one query of the body; None if it has none, or several."""
    sent = next((body[name] for name in _QUERY_FIELDS if body.get(name) is not None), None)
    if isinstance(sent, list) and sent and isinstance(sent[0], str):
        return sent[0] if len(sent) == 1 else None
    return sent.get("text") if isinstance(sent, dict) else sent


def _holds_text(items: object) -> bool:
    return isinstance(items, list) and bool(items) and isinstance(items[0], (str, dict))


QUEUED_TOKENS = "queued_tokens"  # the key of a replica's report to routers and autoscaler


def desired_replicas(queued_tokens: float, target_per_replica: float) -> int:
    """Enough that each has at most the target queued; at least one."""
    return max(1, math.ceil(queued_tokens / target_per_replica))


class QueuedTokensPolicy:
    """Ray Serve's autoscaling policy. Serve applies its own delays, factors and bounds to the result.

    Serve sends this class to its controller by value, so it uses only this file.
    """

    def __init__(self, target_queued_tokens: float) -> None:
        self._target = target_queued_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """From the replicas' last reports; a replica without a report counts as idle."""
        by_replica: Mapping[Any, float] = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
        return desired_replicas(sum(by_replica.values()), self._target), {}
