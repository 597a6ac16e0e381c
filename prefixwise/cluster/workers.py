"""Which cluster, how many workers, and what each reserves. Pure: Ray is not imported here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefixwise.contract.errors import BatchError

Resources = Mapping[str, float]  # what a node has, or a worker reserves


@dataclass(frozen=True)
class WorkerOptions:
    """Of all workers of a job."""

    address: str  # auto: the cluster that this machine is part of
    min_workers: int | None = None  # None: as many as fit
    max_workers: int | None = None
    num_cpus: float | None = None  # of each worker; None: 1, or what Ray takes beside other devices
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def cpus(self) -> float | None:
        """None leaves it to Ray, which advises against a number beside GPUs."""
        return 1.0 if self.num_cpus is None and not self.num_gpus and not self.resources else self.num_cpus

    def pool(self, nodes: Sequence[Resources], num_parts: int) -> tuple[int, int]:
        """The fewest and the most workers, never more than parts. Raises BatchError where not one of them fits."""
        fit = self.most_that_fit(nodes)
        if fit < 1:
            they_have = "; ".join(sorted({_shown(node) for node in nodes if _plain(node)})) or "nothing"
            raise BatchError(f"a worker needs {_shown(self._needs())}, and no node has that: they have {they_have}")
        least = min(self.min_workers or 1, max(1, num_parts))
        most = min(self.max_workers or min(fit, max(1, num_parts)), max(1, num_parts))
        return least, max(least, most)

    def most_that_fit(self, nodes: Sequence[Resources]) -> int:
        """A worker is on one node, so what two nodes have left over is no room."""
        needs = self._needs()
        return sum(_times(needs, node) for node in nodes) if needs else 1

    def _needs(self) -> dict[str, float]:
        needs = {"CPU": self.cpus or 0.0, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in needs.items() if amount}


def parse_count(text: str | None) -> tuple[int | None, int | None]:
    """`4` or `1:8`. Raises BatchError."""
    if text is None:
        return None, None
    least, colon, most = text.partition(":")
    most = most if colon else least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise BatchError(f"workers must be a number like 4, or a range like 1:8, got {text!r}")
    return int(least), int(most)


def parse_resources(texts: Sequence[str]) -> dict[str, float]:
    """`TPU=4`. Raises BatchError."""
    resources = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = math.nan
        if not name or not resources[name] > 0 or math.isinf(resources[name]):
            raise BatchError(f"a worker's resource must be like TPU=4, got {text!r}")
    return resources


def _times(needs: Resources, node: Resources) -> int:
    return math.floor(min(node.get(name, 0.0) / amount for name, amount in needs.items()))


def _shown(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(_plain(resources).items())) or "nothing"


def _plain(resources: Resources) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if ":" not in name and "memory" not in name}
