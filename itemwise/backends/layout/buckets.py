"""The numbers of tokens that programs are compiled or recorded for: numpy-free, shared by the backends."""

from __future__ import annotations

from itertools import accumulate, repeat, takewhile
from operator import mul

_STEPS_PER_DOUBLING = 4


def token_buckets(largest: int, *, smallest: int, step: int | None = None) -> tuple[int, ...]:
    """Ascending multiples of `smallest`; the last holds `largest` tokens.

    Each is `step` times the one before; with None, at most a quarter above it, as far as multiples allow.
    """
    last = -(-largest // smallest) * smallest
    if step is not None:
        sizes = accumulate(repeat(step), mul, initial=smallest)
    else:
        sizes = accumulate(repeat(smallest), _next_fine, initial=smallest)
    return (*takewhile(lambda size: size < last, sizes), last)


def _next_fine(size: int, smallest: int) -> int:
    """A quarter of the power of two below the size further, in whole multiples."""
    octave = 1 << (size.bit_length() - 1)
    return size + max(smallest, octave // _STEPS_PER_DOUBLING // smallest * smallest)
