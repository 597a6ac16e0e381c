"""Which shard of the `tensor` axis holds which heads, and which rows of the checkpoint: numpy only.

Devices of one program hold arrays of one shape, so every shard has `Kl` KV slots, each with the `Gl` query heads that
read it. A KV head whose query heads do not fit on one shard is held by several, and the slots left over are heads
of zeros, which add nothing to the output:

    12 query heads, 2 KV heads, 4 shards     Kl = 1, Gl = 3, nothing padded, each KV head twice
        [q0 q1 q2 | kv0]  [q3 q4 q5 | kv0]  [q6 q7 q8 | kv1]  [q9 q10 q11 | kv1]

    9 query heads, 3 KV heads, 2 shards      Kl = 2, Gl = 3, the last slot is zeros
        [q0 q1 q2 | kv0, q3 q4 q5 | kv1]  [q6 q7 q8 | kv2, - - - | -]

A shard's part of a matrix is an *index*: one source row (or column) for each row that it holds, -1 for a row of zeros.
`weight_loader` reads a piece of it at a time and puts that on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.ragged import Int64Array
from prefixwise.models.checkpoint import StoredTensor
from prefixwise.models.config import ModelConfig


@dataclass(frozen=True, eq=False)
class HeadPlacement:
    """The heads of every shard, in the order in which the shard holds them. Equal by identity."""

    q_heads: Int64Array  # [tp, Kl, Gl] original query head, -1 for a head of zeros
    kv_heads: Int64Array  # [tp, Kl] original KV head, -1 for zeros

    @property
    def tp_size(self) -> int:
        return len(self.q_heads)

    @property
    def kv_copies(self) -> int:
        """How many shards, or slots of a shard, hold each KV head."""
        return int((self.kv_heads == 0).sum())

    @property
    def kv_heads_per_shard(self) -> int:
        """`Kl`."""
        return int(self.q_heads.shape[1])

    @property
    def heads_per_kv(self) -> int:
        """`Gl`."""
        return int(self.q_heads.shape[2])

    @classmethod
    def plan(cls, num_heads: int, num_kv_heads: int, tp_size: int) -> HeadPlacement:
        """The placement with the fewest rows of projections per shard, `Kl` x (Q and O of `Gl` heads, K, V)."""
        heads_per_kv = num_heads // num_kv_heads

        def slots_per_shard(width: int) -> int:
            return _ceil_div(num_kv_heads * _ceil_div(heads_per_kv, width), tp_size)

        # Of equal widths the wider one: fewer copies of KV heads.
        width = min(range(heads_per_kv, 0, -1), key=lambda width: slots_per_shard(width) * (2 * width + 2))
        q_units, kv_units = _cut(num_kv_heads, heads_per_kv, width)
        num_slots = slots_per_shard(width)
        num_empty = tp_size * num_slots - len(kv_units)
        q_heads = np.pad(q_units, ((0, num_empty), (0, 0)), constant_values=-1)
        kv_heads = np.pad(kv_units, (0, num_empty), constant_values=-1)
        return cls(q_heads.reshape(tp_size, num_slots, width), kv_heads.reshape(tp_size, num_slots))


def _cut(num_kv_heads: int, heads_per_kv: int, width: int) -> tuple[Int64Array, Int64Array]:
    """Query heads [units, width] and KV head [units] of each unit: a KV head with up to `width` of its query heads."""
    units_per_kv = _ceil_div(heads_per_kv, width)
    q_heads = np.arange(num_kv_heads * heads_per_kv).reshape(num_kv_heads, heads_per_kv)
    padded = np.pad(q_heads, ((0, 0), (0, units_per_kv * width - heads_per_kv)), constant_values=-1)
    return padded.reshape(-1, width), np.repeat(np.arange(num_kv_heads), units_per_kv)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class ShardIndex:
    """Per shard the source row of every row that it holds, [tp, rows of a shard] each."""

    q: Int64Array  # rows of q, columns of o
    kv: Int64Array  # rows of k or v
    qkv: Int64Array  # rows of q, k and v, one after the other
    mlp: Int64Array  # rows of gate or up, columns of down
    gate_up: Int64Array  # rows of gate and up, one after the other; with experts those of each expert, too
    vocab: Int64Array  # rows of the embedding
    head: Int64Array  # rows of the head: the vocabulary's, or a classifier's

    @classmethod
    def of(cls, config: ModelConfig, placement: HeadPlacement) -> ShardIndex:
        tp, n, k = placement.tp_size, config.num_heads, config.num_kv_heads
        q_heads, kv_heads = placement.q_heads.reshape(tp, -1), placement.kv_heads
        heads = np.concatenate([q_heads, _shifted(kv_heads, n), _shifted(kv_heads, n + k)], axis=1)
        mlp = _split_evenly(config.mlp_size, tp)
        return cls(
            q=_rows_of_heads(q_heads, config.head_size),
            kv=_rows_of_heads(kv_heads, config.head_size),
            qkv=_rows_of_heads(heads, config.head_size),
            mlp=mlp,
            gate_up=_gate_up_rows(config, mlp),
            vocab=_split_evenly(config.vocab_size, tp),
            head=_split_evenly(config.num_head_rows, tp),
        )


def _gate_up_rows(config: ModelConfig, mlp: Int64Array) -> Int64Array:
    """The gates of all experts come before their ups in the checkpoint; a shard has an expert's gate, then its up."""
    num_experts = 1 if config.experts is None else config.experts.num_experts
    places = [expert + part * num_experts for expert in range(num_experts) for part in (0, 1)]
    return np.concatenate([_shifted(mlp, place * config.mlp_size) for place in places], axis=1)


