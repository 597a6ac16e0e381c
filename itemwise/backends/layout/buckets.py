"""The numbers of tokens that programs are prepared for."""

from __future__ import annotations

from itertools import accumulate, repeat, takewhile

_STEPS_PER_DOUBLING = 4


def token_buckets(largest: int, smallest: int) -> tuple[int, ...]:
    """Ascending multiples of `smallest`, each at most a quarter above the one before, as far as multiples allow; the
    last holds `largest` tokens."""
    last = -(-largest // smallest) * smallest
    sizes = accumulate(repeat(smallest), _next, initial=smallest)
    return (*takewhile(lambda size: size < last, sizes), last)


def _next(size: int, smallest: int) -> int:
    """A quarter of the power of two below the size further, in whole multiples."""
    octave = 1 << (size.bit_length() - 1)
    return size + max(smallest, octave // _STEPS_PER_DOUBLING // smallest * smallest)
