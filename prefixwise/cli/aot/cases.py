"""What the matrix compiles: models, slices, and kinds of programs. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct")
TOPOLOGIES = ("v6e:1x1", "v6e:2x2", "v6e:2x4", "v5e:2x2")


@dataclass(frozen=True)
class Case:
    """One program of a request with the contract's geometry: the largest that it has of its kind."""

    name: str
    options: dict[str, Any]  # fields of `AotOptions`
    kind: Literal["rows", "prefill", "extend"]


CASES = (
    Case("packed dense, chunk 32", {"algorithm": "packed", "mask": "dense", "chunk_size": 32}, "rows"),
    Case("packed dense, chunk 64", {"algorithm": "packed", "mask": "dense", "chunk_size": 64}, "rows"),
    Case("packed segment, chunk 128", {"algorithm": "packed", "mask": "segment", "chunk_size": 128}, "rows"),
    Case("packed segment, chunk 500", {"algorithm": "packed", "mask": "segment", "chunk_size": 500}, "rows"),
    Case("prefill", {"algorithm": "prefill_extend"}, "prefill"),
    Case("extend 500", {"algorithm": "prefill_extend"}, "extend"),
)
