"""A forward's integers: what of a batch the device has to know, packed into one buffer of a program's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from prefixwise.contract.ragged import Int32Array, Int64Array
from prefixwise.forward.batch import ForwardBatch
from prefixwise.forward.kv_pages import cache_slots
from prefixwise.forward.packing import Packing
from prefixwise.forward.tiles import Tiles, TileSizes, cut_tiles, tile_capacities

Item = TypeVar("Item")


@dataclass(frozen=True)
class ProgramSpec:
    """What a program can do. Batches that agree in this share one."""

    num_tokens: int
    reads: Literal["batch", "pool"]  # where prefixes are; with "pool", segments may be kept
    scores: bool  # are hidden states of some tokens wanted?

    @property
    def title(self) -> str:
        kinds = {"batch": "rows", "pool": "extend" if self.scores else "prefill"}
        return f"{kinds[self.reads]}, {self.num_tokens} tokens"


class TileArrays(NamedTuple, Generic[Item]):
    """The tiles of attention as `layout/tiles.py` cuts them; of each kind the first `counts[kind]` are used."""

    counts: Item  # [3]: narrow, wide, prefix
    narrow_start: Item
    narrow_len: Item
    wide_start: Item
    wide_len: Item
    wide_segment: Item
    prefix_start: Item
    prefix_len: Item
    prefix_read: Item
    prefix_list: Item  # where in `key_tile_addresses` the blocks of the tile's prefix begin
    key_tile_addresses: Item


class ForwardInputs(NamedTuple, Generic[Item]):
    """Arrays of int32, or a tuple of their lengths."""

    token_ids: Item  # [T]
    positions: Item  # [T]
    cache_slots: Item  # [T]: place in the pool, NOT_CACHED for most
    score_tokens: Item  # [T]
    tiles: TileArrays[Item]


def capacities(spec: ProgramSpec, sizes: TileSizes, max_pool_blocks: int) -> ForwardInputs[int]:
    """The lengths of all arrays of a program's input."""
    num_tokens, is_pool = spec.num_tokens, spec.reads == "pool"
    # In the batch a prefix's blocks are of tokens of its own, so there are no more blocks than tokens.
    of_tiles = tile_capacities(num_tokens, sizes, max_pool_blocks if is_pool else num_tokens)
    return ForwardInputs(
        token_ids=num_tokens,
        positions=num_tokens,
        cache_slots=num_tokens * is_pool,
        score_tokens=num_tokens * spec.scores,
        tiles=_chosen(of_tiles),
    )


def host_inputs(
    batch: ForwardBatch,
    spec: ProgramSpec,
    sizes: TileSizes,
    prefix_blocks: Sequence[Int64Array],
    new_pages: Mapping[int, int],
) -> ForwardInputs[Int32Array]:
    """The arrays. `prefix_blocks`: addresses of the blocks of every prefix; `new_pages`: those for segments."""
    nothing = np.zeros(0, np.int32)
    return ForwardInputs(
        token_ids=_filled(batch.token_ids, spec.num_tokens),
        positions=_filled(batch.positions, spec.num_tokens),
        cache_slots=_keep_slots(batch, spec, new_pages),
        score_tokens=_filled(batch.score_tokens, spec.num_tokens) if spec.scores else nothing,
        tiles=_chosen(cut_tiles(batch, sizes, prefix_blocks, has_token_arrays=False)),
    )


def _chosen(tiles: Tiles[Item]) -> TileArrays[Item]:
    """Those that the kernels read."""
    return TileArrays(*(getattr(tiles, name) for name in TileArrays._fields))


def _filled(array: Int32Array | Int64Array, length: int) -> Int32Array:
    """With zeros: padding is tokens, too."""
    filled = np.zeros(length, np.int32)
    filled[: len(array)] = array
    return filled


def _keep_slots(batch: ForwardBatch, spec: ProgramSpec, new_pages: Mapping[int, int]) -> Int32Array:
    if spec.reads != "pool":
        return np.zeros(0, np.int32)
    return cache_slots(batch, list(new_pages), list(new_pages.values()), spec.num_tokens)


def flat(inputs: ForwardInputs[Item]) -> list[Item]:
    """All arrays one after the other, as they are packed."""
    return [*inputs[:-1], *inputs.tiles]


def packing(lens: ForwardInputs[int]) -> Packing:
    """Where they lie in a buffer."""
    return Packing(flat(lens))


def unpack(packing: Packing, packed: Any) -> ForwardInputs[Any]:
    """A buffer to its arrays."""
    arrays = packing.unpack(packed)
    head = dict(zip(ForwardInputs._fields[:-1], arrays, strict=False))
    return ForwardInputs(**head, tiles=TileArrays(*arrays[len(head) :]))
