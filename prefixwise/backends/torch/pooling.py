"""Means over the tokens of segments, in an order that follows from each segment alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prefixwise.backends.torch.devices import upload
from prefixwise.contract.ragged import Int64Array, ranges
from prefixwise.forward.batch import ForwardBatch
from prefixwise.forward.pooling import pooled_segments

_CHUNK = 128  # tokens of a segment that are added one after the other; then the sums of the chunks are added


def mean_of_segments(hidden: Tensor, batch: ForwardBatch) -> Tensor:
    """hidden [T, D] of all tokens to [R, D]: the mean over the segment of each scored token."""
    starts, lens = pooled_segments(batch)
    num_chunks = -(-lens // _CHUNK)
    chunk_starts = starts.repeat(num_chunks) + _CHUNK * ranges(np.zeros_like(lens), num_chunks)
    chunk_lens = np.minimum((starts + lens).repeat(num_chunks) - chunk_starts, _CHUNK)
    rows = hidden.index_select(0, upload(ranges(chunk_starts, chunk_lens), hidden.device))
    sums = _sums(_sums(rows, chunk_lens), num_chunks)
    return sums / upload(lens.astype(np.float32), hidden.device)[:, None]


def _sums(rows: Tensor, lens: Int64Array) -> Tensor:
    """Of consecutive runs of rows. PyTorch adds the rows of a run one by one, in their order."""
    return torch.segment_reduce(rows, "sum", lengths=upload(lens, rows.device), axis=0, unsafe=True)
