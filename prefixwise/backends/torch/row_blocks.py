"""Rows of a forward in blocks of a few sizes, for so many threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

RowBlock = tuple[int, int]  # its first row, and the one behind its last; that may be behind the last row there is


def cut_rows(num_rows: int, sizes: Sequence[int], num_threads: int = 1) -> list[RowBlock]:
    """Blocks of these sizes, each of which divides the one before it; the last block is perhaps not full.

    Every thread gets as many of the largest. What is left goes through at once, in the smallest blocks that are no more
    than there are threads; what then is left for the last of them is cut as it fits.
    """
    smallest = sizes[-1]
    left = -(-num_rows // smallest) * smallest
    num_largest = left // (sizes[0] * num_threads) * num_threads
    left -= num_largest * sizes[0]
    chosen = [sizes[0]] * num_largest
    largest_left = min(size for size in sizes if -(-left // size) <= num_threads)
    for size in (size for size in sizes if size <= largest_left):
        chosen += [size] * (left // size)
        left %= size
    return list(pairwise(accumulate(chosen, initial=0)))
