"""Cutting a batch into attention tiles: numpy only, once per forward pass, before any layer runs.

A tile's start and width follow from its own segment alone: tiles are counted from the segment's start, and the last
tile's width is chosen from the tokens that are left. So a segment's tiles do not depend on other segments.

In a layer with a sliding window a token sees a range from its *first* key on. The KV block of a range that holds the
first key is read with a mask, the blocks after it whole, and the blocks before it not at all. A token's position alone
decides which block that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from prefixwise.contract.ragged import Int64Array, ranges
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch

# Tokens of a diagonal tile, padded up to one of these where tiles are padded. Multiples of 16: CUDA sums a row of any
# other length in an order that depends on the row's address. A KV block of a prefix is one tile, whether it is a
# segment of its own or not.
TILE_WIDTHS = (16, 32, 48, 64, 96, KV_BLOCK_SIZE)
GROUP_TOKENS = 256  # at most, in one group of tiles: 16 tiles of 16, ..., 2 of 128


@dataclass(frozen=True)
class DiagonalTiles:
    """Tiles of one width that are computed together: each token sees its tile up to itself."""

    tokens: Int64Array  # [g, W]; padding repeats the tile's last token
    slots: Int64Array  # [real tokens]: their indices in the flattened [g * W]


@dataclass(frozen=True)
class FullRange:
    """Query tokens and a range of keys that all of them see whole, or from their first key on."""

    queries: Int64Array  # [queries]
    prefix: int | None  # which of the batch's prefixes; None: start..stop are tokens of the batch
    start: int
    stop: int
    first: Int64Array | None = None  # [queries]: the first key that each of them sees, start or later; None: start


def _cut_segments(batch: ForwardBatch) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Every tile's first token, its number of tokens, and the first token of its segment."""
    starts, lens = batch.segment_starts[:-1], np.diff(batch.segment_starts)
    widest = TILE_WIDTHS[-1]
    tiles_per_segment = -(-lens // widest)
    number = ranges(np.zeros_like(starts), tiles_per_segment)  # 0, 1, ... within the segment
    segment_start = np.repeat(starts, tiles_per_segment)
    tile_start = segment_start + number * widest
    tile_len = np.minimum(np.repeat(lens, tiles_per_segment) - number * widest, widest)
    return tile_start, tile_len, segment_start


def cut_diagonals(batch: ForwardBatch, *, padded: bool, filled: bool) -> list[DiagonalTiles]:
    """All diagonal tiles, in groups of one width.

    With `padded`, a tile's width is one of TILE_WIDTHS; else its number of tokens. With `filled`, groups are filled up
    with copies of a tile, so that each width has one shape.
    """
    tile_start, tile_len, _ = _cut_segments(batch)
    tile_width = np.array(TILE_WIDTHS)[np.searchsorted(TILE_WIDTHS, tile_len)] if padded else tile_len
    groups: list[DiagonalTiles] = []
    for width in np.unique(tile_width).tolist():
        chosen = np.flatnonzero(tile_width == width)
        tiles_per_group = GROUP_TOKENS // width
        for first in range(0, len(chosen), tiles_per_group):
            group = chosen[first : first + tiles_per_group]
            num_tiles = tiles_per_group if filled else len(group)
            groups.append(_diagonal_group(tile_start[group], tile_len[group], width, num_tiles))
    return groups


def _diagonal_group(starts: Int64Array, lens: Int64Array, width: int, num_tiles: int) -> DiagonalTiles:
    offsets = np.arange(width)
    is_real = offsets < lens[:, None]
    tokens = starts[:, None] + np.minimum(offsets, lens[:, None] - 1)
    missing = np.repeat(tokens[:1], num_tiles - len(tokens), axis=0)  # computed and discarded
    return DiagonalTiles(np.concatenate([tokens, missing]), np.flatnonzero(is_real))


def cut_full_ranges(batch: ForwardBatch, window: int = 0) -> list[FullRange]:
    """For every token: its segment's earlier tiles, then its prefix, both up to so many tokens back; 0: all."""
    whole = [*_earlier_tiles(batch), *prefix_ranges(batch)]
    if not window:
        return whole
    positions = token_positions(batch)
    return [part for each in whole for part in _in_window(each, positions, window)]


def token_positions(batch: ForwardBatch) -> Int64Array:
    """[T]: the position of every token, counted from the start of the prefix that it reads."""
    lens = np.diff(batch.segment_starts)
    return np.arange(batch.num_tokens) + np.repeat(batch.read_lens - batch.segment_starts[:-1], lens)


def _in_window(whole: FullRange, positions: Int64Array, window: int) -> Iterator[FullRange]:
    """The parts of a range that its queries see: a KV block with a mask and the rest, for each such block."""
    origin = whole.queries if whole.prefix is None else positions[whole.queries]
    first = np.maximum(origin - window + 1, whole.start)
    block = (first - whole.start) // KV_BLOCK_SIZE
    for number in np.unique(block[first < whole.stop]).tolist():
        is_here = (block == number) & (first < whole.stop)
        start = whole.start + number * KV_BLOCK_SIZE
        edge = min(start + KV_BLOCK_SIZE, whole.stop)
        sees_all = is_here & (first == whole.start)
        if sees_all.any():
            yield replace(whole, queries=whole.queries[sees_all])
        is_masked = is_here & ~sees_all
        if is_masked.any():
            queries = whole.queries[is_masked]
            yield FullRange(queries, whole.prefix, start, edge, first[is_masked])
            if edge < whole.stop:
                yield FullRange(queries, whole.prefix, edge, whole.stop)


def _earlier_tiles(batch: ForwardBatch) -> list[FullRange]:
    tile_start, tile_len, segment_start = _cut_segments(batch)
    later = np.flatnonzero(tile_start > segment_start)
    return [
        FullRange(
            np.arange(tile_start[i], tile_start[i] + tile_len[i]), None, int(segment_start[i]), int(tile_start[i])
        )
        for i in later
    ]


def whole_segments(batch: ForwardBatch) -> list[FullRange]:
    """Bidirectional attention: every token sees all tokens of its segment."""
    pairs = zip(batch.segment_starts[:-1].tolist(), batch.segment_starts[1:].tolist(), strict=True)
    return [FullRange(np.arange(start, stop), None, start, stop) for start, stop in pairs if stop > start]


def prefix_ranges(batch: ForwardBatch) -> list[FullRange]:
    """One range per prefix and length that is read, none of them empty: one GEMM takes all its tokens."""
    starts, lens = batch.segment_starts[:-1], np.diff(batch.segment_starts)
    readers = np.flatnonzero((batch.prefix_index >= 0) & (batch.prefix_lens > 0))
    pairs = np.stack([batch.prefix_index[readers], batch.prefix_lens[readers]], 1)
    found, which = np.unique(pairs, axis=0, return_inverse=True)
    parts = []
    for number, (prefix, length) in enumerate(found):
        segments = readers[which.reshape(-1) == number]
        parts.append(FullRange(ranges(starts[segments], lens[segments]), int(prefix), 0, int(length)))
    return parts
