"""Token counts that a forward may have. Padding to one of them bounds the shapes that a device ever sees."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from prefixwise.backends.base import BackendInfo


@dataclass(frozen=True)
class Buckets:
    """Ascending token counts."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.sizes and all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False)), self.sizes

    @classmethod
    @lru_cache(maxsize=16)
    def multiples(cls, step: int, largest: int) -> Buckets:
        """step, 2 step, ... up to the first that is at least `largest`."""
        return cls(tuple(range(step, largest + step, step)))

    @classmethod
    def of(cls, backend: BackendInfo) -> Buckets:
        """Those that the backend pads its forwards to."""
        if backend.token_buckets:
            return cls(backend.token_buckets)
        return cls.multiples(backend.token_multiple, backend.token_budget)

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def fit(self, num_tokens: int) -> int:
        """The smallest bucket that holds so many tokens; above the largest, a multiple of the smallest."""
        if num_tokens > self.largest:
            return -(-num_tokens // self.sizes[0]) * self.sizes[0]
        return self.sizes[bisect_left(self.sizes, num_tokens)]
