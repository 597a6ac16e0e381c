"""A forward's integers, as they travel to the device: many small arrays in one buffer, one row per data shard.

A transfer costs the same for 4 bytes and for 400 kilobytes, so all arrays of a forward go as one; the program cuts
them apart again at offsets that are known when it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from itemwise.backends.base import ForwardBatch
from itemwise.backends.jax.attention.dense import token_rows
from itemwise.backends.layout.tiles import HostTiles, Tiles, TileSizes, tile_capacities
from itemwise.contract.ragged import Int32Array, Int64Array, ranges

Item = TypeVar("Item")
NOT_KEPT = -1


@dataclass(frozen=True)
class ProgramSpec:
    """What a compiled trunk can do. Batches that agree in this share a program."""

    num_tokens: int  # capacity of one data shard
    reads: Literal["batch", "pool"]  # where prefixes are
    keeps: bool  # keys and values of some segments go to the pool, from where they are read
    scores: bool  # hidden states of some tokens are wanted
    dense_columns: int = 0  # longest row of a dense mask; 0: none

    def with_mask(self, columns: int) -> ProgramSpec:
        return replace(self, dense_columns=columns)

    @property
    def title(self) -> str:
        kinds = {"batch": "rows", "pool": "extend" if self.scores else "prefill"}
        masked = f", dense mask of {self.dense_columns} columns" if self.dense_columns else ""
        kept = ", kept" if self.keeps and self.scores else ""
        return f"{kinds[self.reads]}, {self.num_tokens} tokens{masked}{kept}"


class ForwardInputs(NamedTuple, Generic[Item]):
    """Arrays of int32 (or a tuple of their lengths; those that a program does not need have length 0)."""

    num_token_blocks: Item  # [1]
    num_score_blocks: Item  # [1]
    num_rows: Item  # [1], of a dense mask
    token_ids: Item  # [T]
    positions: Item  # [T]
    score_tokens: Item  # [T]
    keep_slots: Item  # [T]: place in the pool, NOT_KEPT for most
    token_row: Item  # [T]: first token of the row, of a dense mask
    row_starts: Item  # [T + 1]
    tiles: Tiles[Item]


def capacities(spec: ProgramSpec, sizes: TileSizes, max_pool_blocks: int) -> ForwardInputs[int]:
    """The lengths of all arrays of a program's input."""
    num_tokens = spec.num_tokens
    is_dense = spec.dense_columns > 0
    return ForwardInputs(
        num_token_blocks=1,
        num_score_blocks=1,
        num_rows=1,
        token_ids=num_tokens,
        positions=num_tokens,
        score_tokens=num_tokens * spec.scores,
        keep_slots=num_tokens * spec.keeps,
        token_row=num_tokens * is_dense,
        row_starts=(num_tokens + 1) * is_dense,
        # In the batch a prefix's blocks are of tokens of its own, so there are no more blocks than tokens.
        tiles=tile_capacities(num_tokens, sizes, max_pool_blocks if spec.reads == "pool" else num_tokens),
    )


def host_inputs(
    batch: ForwardBatch, spec: ProgramSpec, tiles: HostTiles, keep_slots: Int64Array, block_rows: tuple[int, int]
) -> ForwardInputs[Int32Array]:
    """The used parts of all arrays. `block_rows`: of the blocks over tokens, and over scored rows."""
    nothing = np.zeros(0, np.int32)
    num_rows = batch.num_tokens, len(batch.score_tokens)
    token_blocks, score_blocks = (-(-rows // size) for rows, size in zip(num_rows, block_rows, strict=True))
    is_dense = spec.dense_columns > 0
    return ForwardInputs(
        num_token_blocks=np.array([token_blocks], np.int32),
        num_score_blocks=np.array([score_blocks], np.int32),
        num_rows=np.array([len(batch.row_starts) - 1], np.int32),
        token_ids=batch.token_ids,
        positions=batch.positions,
        score_tokens=batch.score_tokens.astype(np.int32) if spec.scores else nothing,
        keep_slots=_kept(batch, keep_slots, spec.num_tokens) if spec.keeps else nothing,
        token_row=token_rows(batch) if is_dense else nothing,
        row_starts=batch.row_starts.astype(np.int32) if is_dense else nothing,
        tiles=tiles,
    )


def _kept(batch: ForwardBatch, slots: Int64Array, num_tokens: int) -> Int32Array:
    """[T]: where each token's keys and values go."""
    segments = np.asarray(batch.keep_segments)
    kept = np.full(num_tokens, NOT_KEPT, np.int32)
    kept[ranges(batch.segment_starts[segments], np.diff(batch.segment_starts)[segments])] = slots
    return kept


def pack(shards: Sequence[ForwardInputs[Int32Array]], lens: ForwardInputs[int]) -> Int32Array:
    """[shards, all of it]; what is not used is zero."""
    flat_lens = _flat(lens)
    packed = np.zeros((len(shards), sum(flat_lens)), np.int32)
    for row, shard in zip(packed, shards, strict=True):
        start = 0
        for array, length in zip(_flat(shard), flat_lens, strict=True):
            assert len(array) <= length, "a batch that is larger than its program"
            row[start : start + len(array)] = array
            start += length
    return packed


def unpack(packed: Any, lens: ForwardInputs[int]) -> ForwardInputs[Any]:
    """One row of `pack`, on the device, to its arrays."""
    flat_lens = _flat(lens)
    ends = list(accumulate(flat_lens))
    arrays = [packed[end - length : end] for end, length in zip(ends, flat_lens, strict=True)]
    head = dict(zip(ForwardInputs._fields[:-1], arrays, strict=False))
    return ForwardInputs(**head, tiles=Tiles(*arrays[len(head) :]))


def _flat(inputs: ForwardInputs[Item]) -> list[Item]:
    return [*inputs[:-1], *inputs.tiles]
