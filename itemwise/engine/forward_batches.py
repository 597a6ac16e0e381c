"""From a planned batch to the arrays of a forward: tokens, positions, who sees whom, what is read where."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from itemwise.backends.base import ForwardBatch, Layout, PrefixState
from itemwise.contract.ragged import Int32Array, Int64Array, ranges, starts_from_lens
from itemwise.plan.algorithms import ScorePlan
from itemwise.plan.batches import PlannedBatch
from itemwise.plan.label_rows import Segments


def prefill_batch(prefix_ids: Int32Array) -> ForwardBatch:
    """The prefix alone: nothing is scored, its keys and values are kept."""
    edges = np.array([0, len(prefix_ids)], np.int64)
    return ForwardBatch(
        layout=Layout.CAUSAL,
        token_ids=prefix_ids,
        positions=np.arange(len(prefix_ids), dtype=np.int32),
        segment_starts=edges,
        prefix_index=np.array([-1]),
        prefix_lens=np.array([0]),
        prefixes=(),
        row_starts=edges,
        score_tokens=np.zeros(0, np.int64),
        label_ids=np.zeros((0, 0), np.int32),
        keep_segments=(0,),
    )


def extend_batch(plan: ScorePlan, batch: PlannedBatch, prefix: PrefixState | None, *, normalize: bool) -> ForwardBatch:
    """Tails only; those that read a prefix read the cached one."""
    segments = plan.segments
    lens = segments.tails.lens[batch.first : batch.stop]
    prefix_lens = segments.prefix_lens[batch.first : batch.stop]
    first_token, last_token = segments.tails.starts[[batch.first, batch.stop]]
    starts = starts_from_lens(lens)
    return ForwardBatch(
        layout=Layout.EXTEND,
        token_ids=segments.tails.flat[first_token:last_token],
        positions=_positions(prefix_lens, lens),
        segment_starts=starts,
        prefix_index=np.where(prefix_lens > 0, 0, -1),
        prefix_lens=prefix_lens,
        prefixes=() if prefix is None else (prefix,),
        row_starts=starts[[0, -1]],
        score_tokens=_score_offsets(segments, batch) - first_token,
        label_ids=_label_ids(segments, batch),
        need_normalizers=normalize,
    )


def rows_batch(plan: ScorePlan, batch: PlannedBatch, *, normalize: bool) -> ForwardBatch:
    """Rows of the prefix and one (serial) or several (packed) tails, each reading its own row's prefix."""
    segments = plan.segments
    prefix_len = len(segments.prefix_ids)
    if not prefix_len:  # nothing is shared: rows of tails are what `extend` computes
        return extend_batch(plan, batch, None, normalize=normalize)
    row_edges = np.array(batch.row_starts) - batch.first  # in segments of this batch
    num_rows = len(row_edges) - 1
    row_of = np.repeat(np.arange(num_rows), np.diff(row_edges))
    tail_prefix_lens = segments.prefix_lens[batch.first : batch.stop]
    # A prefix segment is put before each row's first tail.
    lens = np.insert(segments.tails.lens[batch.first : batch.stop], row_edges[:-1], prefix_len)
    prefix_lens = np.insert(tail_prefix_lens, row_edges[:-1], 0)
    prefix_segments = row_edges[:-1] + np.arange(num_rows)
    prefix_index = np.insert(np.where(tail_prefix_lens > 0, row_of, -1), row_edges[:-1], -1)
    starts = starts_from_lens(lens)
    # A tail's tokens come to stand behind the prefixes of its own row and of the rows before.
    shift = (row_of + 1) * prefix_len - segments.tails.starts[batch.first]
    score_shift = np.repeat(shift, np.diff(segments.rows_of_segment)[batch.first : batch.stop])
    return ForwardBatch(
        layout=Layout.CAUSAL if plan.algorithm == "serial" else Layout.PACKED,
        token_ids=_row_tokens(segments, batch),
        positions=_positions(prefix_lens, lens),
        segment_starts=starts,
        prefix_index=prefix_index,
        prefix_lens=prefix_lens,
        prefixes=tuple(int(number) for number in prefix_segments),
        row_starts=np.append(starts[prefix_segments], starts[-1]),
        score_tokens=_score_offsets(segments, batch) + score_shift,
        label_ids=_label_ids(segments, batch),
        need_normalizers=normalize,
        mask=plan.mask or "segment",
    )


def _row_tokens(segments: Segments, batch: PlannedBatch) -> Int32Array:
    tails = segments.tails
    edges = [int(tails.starts[segment]) for segment in batch.row_starts]
    pieces: list[Int32Array] = []
    for start, stop in pairwise(edges):
        pieces += [segments.prefix_ids, tails.flat[start:stop]]
    return np.concatenate(pieces)


def _positions(prefix_lens: Int64Array, lens: Int64Array) -> Int32Array:
    """A segment's positions continue from the part of the prefix that it reads."""
    return ranges(prefix_lens, lens).astype(np.int32)


def _score_offsets(segments: Segments, batch: PlannedBatch) -> Int64Array:
    rows = segments.rows_of_segment
    return segments.score_offsets[rows[batch.first] : rows[batch.stop]]


def _label_ids(segments: Segments, batch: PlannedBatch) -> Int32Array:
    """[R, L]: the request's pattern of targets, which repeats with every item."""
    rows = np.arange(segments.rows_of_segment[batch.first], segments.rows_of_segment[batch.stop])
    label_ids: Int32Array = segments.label_ids[rows % len(segments.label_ids)]
    return label_ids
