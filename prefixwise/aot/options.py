"""What `prefixwise aot` lets people choose."""

from __future__ import annotations

from dataclasses import dataclass

from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.request import Algorithm
from prefixwise.launch.options import EngineOptions
from prefixwise.plan.options import MaskOption

_NO_BOUND = 1 << 60


@dataclass(frozen=True)
class AotOptions:
    """A slice of TPUs, a model, a request, and how it is to be computed. The contract's, unless told otherwise."""

    model: str = ""
    topology: str = "v6e:1x1"
    dtype: str = "bfloat16"
    tp_size: int | None = None  # chips that share every layer; None: all that the copies leave
    dp_size: int = 1
    prefix_tokens: int = 2000
    items: int = 500
    item_tokens: int = 20
    algorithm: Algorithm = "auto"
    mask: MaskOption = "auto"
    chunk_size: int | None = None
    prefix_cache_bytes: int | None = None
    attention: str | None = None

    def __post_init__(self) -> None:
        for name in ("prefix_tokens", "items", "item_tokens"):
            if getattr(self, name) < 1:
                message = f"{name} must be at least 1, got {getattr(self, name)}"
                raise InvalidValueError(message, code=f"invalid_{name}", param=name)

    def engine_options(self, num_chips: int) -> EngineOptions:
        """As a server on the slice would be started."""
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
