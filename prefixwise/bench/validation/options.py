"""What the validation can be told: how much to ask of a server, and how far is far enough. Light, for command lines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

ITEM_COUNTS = (1, 8, 32, 64, 128)


@dataclass(frozen=True)
class EvaluationShape:
    """How much is asked of the server."""

    item_counts: tuple[int, ...] = ITEM_COUNTS
    timed_runs: int = 5
    warmup_runs: int = 1
    query_tokens: int = 256
    item_tokens: int = 20
    seed: int = 0

    def settings(self, vocab_size: int) -> dict[str, Any]:
        """As the artifact tells it."""
        return {**asdict(self), "item_counts": list(self.item_counts), "vocab_size": vocab_size}


@dataclass(frozen=True)
class GateBounds:
    """How far is far enough."""

    max_same_length_isolation: float = 0.0
    max_changed_length_isolation: float = 0.0
    max_equivalence: float = 0.02
    min_speedup: float = 3.0
    speedup_items: int = 32
    max_parity: float = 0.02
