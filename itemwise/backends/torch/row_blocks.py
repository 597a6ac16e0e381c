"""Rows of a forward in blocks of one size, or two of them together, for so many threads."""

from __future__ import annotations

from itertools import pairwise

RowBlock = tuple[int, int]  # its first row, and the one behind its last; that may be behind the last row there is


def cut_rows(num_rows: int, size: int, num_threads_for_pairs: int | None = None) -> list[RowBlock]:
    """Blocks of `size` rows, the last one perhaps not full.

    With a number of threads: as many blocks of twice the size as give each thread as many, then the rest.
    """
    num_blocks = -(-num_rows // size)
    threads = num_threads_for_pairs
    num_pairs = 0 if threads is None else num_blocks // (2 * threads) * threads
    first_single, end = 2 * num_pairs * size, num_blocks * size
    edges = [*range(0, first_single, 2 * size), *range(first_single, end, size), end]
    return list(pairwise(edges))
