"""Which rows of the checkpoint a shard holds, and reading just those, in numpy.

A shard's part of a matrix is an *index*: one source row (or column) per row it holds, -1 for one of zeros. `weights`
asks for a piece of it at a time and puts that on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.contract.ragged import Int64Array
from prefixwise.models.checkpoint import StoredTensor
from prefixwise.models.config import ModelConfig


@dataclass(frozen=True)
class ShardIndex:
    """For each shard the source of every row that it holds, each [tp, rows of a shard]."""

    q: Int64Array  # rows of q, columns of o
    qkv: Int64Array  # rows of q, k and v, one after the other
    mlp: Int64Array  # rows of gate or up, columns of down
    gate_up: Int64Array  # rows of gate and up, one after the other
    vocab: Int64Array  # rows of the embedding
    head: Int64Array  # rows of the head: as many, or a classifier's

    @classmethod
    def of(cls, config: ModelConfig, placement: HeadPlacement) -> ShardIndex:
        tp, n, k = placement.tp_size, config.num_heads, config.num_kv_heads
        q_heads, kv_heads = placement.q_heads.reshape(tp, -1), placement.kv_heads
        heads = np.concatenate([q_heads, _shifted(kv_heads, n), _shifted(kv_heads, n + k)], axis=1)
        mlp = _split_evenly(config.mlp_size, tp)
        return cls(
            q=_rows_of_heads(q_heads, config.head_size),
            qkv=_rows_of_heads(heads, config.head_size),
            mlp=mlp,
            gate_up=np.concatenate([mlp, _shifted(mlp, config.mlp_size)], axis=1),
            vocab=_split_evenly(config.vocab_size, tp),
            head=_split_evenly(config.num_head_rows, tp),
        )


def _shifted(index: Int64Array, distance: int) -> Int64Array:
    return np.where(index < 0, -1, index + distance)


def _rows_of_heads(heads: Int64Array, head_size: int) -> Int64Array:
    rows = heads[..., None] * head_size + np.arange(head_size)
    return np.where(heads[..., None] < 0, -1, rows).reshape(len(heads), -1)


def _split_evenly(num_rows: int, tp_size: int) -> Int64Array:
    per_shard = -(-num_rows // tp_size)
    rows = np.arange(tp_size * per_shard).reshape(tp_size, per_shard)
    return np.where(rows < num_rows, rows, -1)


def fill_rows(target: NDArray[Any], parts: Sequence[StoredTensor], index: Int64Array) -> None:
    """target[i] = row index[i] of the parts laid one after the other, zeros where that is -1."""
    target[index < 0] = 0
    for at, source, length in _runs(index):
        first = 0  # row of the whole that is the part's first
        for part in parts:
            start, stop = max(source, first), min(source + length, first + part.shape[0])
            if start < stop:
                target[at + start - source : at + stop - source] = read_numbers(part, start - first, stop - first)
            first += part.shape[0]


def fill_columns(target: NDArray[Any], rows: NDArray[Any], index: Int64Array) -> None:
    """target[:, i] = rows[:, index[i]], zeros where that is -1."""
    target[:, index < 0] = 0
    for at, source, length in _runs(index):
        target[:, at : at + length] = rows[:, source : source + length]


def read_numbers(tensor: StoredTensor, start: int, stop: int) -> NDArray[Any]:
    """Rows of the tensor as numbers of the type in which they are stored; perhaps a view of the file."""
    rows = tensor.read_rows(start, stop)
    return rows.view(ml_dtypes.bfloat16) if tensor.dtype == "bfloat16" else rows


def _runs(index: Int64Array) -> Iterator[tuple[int, int, int]]:
    """(position, source, length) of each stretch of consecutive sources; zeros are left out."""
    bounds = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    for at, end in pairwise(bounds):
        if at < end and index[at] >= 0:
            yield at, int(index[at]), end - at
