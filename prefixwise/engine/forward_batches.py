"""From what a step takes of its requests to the arrays of a forward: tokens, positions, who sees whom, what is read.

prefill   blocks of prefixes, each reading those before it
extend    tails alone, behind blocks that are kept
joined    both of these in one forward: the blocks, then the tails, which may read them
rows      prefixes and tails of the algorithms that compute both in one forward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.ragged import Int32Array, Int64Array, numbers, ranges, starts_from_lens
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, Layout, Prefix
from prefixwise.plan.algorithms import ScorePlan
from prefixwise.plan.batches import Row
from prefixwise.plan.label_rows import Segments

Integer = TypeVar("Integer", np.int32, np.int64)

_NO_LABELS = np.zeros((0, 0), np.int32)
_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class BlockRun:
    """Blocks first..stop of a prefix, behind those that are kept."""

    prefix_ids: Int32Array  # all of them
    first: int
    stop: int

    @property
    def num_blocks(self) -> int:
        return self.stop - self.first

    @property
    def token_ids(self) -> Int32Array:
        return self.prefix_ids[self.first * KV_BLOCK_SIZE : self.stop * KV_BLOCK_SIZE]

    @property
    def lens(self) -> Int64Array:
        num_whole = self.num_blocks - 1
        return np.array([KV_BLOCK_SIZE] * num_whole + [len(self.token_ids) - num_whole * KV_BLOCK_SIZE])

    @property
    def prefix_lens(self) -> Int64Array:
        """Each reads all blocks before it."""
        return KV_BLOCK_SIZE * numbers(self.stop)[self.first :]


@dataclass(frozen=True)
class TailRun:
    """Tails of the segments first..stop, which read one of the forward's prefixes."""

    segments: Segments
    first: int
    stop: int
    prefix: int  # number of it; -1: none

    @property
    def edges(self) -> tuple[int, int]:
        """Its first token, and the one behind its last, in the tails of its request."""
        starts = self.segments.tails.starts
        return int(starts[self.first]), int(starts[self.stop])

    @property
    def num_tokens(self) -> int:
        first_token, last_token = self.edges
        return last_token - first_token

    @property
    def token_ids(self) -> Int32Array:
        return self.segments.tails.flat[slice(*self.edges)]

    @property
    def lens(self) -> Int64Array:
        return self.segments.tails.lens[self.first : self.stop]

    @property
    def prefix_lens(self) -> Int64Array:
        return self.segments.prefix_lens[self.first : self.stop]


@dataclass(frozen=True)
class RowRun:
    """Rows first..stop of a plan."""

    plan: ScorePlan
    first: int
    stop: int

    @property
    def rows(self) -> Sequence[Row]:
        return self.plan.rows[self.first : self.stop]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


def joined_batch(blocks: Sequence[BlockRun], tails: Sequence[TailRun], *, normalize: bool) -> ForwardBatch:
    """Blocks that are kept, then tails that are scored. The prefix of the first run of blocks has number 0, and so on:
    tails that read those blocks read that prefix. The others have the numbers behind.

    What is kept before, of any prefix, is put in when the forward starts: it may be in the making.
    """
    firsts = list(accumulate((run.num_blocks for run in blocks), initial=0))
    lens = _concatenate([*(run.lens for run in blocks), *(run.lens for run in tails)])
    prefix_lens = _concatenate([*(run.prefix_lens for run in blocks), *(run.prefix_lens for run in tails)])
    prefix_numbers = [*range(len(blocks)), *(run.prefix for run in tails)]
    num_segments = [*(run.num_blocks for run in blocks), *(run.stop - run.first for run in tails)]
    starts = starts_from_lens(lens)
    return ForwardBatch(
        layout=Layout.EXTEND,
        token_ids=_concatenate([*(run.token_ids for run in blocks), *(run.token_ids for run in tails)]),
        positions=_positions(prefix_lens, lens),
        segment_starts=starts,
        prefix_index=np.where(prefix_lens > 0, np.repeat(prefix_numbers, num_segments), -1),
        prefix_lens=prefix_lens,
        prefixes=tuple(Prefix(segment=first) for first in firsts[:-1]),
        row_starts=starts[[0, -1]],
        score_tokens=_score_tokens(tails, int(starts[firsts[-1]])),
        label_ids=_join_labels([_label_ids(run.segments, run.first, run.stop) for run in tails]),
        need_logsumexp=normalize,
        cache_segments=tuple(range(firsts[-1])),
    )


