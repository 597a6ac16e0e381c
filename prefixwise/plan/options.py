"""The options that shape a plan, with every `auto` settled before the first request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from prefixwise.contract.errors import InvalidValueError
from prefixwise.forward.backend import BackendInfo

MaskOption = Literal["auto", "dense", "segment"]

DENSE_MAX_ROW_LEN = 16_384  # tokens of a packed row: its dense mask is the square of that, 256 MiB


@dataclass(frozen=True)
class PlanOptions:
    """How requests are cut into forwards. `resolve()` settles the token budget for a device."""

    algorithm: str = "auto"  # what `auto` in a request means: auto, serial, packed or prefill_extend
    # Most items in one packed row, or in one forward of the others. 0: no bound; None: from the geometry.
    chunk_size: int | None = None
    mask: MaskOption = "auto"
    segment_fallback_threshold: int = 32_768  # `auto` mask: segment up to this packed length
    token_budget: int | None = None  # most tokens in one forward, unless one context alone is longer

    def __post_init__(self) -> None:
        _check(self.algorithm in ("auto", "serial", "packed", "prefill_extend"), "algorithm", self.algorithm)
        _check(self.mask in ("auto", "dense", "segment"), "mask", self.mask)
        _check(self.chunk_size is None or _is_at_least(self.chunk_size, 0), "chunk_size", self.chunk_size)
        _check(self.token_budget is None or _is_at_least(self.token_budget, 1), "token_budget", self.token_budget)
        threshold = self.segment_fallback_threshold
        _check(_is_at_least(threshold, 0), "segment_fallback_threshold", threshold)

    def resolve(self, backend: BackendInfo) -> PlanOptions:
        if self.token_budget is not None:
            return self
        return replace(self, token_budget=backend.token_budget)


_EXPECTED = {
    "algorithm": "auto, serial, packed or prefill_extend",
    "mask": "auto, dense or segment",
    "chunk_size": "a whole number of 0 or more items",
    "token_budget": "a whole number of at least 1 token",
    "segment_fallback_threshold": "a whole number of 0 or more tokens",
}


def _is_at_least(value: object, least: int) -> bool:
    """Callers without a type checker send strings and floats, too."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(is_legal: bool, name: str, got: object) -> None:
    if not is_legal:
        message = f"{name} must be {_EXPECTED[name]}, got {got!r}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
