"""How many replicas there should be: as many as the waiting tokens need, by a target for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

QUEUED_TOKENS = "queued_tokens"  # what replicas call their figure


def desired_replicas(queued_tokens: float, target_per_replica: float) -> int:
    """Enough that each has at most the target waiting; at least one."""
    return max(1, math.ceil(queued_tokens / target_per_replica))


class QueuedTokensPolicy:
    """Ray Serve's autoscaling policy. Delays, factors and bounds are Serve's own and hold around it.

    Serve sends this class to its controller by value: all that it needs is in this file.
    """

    def __init__(self, target_queued_tokens: float) -> None:
        self._target = target_queued_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """From what the replicas last said; a replica that has said nothing yet has nothing waiting."""
        by_replica: Mapping[Any, float] = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
        return desired_replicas(sum(by_replica.values()), self._target), {}