def _shifted(index: Int64Array, distance: int) -> Int64Array:
    return np.where(index < 0, -1, index + distance)


def _rows_of_heads(heads: Int64Array, head_size: int) -> Int64Array:
    rows = heads[..., None] * head_size + np.arange(head_size)
    return np.where(heads[..., None] < 0, -1, rows).reshape(len(heads), -1)


def _split_evenly(num_rows: int, tp_size: int) -> Int64Array:
    per_shard = -(-num_rows // tp_size)
    rows = np.arange(tp_size * per_shard).reshape(tp_size, per_shard)
    return np.where(rows < num_rows, rows, -1)


def fill_sequences(target: NDArray[Any], parts: Sequence[StoredTensor], index: Int64Array) -> None:
    """target[i] = row index[i] of the concatenated parts; zeros where the index is -1."""
    target[index < 0] = 0
    for at, source, length in _runs(index):
        first = 0  # the part's first row in the concatenation
        for part in parts:
            start, stop = max(source, first), min(source + length, first + part.shape[0])
            if start < stop:
                target[at + start - source : at + stop - source] = read_numbers(part, start - first, stop - first)
            first += part.shape[0]


def fill_columns(target: NDArray[Any], rows: NDArray[Any], index: Int64Array) -> None:
    """target[:, i] = rows[:, index[i]]; zeros where the index is -1."""
    target[:, index < 0] = 0
    for at, source, length in _runs(index):
        target[:, at : at + length] = rows[:, source : source + length]


def read_numbers(tensor: StoredTensor, start: int, stop: int) -> NDArray[Any]:
    """Rows of the tensor in the dtype in which they are stored; may be a view of the file."""
    rows = tensor.read_rows(start, stop)
    return rows.view(ml_dtypes.bfloat16) if tensor.dtype == "bfloat16" else rows


def _runs(index: Int64Array) -> Iterator[tuple[int, int, int]]:
    """(position, source, length) of each run of consecutive sources; rows of zeros are skipped."""
    bounds = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    for at, end in pairwise(bounds):
        if at < end and index[at] >= 0:
            yield at, int(index[at]), end - at
