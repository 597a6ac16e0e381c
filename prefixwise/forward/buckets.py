"""Buckets: token counts that forwards are padded to, so that a device sees few shapes, and the choice of one."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, repeat, takewhile
from operator import mul

from prefixwise.forward.backend import BackendInfo


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
        """The buckets that the backend pads its forwards to."""
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


def token_buckets(
    largest: int, *, smallest: int, multiple: int | None = None, step: int | None = None, steps_per_doubling: int = 4
) -> tuple[int, ...]:
    """Ascending multiples of `multiple`, or else of `smallest`, which is one; the last holds `largest` tokens.

    Each is `step` times the one before. Without `step`, there are `steps_per_doubling` of them from one power of two to
    the next, as far as multiples allow.
    """
    multiple = multiple or smallest
    last = max(smallest, -(-largest // multiple) * multiple)
    if step is not None:
        sizes = accumulate(repeat(step), mul, initial=smallest)
    else:
        sizes = accumulate(repeat(multiple), partial(_next_fine, steps_per_doubling), initial=smallest)
    return (*takewhile(lambda size: size < last, sizes), last)


def _next_fine(steps_per_doubling: int, size: int, multiple: int) -> int:
    """The size plus a fraction of the power of two below it, in whole multiples."""
    octave = 1 << (size.bit_length() - 1)
    return size + max(multiple, octave // steps_per_doubling // multiple * multiple)
