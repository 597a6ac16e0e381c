"""Rows of a block, steps between buckets and widths of dense masks: what JAX's programs are compiled for."""

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
