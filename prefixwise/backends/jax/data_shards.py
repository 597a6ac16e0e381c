"""Sharing a batch out between the copies of the model along the `data` axis: numpy only."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.batch import ForwardBatch, Layout, Prefix


def split_batch(batch: ForwardBatch, num_shards: int) -> list[tuple[ForwardBatch, Int64Array]]:
    """Per shard its part of the batch and which of the batch's score rows it answers.

    Cuts fall between segments (extend) or rows, where they leave each shard about as many tokens. Segments that are
    kept must be in every copy's pool, so such a batch goes to all, and the first one's answer is taken.
    """
    all_rows = np.arange(len(batch.score_tokens))
    if num_shards == 1:
        return [(batch, all_rows)]
    if batch.cache_segments:
        return [(batch, all_rows), *[(batch, all_rows[:0])] * (num_shards - 1)]
    edges = batch.segment_starts if batch.layout is Layout.EXTEND else batch.row_starts
    targets = np.arange(num_shards + 1) * batch.num_tokens / num_shards
    cuts = edges[np.abs(edges[:, None] - targets).argmin(0)]
    return [_take_tokens(batch, int(start), int(stop)) for start, stop in pairwise(cuts)]


def _take_tokens(batch: ForwardBatch, start: int, stop: int) -> tuple[ForwardBatch, Int64Array]:
    first, last = np.searchsorted(batch.segment_starts, [start, stop])
    rows = np.flatnonzero((batch.score_tokens >= start) & (batch.score_tokens < stop))
    row_starts = batch.row_starts[(batch.row_starts >= start) & (batch.row_starts <= stop)] - start
    part = replace(
        batch,
        token_ids=batch.token_ids[start:stop],
        positions=batch.positions[start:stop],
        segment_starts=batch.segment_starts[first : last + 1] - start,
        prefix_index=batch.prefix_index[first:last],
        prefix_lens=batch.prefix_lens[first:last],
        # Those of other shards stay in the list, so that the indices hold; nothing here reads them.
        prefixes=tuple(_shift(prefix, int(first)) for prefix in batch.prefixes),
        row_starts=row_starts if len(row_starts) > 1 else np.array([0, stop - start]),
        score_tokens=batch.score_tokens[rows] - start,
        label_ids=batch.label_ids[rows],
    )
    return part, rows


def _shift(prefix: Prefix, num_segments: int) -> Prefix:
    return prefix if prefix.segment is None else replace(prefix, segment=prefix.segment - num_segments)
