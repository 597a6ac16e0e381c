"""Options of the verbs, checked before anything is opened or started. They need no installed package."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ITEM_COUNTS = (1, 8, 32, 64, 128)


@dataclass(frozen=True)
class EvaluationShape:
    """The size of an evaluation."""

    item_counts: tuple[int, ...] = ITEM_COUNTS
    timed_runs: int = 5
    warmup_runs: int = 1
    query_tokens: int = 256
    item_tokens: int = 20
    seed: int = 0

    def settings(self, vocab_size: int) -> dict[str, Any]:
        """The settings as the artifact has them."""
        return {**asdict(self), "item_counts": list(self.item_counts), "vocab_size": vocab_size}


@dataclass(frozen=True)
class GateBounds:
    """The bounds of the gates."""

    max_same_length_isolation: float = 0.0
    max_changed_length_isolation: float = 0.0
    max_equivalence: float = 0.02
    min_speedup: float = 3.0
    speedup_items: int = 32
    max_parity: float = 0.02


@dataclass(frozen=True)
class QuantizationBounds:
    """How far the scores of a quantised model may be from the reference's."""

    max_abs_diff: float = 0.1
    mean_abs_diff: float = 0.02
    min_rank_correlation: float = 0.95
    min_top_1_agreement: float = 0.75
    min_top_10_agreement: float = 0.8
    max_changed_labels: float = 0.02


EMBEDDED = "embedded"


ARTIFACT_NAMES = {"jax": "jax", "torch": "pytorch"}  # what the artifacts call our backends


@dataclass(frozen=True)
class SelfCheckOptions:
    """The size of a self-check."""

    output_dir: Path
    model: str = EMBEDDED
    backends: tuple[str, ...] = ("jax", "torch")
    dtype: str = "float32"
    query_tokens: int = 128
    num_items: int = 32
    item_tokens: int = 8
    client_chunk_sizes: tuple[int, ...] = (1, 8, 32)
    timed_runs: int = 3
    min_speedup: float = 3.0
    server_flags: tuple[str, ...] = ()

    @property
    def quickest_backend(self) -> str:
        """The backend for steps that do not compare backends: PyTorch starts without compiling."""
        return self.backends[-1] if "torch" not in self.backends else "torch"

    @property
    def compares_backends(self) -> bool:
        return len(self.backends) == 2

    @property
    def geometry(self) -> tuple[str, ...]:
        """The geometry as flags."""
        return (
            *("--query-tokens", str(self.query_tokens)),
            *("--num-items", str(self.num_items)),
            *("--item-tokens", str(self.item_tokens)),
        )

    def file(self, name: str) -> str:
        return str(self.output_dir / name)
