"""Options of `prefixwise aot`, and the programs that its matrix compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.request import Algorithm
from prefixwise.launch.options import EngineOptions
from prefixwise.plan.algorithms import MaskOption

_NO_BOUND = 1 << 60


@dataclass(frozen=True)
class AotOptions:
    """A slice of TPUs, a model, a request, and how to compute it. The defaults are the contract workload."""

    model: str = ""
    topology: str = "v6e:1x1"
    dtype: str = "bfloat16"
    tp_size: int | None = None  # chips that share every layer; None: all chips of one copy
    dp_size: int = 1
    prefix_tokens: int = 2000
    items: int = 500
    item_tokens: int = 20
    algorithm: Algorithm = "auto"
    mask: MaskOption = "auto"
    chunk_size: int | None = None
    prefix_cache_bytes: int | None = None
    attention: str | None = None
    logprobs: int | None = None  # read items' log-likelihoods and so many of the most likely tokens; None: two labels

    def __post_init__(self) -> None:
        for name in ("prefix_tokens", "items", "item_tokens", "logprobs"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                message = f"{name} must be at least 1, got {getattr(self, name)}"
                raise InvalidValueError(message, code=f"invalid_{name}", param=name)

    def engine_options(self, num_chips: int) -> EngineOptions:
        """The options with which a server on the slice would start."""
        return EngineOptions(
            model=self.model,
            backend="jax",
            device="tpu",
            dtype=self.dtype,
            tp_size=self.tp_size or max(1, num_chips // self.dp_size),
            dp_size=self.dp_size,
            attention=self.attention,
            prefix_cache_bytes=self.prefix_cache_bytes,
            algorithm=self.algorithm,
            mask=self.mask,
            chunk_size=self.chunk_size,
            max_items_per_request=max(self.items, 1),
            max_queued_tokens=_NO_BOUND,
        )


MATRIX_MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct")
MATRIX_TOPOLOGIES = ("v6e:1x1", "v6e:2x2", "v6e:2x4", "v5e:2x2")


@dataclass(frozen=True)
class MatrixCase:
    """One program of a request with the contract's geometry: the largest of its kind."""

    name: str
    options: dict[str, Any]  # fields of `AotOptions`
    kind: Literal["sequences", "prefill", "extend"]


MATRIX_CASES = (
    MatrixCase("packed dense, chunk 32", {"algorithm": "packed", "mask": "dense", "chunk_size": 32}, "sequences"),
    MatrixCase("packed dense, chunk 64", {"algorithm": "packed", "mask": "dense", "chunk_size": 64}, "sequences"),
    MatrixCase("packed segment, chunk 128", {"algorithm": "packed", "mask": "segment", "chunk_size": 128}, "sequences"),
    MatrixCase("packed segment, chunk 500", {"algorithm": "packed", "mask": "segment", "chunk_size": 500}, "sequences"),
    MatrixCase("prefill", {"algorithm": "prefill_extend"}, "prefill"),
    MatrixCase("extend 500", {"algorithm": "prefill_extend"}, "extend"),
)
