"""Cutting a batch into attention tiles: numpy only, once per forward pass, before any layer runs.

Attention has two parts, and each is cut so that a token's numbers depend on its own segment and prefix alone:

    self     self-attention within a segment. Tiles are counted from the segment's start. A short segment is one
             `narrow` tile; a longer one, or every one, is cut into `wide` tiles. The keys of a wide tile are its own
             tokens and the earlier tiles of the segment.
    prefix   tokens over the prefix that they read. Rows of a GEMM are independent here, so consecutive tokens that read
             the same tokens of one prefix share a tile, also across segments. Keys come in tiles of KEY_TILE tokens,
             counted from the prefix's start; a list of addresses says where each key tile lies (`kv_pages.py`).

All arrays have a fixed capacity that follows from the padded number of tokens, and counters say how much is used, so
one compiled program serves every batch of that many tokens. They travel to the device in one buffer (`Packing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from prefixwise.contract.ragged import Int32Array, Int64Array, numbers, starts_from_lens
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch

KEY_TILE = KV_BLOCK_SIZE  # prefix tokens of a key tile: one KV block, and one page of the KV cache
ALIGNMENT = 64  # numbers: every packed array begins at a multiple of 256 bytes, as JAX's kernels need it


@dataclass(frozen=True)
class TileSizes:
    """Tokens of a tile, as an attention implementation chooses them."""

    narrow: int  # self-attention: segments up to this length; 0: all are cut into wide tiles
    wide: int  # self-attention: tiles of longer segments
    prefix: int  # prefix attention
    # Prefix attention, for kernels that copy the tokens of a tile at once: each tile lies in a window of `prefix`
    # tokens that begins at a multiple of `alignment`, and every token is in a tile, also padding and tokens that read
    # no prefix. 0: tiles hold only tokens that read a prefix, and begin at the first of them.
    alignment: int = 0
    has_token_arrays: bool = True  # the implementation reads those of `Tiles` that have an entry per token

    def wave_tokens(self, num_cores: int, num_kv_heads: int, multiple: int) -> int:
        """Tokens whose prefix tiles, each of one KV head, are about one for each core; a multiple of `multiple`."""
        return max(multiple, num_cores // num_kv_heads * self.prefix // multiple * multiple)


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
    prefix_list: Item  # where in `key_tile_addresses` the key tiles of that prefix begin
    # These three are empty without `TileSizes.has_token_arrays`.
    token_segment: Item  # [T]: first token of the segment
    token_prefix_len: Item  # [T]: how many prefix tokens it reads
    token_prefix_list: Item  # [T]: where in `key_tile_addresses` the key tiles of its prefix begin
    key_tile_addresses: Item  # the page table: first token of each key tile


HostTiles = Tiles[Int32Array]
DeviceTiles = Tiles[Any]  # jax arrays; this module does not import jax
NARROW, WIDE, PREFIX = 0, 1, 2  # indices in `counts`


def tile_capacities(num_tokens: int, sizes: TileSizes, max_key_tiles: int) -> Tiles[int]:
    """The lengths of all arrays for a batch that is padded to this many tokens and reads so many key tiles."""
    # A wide segment has more than `narrow` tokens, and at most one tile that is not full.
    max_wide = min(num_tokens, num_tokens // sizes.wide + num_tokens // (sizes.narrow + 1) + 1)
    of_tokens = num_tokens * sizes.has_token_arrays
    lens = [3, *[num_tokens] * 2, *[max_wide] * 3, *[num_tokens] * 4, *[of_tokens] * 3, max_key_tiles]
    return Tiles(*lens)


def cut_tiles(
    batch: ForwardBatch, sizes: TileSizes, prefix_addresses: Sequence[Int64Array], padding: int = 0
) -> HostTiles:
    """The used parts of all arrays. `prefix_addresses[p]` has the addresses of the key tiles of the batch's prefix p.

    `padding` tokens at the end become segments of their own, for implementations that need it.
    """
    reads, lists = batch.read_lens, _lists(batch, prefix_addresses)
    token_segment = token_reads = token_lists = np.zeros(0, np.int32)
    if sizes.has_token_arrays:
        segment_lens = np.diff(batch.segment_starts)
        token_segment, token_reads, token_lists = (
            values.astype(np.int32).repeat(segment_lens) for values in (batch.segment_starts[:-1], reads, lists)
        )
    if padding:  # reads nothing
        reads, lists = _with_last(reads, 0), _with_last(lists, 0)
    starts, stops = _padded_segments(batch, padding, sizes.narrow)
    lens = stops - starts
    is_narrow = lens <= sizes.narrow
    is_wide = ~is_narrow
    narrow_start, wide_segment = starts[is_narrow], starts[is_wide]
    wide_start, wide_len, wide_number = _cut(wide_segment, stops[is_wide], sizes.wide)
    prefix_start, prefix_len, prefix_segment = _prefix_tiles(batch, reads, sizes, padding)
    arrays = (
        np.array([len(narrow_start), len(wide_start), len(prefix_start)]),
        narrow_start,
        lens[is_narrow],
        wide_start,
        wide_len,
        wide_segment[wide_number],
        prefix_start,
        prefix_len,
        reads[prefix_segment],
        lists[prefix_segment],
        token_segment,
        token_reads,
        token_lists,
        np.concatenate([np.zeros(0, np.int64), *prefix_addresses]),
    )
    return Tiles(*(array.astype(np.int32, copy=False) for array in arrays))


def _lists(batch: ForwardBatch, prefix_addresses: Sequence[Int64Array]) -> Int64Array:
    """Per segment: where the key tiles of its prefix begin in the concatenated addresses."""
    starts = starts_from_lens(np.array([len(addresses) for addresses in prefix_addresses], np.int64))
    return starts[np.maximum(batch.prefix_index, 0)]


def _padded_segments(batch: ForwardBatch, padding: int, longest: int) -> tuple[Int64Array, Int64Array]:
    """First token of the segments and of the pieces of the padding, and the token after their last one."""
    edges = batch.segment_starts
    if padding:
        assert longest, "pieces of padding are narrow tiles"
        end = batch.num_tokens + padding
        edges = np.concatenate([edges[:-1], np.arange(batch.num_tokens, end, longest), [end]])
    return edges[:-1], edges[1:]


def _cut(
    starts: Int64Array, stops: Int64Array, width: int, alignment: int = 1
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut ranges of tokens into tiles: each tile's start and length, and the number of its range.

    Tiles lie in windows of `width` tokens; the first window of a range begins at a multiple of `alignment`.
    """
    first_windows = starts - starts % alignment
    num_tiles = -((first_windows - stops) // width)
    number = numbers(len(starts)).repeat(num_tiles)
    tiles_before = num_tiles.cumsum() - num_tiles  # those of the ranges before
    windows = numbers(len(number)) * width + (first_windows - tiles_before * width)[number]
    tile_starts = np.maximum(windows, starts[number])
    return tile_starts, np.minimum(windows + width, stops[number]) - tile_starts, number


def _prefix_tiles(
    batch: ForwardBatch, reads: Int64Array, sizes: TileSizes, padding: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Starts and lengths, and a segment that reads the same prefix tokens as the tile. With padding, the last entry of
    `reads` is for it."""
    num_segments = len(batch.prefix_index)
    firsts = _first_of_runs(batch.prefix_index, reads[:num_segments])
    if padding:
        firsts = _with_last(firsts, num_segments)
    starts = batch.segment_starts[firsts]
    stops = _with_last(starts, batch.num_tokens + padding)[1:]
    if not sizes.alignment:
        is_needed = reads[firsts] > 0
        firsts, starts, stops = firsts[is_needed], starts[is_needed], stops[is_needed]
    tile_starts, lens, number = _cut(starts, stops, sizes.prefix, sizes.alignment or 1)
    return tile_starts, lens, firsts[number]


def cut_scored_tiles(batch: ForwardBatch, sizes: TileSizes, prefix_addresses: Sequence[Int64Array]) -> Int32Array:
    """[4, tiles]: the `prefix_*` arrays of `Tiles` for the scored tokens alone, one behind the other; there is one at
    least. The tiles are few, so they are cut one by one."""
    segments = batch.segment_starts.searchsorted(batch.score_tokens, side="right") - 1
    prefixes, reads = batch.prefix_index[segments], batch.read_lens[segments]
    changes = ((prefixes[1:] != prefixes[:-1]) | (reads[1:] != reads[:-1])).nonzero()[0] + 1
    edges, lists = [0, *changes.tolist(), len(segments)], [*accumulate(map(len, prefix_addresses), initial=0)]
    tiles = [
        (start, min(sizes.prefix, stop - start), read, lists[prefix])
        for (first, stop), prefix, read in zip(
            pairwise(edges), prefixes[edges[:-1]].tolist(), reads[edges[:-1]].tolist(), strict=True
        )
        if read
        for start in range(first, stop, sizes.prefix)
    ]
    return np.array(tiles, np.int32).reshape(-1, 4).T


def _with_last(array: Int64Array, last: int) -> Int64Array:
    """The array and one more number: `np.append` in a fraction of its time."""
    longer = np.empty(len(array) + 1, np.int64)
    longer[:-1], longer[-1] = array, last
    return longer


def _first_of_runs(prefix_index: Int64Array, reads: Int64Array) -> Int64Array:
    """The first segment of each run of consecutive segments that read the same tokens of one prefix, or no prefix."""
    prefix = np.where(reads > 0, prefix_index, -1)
    is_first = np.ones(len(reads), bool)
    is_first[1:] = (prefix[1:] != prefix[:-1]) | (reads[1:] != reads[:-1])
    return is_first.nonzero()[0]


class Packing:
    """Many small int32 arrays in one buffer, at offsets that follow from their capacities.

    A transfer to a device takes as long for 4 bytes as for 400 kilobytes, so all integers of a forward travel as one
    array, and the device slices it.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._capacities = tuple(capacities)
        sizes = [-(-capacity // ALIGNMENT) * ALIGNMENT for capacity in capacities]
        *self._starts, self.size = accumulate(sizes, initial=0)

    def pack(self, arrays: Sequence[Int32Array], target: Int32Array) -> None:
        """Write the arrays at their offsets. Entries after the end of an array are not changed."""
        for array, start, capacity in zip(arrays, self._starts, self._capacities, strict=True):
            assert len(array) <= capacity, "a batch is larger than its program"
            target[start : start + len(array)] = array

    def unpack(self, packed: Any) -> list[Any]:
        """The arrays, each of its capacity, as slices of the buffer (numpy, torch or jax)."""
        slices = zip(self._starts, self._capacities, strict=True)
        return [packed[start : start + capacity] for start, capacity in slices]