def _score_tokens(tails: Sequence[TailRun], offset: int) -> Int64Array:
    """`offset`: where in the batch the first of them begins."""
    found = [_NO_TOKENS]
    for run in tails:
        found.append(_score_offsets(run.segments, run.first, run.stop) + (offset - run.edges[0]))
        offset += run.num_tokens
    return np.concatenate(found)


def rows_batch(runs: Sequence[RowRun], *, normalize: bool) -> ForwardBatch:
    """Rows of a prefix, cut into blocks, and one (serial) or several (packed) tails, which read their row's prefix.

    All runs are of one layout and one mask.
    """
    plan = runs[0].plan
    parts = [_row_segments(run.plan.segments, row) for run in runs for row in run.rows]
    row_lens = np.array([row.num_tokens for run in runs for row in run.rows], np.int64)
    row_starts = starts_from_lens(row_lens)
    segments_before = starts_from_lens(np.array([len(part.lens) for part in parts], np.int64))
    lens = _concatenate([part.lens for part in parts])
    prefix_lens = _concatenate([part.prefix_lens for part in parts])
    row_of = np.repeat(numbers(len(parts)), np.diff(segments_before))
    return ForwardBatch(
        layout=Layout.CAUSAL if plan.algorithm == "serial" else Layout.PACKED,
        token_ids=_concatenate([part.token_ids for part in parts]),
        positions=_positions(prefix_lens, lens),
        segment_starts=starts_from_lens(lens),
        prefix_index=np.where(prefix_lens > 0, row_of, -1),
        prefix_lens=prefix_lens,
        prefixes=tuple(Prefix(segment=int(segment)) for segment in segments_before[:-1]),
        row_starts=row_starts,
        score_tokens=_concatenate(
            [part.score_offsets + start for part, start in zip(parts, row_starts[:-1], strict=True)]
        ),
        label_ids=_join_labels(
            [_label_ids(run.plan.segments, row.first, row.stop) for run in runs for row in run.rows]
        ),
        need_logsumexp=normalize,
        mask=plan.mask or "segment",
    )


@dataclass(frozen=True)
class _RowSegments:
    """One row's segments: the blocks of its prefix, then its tails."""

    lens: Int64Array
    prefix_lens: Int64Array
    token_ids: Int32Array
    score_offsets: Int64Array  # from the row's start


def _row_segments(segments: Segments, row: Row) -> _RowSegments:
    prefix_len = len(segments.prefix_ids)
    block_starts = KV_BLOCK_SIZE * numbers(-(-prefix_len // KV_BLOCK_SIZE))
    block_lens = np.minimum(KV_BLOCK_SIZE, prefix_len - block_starts)
    tails = segments.tails
    first_token, last_token = tails.starts[row.first], tails.starts[row.stop]
    return _RowSegments(
        lens=np.concatenate([block_lens, tails.lens[row.first : row.stop]]),
        prefix_lens=np.concatenate([block_starts, segments.prefix_lens[row.first : row.stop]]),
        token_ids=np.concatenate([segments.prefix_ids, tails.flat[first_token:last_token]]),
        score_offsets=_score_offsets(segments, row.first, row.stop) + (prefix_len - first_token),
    )


def _concatenate(pieces: list[NDArray[Integer]]) -> NDArray[Integer]:
    """One of them as it is: most forwards are of one request."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _positions(prefix_lens: Int64Array, lens: Int64Array) -> Int32Array:
    """A segment's positions continue from the part of the prefix that it reads."""
    return ranges(prefix_lens, lens).astype(np.int32)


def _score_offsets(segments: Segments, first: int, stop: int) -> Int64Array:
    rows = segments.rows_of_segment
    return segments.score_offsets[rows[first] : rows[stop]]


def _label_ids(segments: Segments, first: int, stop: int) -> Int32Array:
    """[R, L]: the request's pattern of targets, which repeats with every item."""
    begin, end = segments.rows_of_segment[first], segments.rows_of_segment[stop]
    if len(segments.label_ids) == 1:
        return segments.label_ids.repeat(end - begin, axis=0)
    label_ids: Int32Array = segments.label_ids[np.arange(begin, end) % len(segments.label_ids)]
    return label_ids


def _join_labels(parts: list[Int32Array]) -> Int32Array:
    """Requests with fewer labels read some of theirs again."""
    if not parts:
        return _NO_LABELS
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    return np.concatenate([_widened(part, width) for part in parts])


def _widened(labels: Int32Array, width: int) -> Int32Array:
    missing = width - labels.shape[1]
    return np.pad(labels, ((0, 0), (0, missing)), mode="edge") if missing else labels
