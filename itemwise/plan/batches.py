"""Filling forwards: segments in their order, up to a token budget and a number of items.

    serial           every segment is a row of prefix + tail; rows share a forward while they fit
    packed           rows of prefix + up to `chunk_size` segments; rows share a forward while they fit
    prefill_extend   tails only, as many as fit

A batch is a run of consecutive segments, cut into rows, so that order is kept by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from itemwise.plan.buckets import Buckets


@dataclass(frozen=True)
class PlannedBatch:
    """One forward: segments row_starts[0]..row_starts[-1], row r being row_starts[r]..row_starts[r + 1]."""

    row_starts: tuple[int, ...]
    num_tokens: int  # prefixes included, padding not
    bucket: int  # what it is padded to

    @property
    def first(self) -> int:
        return self.row_starts[0]

    @property
    def stop(self) -> int:
        return self.row_starts[-1]


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


def group_rows(
    rows: Sequence[Row], *, token_budget: int, max_segments: int = 0, buckets: Buckets
) -> tuple[PlannedBatch, ...]:
    """Rows side by side in one forward while they fit the budget and the number of segments (0: no bound)."""
    batches: list[PlannedBatch] = []
    open_rows: list[Row] = []
    num_tokens = 0
    for row in rows:
        is_full = bool(open_rows) and 0 < max_segments < row.stop - open_rows[0].first
        if open_rows and (is_full or num_tokens + row.num_tokens > token_budget):
            batches.append(_close(open_rows, buckets))
            open_rows, num_tokens = [], 0
        open_rows.append(row)
        num_tokens += row.num_tokens
    batches.append(_close(open_rows, buckets))
    return tuple(batches)


def one_row_each(rows: Sequence[Row], buckets: Buckets) -> tuple[PlannedBatch, ...]:
    """A forward per row."""
    return tuple(_close([row], buckets) for row in rows)


def _close(rows: list[Row], buckets: Buckets) -> PlannedBatch:
    num_tokens = sum(row.num_tokens for row in rows)
    edges = (rows[0].first, *(row.stop for row in rows))
    return PlannedBatch(edges, num_tokens, buckets.fit(num_tokens))
