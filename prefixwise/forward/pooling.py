"""Which hidden states of a segment the head of a bidirectional model reads, in place of the scored token's."""

from __future__ import annotations

import numpy as np

from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.batch import ForwardBatch
from prefixwise.models.config import Pooling


def read_tokens(batch: ForwardBatch, pooling: Pooling) -> Int64Array:
    """The tokens whose hidden states are needed: the scored ones, the first ones of their segments, or all."""
    if pooling == "last" or not len(batch.score_tokens):
        return batch.score_tokens
    return pooled_segments(batch)[0] if pooling == "first" else np.arange(batch.num_tokens)


def pooled_segments(batch: ForwardBatch) -> Int64Array:
    """[2, R]: where the segment of each scored token begins, and how many tokens it has."""
    segments = np.searchsorted(batch.segment_starts, batch.score_tokens, side="right") - 1
    starts = batch.segment_starts[segments]
    return np.stack([starts, batch.segment_starts[segments + 1] - starts])
