"""How much `validate self` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EMBEDDED = "embedded"
ARTIFACT_NAMES = {"jax": "jax", "torch": "pytorch"}  # what the artifacts call our backends


@dataclass(frozen=True)
class SelfCheckOptions:
    """How much is done."""

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
        """For what is about something else: PyTorch, which compiles nothing before it is ready."""
        return self.backends[-1] if "torch" not in self.backends else "torch"

    @property
    def compares_backends(self) -> bool:
        return len(self.backends) == 2

    @property
    def geometry(self) -> tuple[str, ...]:
        """As flags."""
        return (
            *("--query-tokens", str(self.query_tokens)),
            *("--num-items", str(self.num_items)),
            *("--item-tokens", str(self.item_tokens)),
        )

    def file(self, name: str) -> str:
        return str(self.output_dir / name)
