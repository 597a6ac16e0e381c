"""What the scheduler has done so far, for metrics and `/server_info`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine's metrics. Counters run from the start."""

    running_requests: int  # with a part launched
    waiting_requests: int
    running_tokens: int  # still to be computed
    waiting_tokens: int
    tokens_per_second: float  # measured while the device had enough to do; 0.0: unknown
    max_step_tokens: int  # of a step now, without attention: those of its time
    cost_source: str  # of the next three: static, measured or calibrated
    seconds_per_forward: float
    seconds_per_token: float
    seconds_per_pair: float  # of a token and another that it attends to
    refused_requests: dict[str, int]  # calls that were not admitted, by the error's code
    shed_requests: int  # dropped before their deadline, which they could not meet any more
    steps: int
    forwards: int
    device_seconds: float  # that the device spent on steps
    tokens_computed: int
    tokens_padded: int  # the same, with the padding of every forward
    items_scored: int
    failed_steps: int
    reruns: int  # requests that were run again after a step with a part of them had failed
    prefix_queried_tokens: int  # prefix tokens looked up in the KV cache
    prefix_hit_tokens: int  # of these, cache hits
    cached_blocks: int
    used_blocks: int  # of these, reserved, in use or pinned
    pinned_blocks: int
    cache_capacity_blocks: int
    block_bytes: int

    @property
    def fill_ratio(self) -> float:
        return self.tokens_computed / self.tokens_padded if self.tokens_padded else 1.0


@dataclass
class Counters:
    """Counters that only grow. Only the scheduler's thread writes them."""

    steps: int = 0
    forwards: int = 0
    device_seconds: float = 0.0
    tokens_computed: int = 0
    tokens_padded: int = 0
    items_scored: int = 0
    shed_requests: int = 0
    failed_steps: int = 0
    reruns: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
