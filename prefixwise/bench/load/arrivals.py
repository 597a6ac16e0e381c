"""When requests are to be sent: decided before the first one is, so that no answer can change it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PhaseLength:
    """How long a phase lasts: whichever comes first, where both are given."""

    seconds: float | None = None
    requests: int | None = None

    def __post_init__(self) -> None:
        assert self.seconds is not None or self.requests is not None

    def is_over(self, elapsed: float, num_requests: int) -> bool:
        """May another request not begin any more?"""
        too_late = self.seconds is not None and elapsed >= self.seconds
        return too_late or (self.requests is not None and num_requests >= self.requests)


@dataclass(frozen=True)
class Schedule:
    """Send times in seconds from the start, ascending, and how long the process that made them was watched."""

    times: tuple[float, ...]
    send_sec: float


def poisson_schedule(rate_qps: float, length: PhaseLength, seed: int) -> Schedule:
    """Arrivals of many clients that do not know of each other: the gaps are exponential."""
    rng = np.random.default_rng([seed, 1])
    times: list[float] = []
    time = float(rng.exponential(1 / rate_qps))
    while not length.is_over(time, len(times)):
        times.append(time)
        time += float(rng.exponential(1 / rate_qps))
    ended_by_count = length.requests is not None and len(times) == length.requests
    return Schedule(tuple(times), times[-1] if ended_by_count and times else length.seconds or 0.0)
