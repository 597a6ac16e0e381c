"""What a peer's process is asked for, whoever it is."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Setting = TypeVar("Setting")


@dataclass(frozen=True)
class Round:
    """One round's work and time."""

    work: float  # items; for GEMMs, floating-point operations
    seconds: float
    scores: list[float] = field(default_factory=list)  # probabilities of the first label, of the first items

    @property
    def rate(self) -> float:
        return self.work / self.seconds


class Peer(ABC):
    """A model that is loaded. `prepare` is called once, then `run` as often as wanted."""

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Warm up, find the best settings; returns versions, settings and what was tried, as plain JSON."""

    @abstractmethod
    def run(self, seed: int) -> Round:
        """One round of the request that the seed draws. Only what a user would wait for is timed."""


def fastest(settings: Iterable[Setting], rate: Callable[[Setting], float]) -> tuple[Setting, dict[str, float]]:
    """The setting with the highest rate, and every rate by its setting; each is told on stderr, as a search is long."""
    rates = {}
    for setting in settings:
        rates[setting] = rate(setting)
        print(f"{rates[setting]:.3f}/s with {setting}", file=sys.stderr, flush=True)
    best = max(rates, key=lambda setting: rates[setting])
    return best, {str(setting): round(each, 3) for setting, each in rates.items()}
