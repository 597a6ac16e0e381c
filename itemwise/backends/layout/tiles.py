"""Cutting a batch into attention tiles: numpy only, once per forward pass, before any layer runs.

Attention has two parts, and each is cut so that a token's numbers depend on its own segment and prefix alone:

    own      a segment's tokens over themselves. Tiles are counted from the segment's start. A short segment is one
             `narrow` tile; a longer one is cut into `wide` tiles, whose keys are the blocks of the segment before
             and up to the tile.
    prefix   tokens over the prefix that they read. Each row of a product is on its own here, so neighbours that read
             the same tokens of one prefix share a tile, whichever segment they are of. Keys come in blocks of
             KEY_BLOCK tokens, counted from the prefix's start; a list of addresses says where each block lies
             (`block_lists.py`).

All arrays have a fixed capacity that follows from the padded number of tokens, and counters say how much is used, so
one compiled program serves every batch of that many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from itemwise.backends.base import PREFIX_BLOCK, ForwardBatch
from itemwise.contract.ragged import Int32Array, Int64Array, ranges, starts_from_lens

KEY_BLOCK = PREFIX_BLOCK  # prefix tokens of a key block; also a page of the pool


@dataclass(frozen=True)
class TileSizes:
    """Tokens of a tile, as an implementation wants them."""

    narrow: int  # own part: segments up to this length
    wide: int  # own part: pieces of longer segments
    prefix: int  # prefix part


Item = TypeVar("Item")


class Tiles(NamedTuple, Generic[Item]):
    """Arrays of int32; of each kind the first `counts[kind]` entries are used. (Or a tuple of their lengths.)"""

    counts: Item  # [3]: narrow, wide, prefix
    narrow_start: Item  # first token of the tile, which is its segment's
    narrow_len: Item  # tokens
    wide_start: Item
    wide_len: Item
    wide_segment: Item  # first token of the segment
    prefix_start: Item
    prefix_len: Item
    prefix_read: Item  # how many prefix tokens each token of the tile reads
    token_segment: Item  # [T]: first token of the segment
    token_prefix_len: Item  # [T]: how many prefix tokens it reads
    token_prefix_list: Item  # [T]: where in `block_addresses` the blocks of its prefix begin
    block_addresses: Item  # first token of each key block


HostTiles = Tiles[Int32Array]
DeviceTiles = Tiles[Any]  # jax arrays; this module knows nothing of them
NARROW, WIDE, PREFIX = 0, 1, 2  # places in `counts`


def tile_capacities(num_tokens: int, sizes: TileSizes, max_blocks: int) -> Tiles[int]:
    """The lengths of all arrays for a batch that is padded to this many tokens and reads so many key blocks."""
    # A wide segment has more than `narrow` tokens, and at most one tile that is not full.
    max_wide = num_tokens // sizes.wide + num_tokens // (sizes.narrow + 1) + 1
    lens = [3, *[num_tokens] * 2, *[max_wide] * 3, *[num_tokens] * 3, *[num_tokens] * 3, max_blocks]
    return Tiles(*lens)


def cut_tiles(
    batch: ForwardBatch, sizes: TileSizes, prefix_blocks: Sequence[Int64Array], padding: int = 0
) -> HostTiles:
    """The used parts of all arrays. `prefix_blocks[p]` has the addresses of the blocks of the batch's prefix p.

    `padding` tokens at the end become segments of their own, for implementations that need it.
    """
    starts, lens = _padded_segments(batch, padding, sizes.narrow)
    is_narrow = lens <= sizes.narrow
    wide_start, wide_len, wide_segment = _cut(starts[~is_narrow], lens[~is_narrow], sizes.wide)
    prefix_start, prefix_len, _ = _cut(*_prefix_runs(batch), sizes.prefix)
    token_lens = _per_token(batch, read_lens(batch))
    lists = starts_from_lens(np.array([len(blocks) for blocks in prefix_blocks], np.int64))
    arrays = (
        np.array([is_narrow.sum(), len(wide_start), len(prefix_start)]),
        starts[is_narrow],
        lens[is_narrow],
        wide_start,
        wide_len,
        wide_segment,
        prefix_start,
        prefix_len,
        token_lens[prefix_start],
        _per_token(batch, batch.segment_starts[:-1]),
        token_lens,
        _per_token(batch, lists[np.maximum(batch.prefix_index, 0)]),
        np.concatenate([np.zeros(0, np.int64), *prefix_blocks]),
    )
    return Tiles(*(array.astype(np.int32) for array in arrays))


def _per_token(batch: ForwardBatch, values: Int64Array) -> Int64Array:
    """One value per segment to one per token."""
    return np.repeat(values, np.diff(batch.segment_starts))


def read_lens(batch: ForwardBatch) -> Int64Array:
    """How many prefix tokens each segment reads."""
    return np.where(batch.prefix_index >= 0, batch.prefix_lens, 0)


def _padded_segments(batch: ForwardBatch, padding: int, longest: int) -> tuple[Int64Array, Int64Array]:
    """Starts and lengths of the segments, and of the pieces of the padding."""
    extra = np.arange(0, padding, longest, dtype=np.int64)
    starts = np.concatenate([batch.segment_starts[:-1], batch.num_tokens + extra])
    return starts, np.concatenate([np.diff(batch.segment_starts), np.minimum(padding - extra, longest)])


def _cut(starts: Int64Array, lens: Int64Array, width: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Ranges of tokens into tiles of `width`: each tile's start and length, and the start of its range."""
    tiles_per_range = -(-lens // width)
    offsets = ranges(np.zeros_like(starts), tiles_per_range) * width
    range_start = np.repeat(starts, tiles_per_range)
    return range_start + offsets, np.minimum(np.repeat(lens, tiles_per_range) - offsets, width), range_start


def _prefix_runs(batch: ForwardBatch) -> tuple[Int64Array, Int64Array]:
    """Starts and lengths of runs of neighbouring tokens that read the same tokens of one prefix."""
    lens_read = read_lens(batch)
    prefix = np.where(lens_read > 0, batch.prefix_index, -1)
    firsts = np.flatnonzero(np.diff(prefix, prepend=-2) | np.diff(lens_read, prepend=0))
    starts = batch.segment_starts[firsts]
    lens = np.diff(starts, append=batch.segment_starts[-1])
    reads = prefix[firsts] >= 0
    return starts[reads], lens[reads]
