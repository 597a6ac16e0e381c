"""Requests: all of one shape, at random times, some queries far oftener than others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixwise.engine.prefix_cache import Key, block_keys
from prefixwise.plan.long_items import prefix_block_starts


@dataclass(frozen=True)
class Traffic:
    """What comes, and how much of it."""

    query_tokens: int = 2000
    items: int = 500
    item_tokens: int = 20
    num_queries: int = 5000  # that there are
    skew: float = 0.9  # of Zipf's law: the n-th query comes as often as n ** -skew
    requests_per_second: float = 100.0
    seconds: float = 20.0

    @property
    def title(self) -> str:
        return f"{self.query_tokens} + {self.items} x {self.item_tokens}"

    @property
    def request_item_tokens(self) -> int:
        return self.items * self.item_tokens

    @property
    def request_tokens(self) -> int:
        return self.query_tokens + self.request_item_tokens


@dataclass(eq=False)
class Request:
    """One, and what became of it."""

    arrived: float
    query: int
    front: int
    done: float = 0.0  # when it was answered
    hit_tokens: int = 0
    attempts: int = 0


def make_requests(traffic: Traffic, num_fronts: int, seed: int) -> list[Request]:
    """In the order of their arrival."""
    random = np.random.default_rng(seed)
    count = int(traffic.requests_per_second * traffic.seconds)
    times = np.cumsum(random.exponential(1 / traffic.requests_per_second, count))
    weights = np.arange(1, traffic.num_queries + 1) ** -traffic.skew
    queries = random.choice(traffic.num_queries, count, p=weights / weights.sum())
    fronts = random.integers(num_fronts, size=count)
    return [
        Request(time, query, front)
        for time, query, front in zip(times.tolist(), queries.tolist(), fronts.tolist(), strict=True)
    ]


def route_key(query: int) -> bytes:
    """What the front makes of the query."""
    return f"query {query}".encode()


class QueryBlocks:
    """The keys of each query's blocks, as the engine makes them of its tokens."""

    def __init__(self, query_tokens: int) -> None:
        self._query_tokens = query_tokens
        self._keys: dict[int, tuple[Key, ...]] = {}

    def keys(self, query: int) -> tuple[Key, ...]:
        if query not in self._keys:
            starts = prefix_block_starts(self._query_tokens)
            self._keys[query] = block_keys(np.full(self._query_tokens, query, np.int32), starts)
        return self._keys[query]
