"""The numbers of tokens that programs are compiled for."""

from __future__ import annotations

from itertools import accumulate, repeat
from operator import mul

CPU_BLOCK_ROWS = 128
CPU_SCORE_ROWS = 64
CPU_SMALLEST = 512  # tokens
ACCELERATOR_ROWS = 256  # from this many rows on, products add in one order, whatever the number of rows
INVARIANT_ROWS = 2048  # rows of a block under `batch_invariant` on an accelerator
_LEAST_DENSE_COLUMNS = 512
CPU_STEP = 8  # from one bucket to the next; a program costs what is used of it, so a few serve all
COARSE_STEP = 4
_STEPS_PER_DOUBLING = 4


def token_buckets(largest: int, *, smallest: int, step: int | None) -> tuple[int, ...]:
    """Ascending multiples of `smallest`; the last holds `largest` tokens.

    Each is `step` times the one before; with None, at most a quarter above it, as far as multiples allow.
    """
    last = -(-largest // smallest) * smallest
    if step is not None:
        sizes = accumulate(repeat(step), mul, initial=smallest)
    else:
        sizes = accumulate(repeat(smallest), _next_fine, initial=smallest)
    found = []
    for size in sizes:
        if size >= last:
            break
        found.append(size)
    return (*found, last)


def _next_fine(size: int, smallest: int) -> int:
    """A quarter of the power of two below the size further, in whole multiples."""
    octave = 1 << (size.bit_length() - 1)
    return size + max(smallest, octave // _STEPS_PER_DOUBLING // smallest * smallest)


def dense_columns(row_len: int) -> int:
    """The width of the dense mask for rows of this length: a power of two."""
    return max(_LEAST_DENSE_COLUMNS, 1 << (row_len - 1).bit_length())


def dense_columns_up_to(longest_row: int) -> tuple[int, ...]:
    """All widths that rows up to this length can have."""
    if not longest_row:
        return ()
    sizes = accumulate(repeat(2), mul, initial=_LEAST_DENSE_COLUMNS)
    found = [next(sizes)]
    while found[-1] < dense_columns(longest_row):
        found.append(next(sizes))
    return tuple(found)
