"""The numbers of tokens that programs are compiled or recorded for: numpy-free, shared by the backends."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, repeat, takewhile
from operator import mul


def token_buckets(
    largest: int, *, smallest: int, step: int | None = None, steps_per_doubling: int = 4
) -> tuple[int, ...]:
    """Ascending multiples of `smallest`; the last holds `largest` tokens.

    Each is `step` times the one before; with None, there are so many from one power of two to the next, as far as
    multiples allow.
    """
    last = -(-largest // smallest) * smallest
    if step is not None:
        sizes = accumulate(repeat(step), mul, initial=smallest)
    else:
        sizes = accumulate(repeat(smallest), partial(_next_fine, steps_per_doubling), initial=smallest)
    return (*takewhile(lambda size: size < last, sizes), last)


def _next_fine(steps_per_doubling: int, size: int, smallest: int) -> int:
    """A part of the power of two below the size further, in whole multiples."""
    octave = 1 << (size.bit_length() - 1)
    return size + max(smallest, octave // steps_per_doubling // smallest * smallest)
