"""A forward's integers, as they travel to the device: many small arrays in one buffer, one row per data shard.

A transfer costs the same for 4 bytes and for 400 kilobytes, so all arrays of a forward go as one; the program cuts
them apart again at offsets that are known when it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from prefixwise.backends.jax.attention.dense import token_rows
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.batch import ForwardBatch
from prefixwise.forward.kv_pages import cache_slots
from prefixwise.forward.packing import Packing
from prefixwise.forward.tiles import HostTiles, Tiles, TileSizes, tile_capacities

Item = TypeVar("Item")


@dataclass(frozen=True)
class ProgramSpec:
    """What a compiled trunk can do. Batches that agree in this share a program."""

    num_tokens: int  # capacity of one data shard
    reads: Literal["batch", "pool"]  # where prefixes are
    keeps: bool  # keys and values of some segments go to the pool, from where they are read; others may be scored
    dense_columns: int = 0  # longest row of a dense mask; 0: none

    def with_mask(self, columns: int) -> ProgramSpec:
        return replace(self, dense_columns=columns)

    @property
    def title(self) -> str:
        kind = "rows" if self.reads == "batch" else "prefill" if self.keeps else "extend"
        masked = f", dense mask of {self.dense_columns} columns" if self.dense_columns else ""
        return f"{kind}, {self.num_tokens} tokens{masked}"


class ForwardInputs(NamedTuple, Generic[Item]):
    """Arrays of int32 (or a tuple of their lengths; those that a program does not need have length 0)."""

    num_token_blocks: Item  # [1]
    num_rows: Item  # [1], of a dense mask
    token_ids: Item  # [T]
    positions: Item  # [T]
    cache_slots: Item  # [T]: place in the pool, NOT_CACHED for most
    token_row: Item  # [T]: first token of the row, of a dense mask
    row_starts: Item  # [T + 1]
    tiles: Tiles[Item]


@lru_cache  # the same for every forward of a program
def capacities(spec: ProgramSpec, sizes: TileSizes, max_pool_blocks: int) -> ForwardInputs[int]:
    """The lengths of all arrays of a program's input."""
    num_tokens = spec.num_tokens
    is_dense = spec.dense_columns > 0
    return ForwardInputs(
        num_token_blocks=1,
        num_rows=1,
        token_ids=num_tokens,
        positions=num_tokens,
        cache_slots=num_tokens * spec.keeps,
        token_row=num_tokens * is_dense,
        row_starts=(num_tokens + 1) * is_dense,
        # In the batch a prefix's blocks are of tokens of its own, so there are no more blocks than tokens.
        tiles=tile_capacities(num_tokens, sizes, max_pool_blocks if spec.reads == "pool" else num_tokens),
    )


def host_inputs(
    batch: ForwardBatch, spec: ProgramSpec, tiles: HostTiles, new_pages: Sequence[int], block_rows: int
) -> ForwardInputs[Int32Array]:
    """The used parts of all arrays. `new_pages`: addresses for the segments that are kept; `block_rows`: of the blocks
    over tokens."""
    nothing = np.zeros(0, np.int32)
    is_dense = spec.dense_columns > 0
    return ForwardInputs(
        num_token_blocks=np.array([-(-batch.num_tokens // block_rows)], np.int32),
        num_rows=np.array([len(batch.row_starts) - 1], np.int32),
        token_ids=batch.token_ids,
        positions=batch.positions,
        cache_slots=cache_slots(batch, batch.cache_segments, new_pages, spec.num_tokens) if spec.keeps else nothing,
        token_row=token_rows(batch) if is_dense else nothing,
        row_starts=batch.row_starts.astype(np.int32) if is_dense else nothing,
        tiles=tiles,
    )


def pack(shards: Sequence[ForwardInputs[Int32Array]], lens: ForwardInputs[int]) -> Int32Array:
    """[shards, all of it]; what is not used is zero."""
    packing = _packing(lens)
    packed = np.zeros((len(shards), packing.size), np.int32)
    for row, shard in zip(packed, shards, strict=True):
        packing.pack(_flat(shard), row)
    return packed


def packed_size(lens: ForwardInputs[int]) -> int:
    """Numbers in a row of `pack`."""
    return _packing(lens).size


def unpack(packed: Any, lens: ForwardInputs[int]) -> ForwardInputs[Any]:
    """One row of `pack`, on the device, to its arrays."""
    return _unflat(_packing(lens).unpack(packed))


@lru_cache  # as `capacities`
def _packing(lens: ForwardInputs[int]) -> Packing:
    return Packing(_flat(lens))


def _flat(inputs: ForwardInputs[Item]) -> list[Item]:
    return [*inputs[:-1], *inputs.tiles]


def _unflat(items: Sequence[Item]) -> ForwardInputs[Item]:
    """`_flat`, undone."""
    own = dict(zip(ForwardInputs._fields[:-1], items, strict=False))
    return ForwardInputs(**own, tiles=Tiles(*items[len(own) :]))
