"""What the scheduler has done so far, for metrics and `/server_info`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """A moment's figures; counters run from the start."""

    running_requests: int  # some part of them has been started
    waiting_requests: int
    running_tokens: int  # still to be computed
    waiting_tokens: int
    steps: int
    forwards: int
    device_seconds: float  # that the scheduler spent on forwards
    tokens_computed: int
    tokens_padded: int  # the same with the padding of every forward
    items_scored: int
    prefix_queried_tokens: int  # tokens of prefixes that were looked for in the cache
    prefix_hit_tokens: int  # and found
    cached_blocks: int
    used_blocks: int  # of these, in use or pinned
    pinned_blocks: int
    cache_capacity_blocks: int
    block_bytes: int

    @property
    def fill_ratio(self) -> float:
        return self.tokens_computed / self.tokens_padded if self.tokens_padded else 1.0


@dataclass
class Counters:
    """What only grows; written by the scheduler's thread alone."""

    steps: int = 0
    forwards: int = 0
    device_seconds: float = 0.0
    tokens_computed: int = 0
    tokens_padded: int = 0
    items_scored: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
