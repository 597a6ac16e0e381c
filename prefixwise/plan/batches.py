"""Rows of the algorithms that compute the prefix anew: a prefix and the segments behind it.

    serial           every segment is a row of prefix + tail
    packed           rows of prefix + up to `chunk_size` segments
    prefill_extend   has none: tails run on their own, as many as fit a step of the scheduler

A row is a run of consecutive segments, so that order is kept by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A prefix and the segments first..stop behind it."""

    first: int
    stop: int
    num_tokens: int  # the prefix included


def fill_rows(tail_lens: Sequence[int], prefix_len: int, *, chunk_size: int, max_row_len: int) -> list[Row]:
    """Rows of at most `chunk_size` segments (0: no bound) and, with the prefix, `max_row_len` tokens.

    A segment that is too long for that has a row of its own.
    """
    rows: list[Row] = []
    first, num_tokens = 0, prefix_len
    for segment, length in enumerate(tail_lens):
        is_full = chunk_size and segment - first >= chunk_size
        if segment > first and (is_full or num_tokens + length > max_row_len):
            rows.append(Row(first, segment, num_tokens))
            first, num_tokens = segment, prefix_len
        num_tokens += length
    rows.append(Row(first, len(tail_lens), num_tokens))
    return rows
