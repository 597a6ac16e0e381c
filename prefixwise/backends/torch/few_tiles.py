"""Attention of a small forward on a CPU: the GEMMs of `TiledAttention`, with a third of the operations around them.

A request of a few short items is bound by reading the weights once, and by the number of operations: each takes
microseconds, however small it is. Where no phase of attention has work for a second thread, the rows of all tiles are
gathered at once, by an index that all layers share, and results are merged where they lie. Tiles have the shapes and
strides that `TiledAttention` gives them, so a token has the same bits in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from prefixwise.backends.torch.attention import (
    Attention,
    FullTile,
    QueryCut,
    cut_queries,
    flash_of_groups,
    pieces_to_read,
    split_heads,
)
from prefixwise.backends.torch.elementwise import pad_with_zeros
from prefixwise.backends.torch.kv_blocks import KeysValues, Piece, read_pieces
from prefixwise.backends.torch.softmax import Partial, merge_into
from prefixwise.backends.torch.tiles import DiagonalTiles, cut_diagonals, cut_full_ranges
from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.batch import ForwardBatch, Layout

MAX_TOKENS = 64  # of a forward that is cut to see whether it has few tiles
MAX_GROUPS = 3  # of diagonal tiles, one after the other


def few_tiles(batch: ForwardBatch, num_kv_heads: int, cut: QueryCut, *, padded: bool) -> FewTilesAttention | None:
    """For plain causal attention; None: the batch has many tiles. `padded`: see `cut_diagonals`."""
    if batch.num_tokens > MAX_TOKENS or (batch.layout is Layout.PACKED and batch.mask == "dense"):
        return None
    ranges = cut_full_ranges(batch)
    tiles = cut_queries(ranges, cut)
    if len(tiles) > 1 or any(not isinstance(tile.tokens, slice) or tile.part.prefix is None for tile in tiles):
        return None
    diagonals = cut_diagonals(batch, padded=padded, filled=False)
    if len(diagonals) > MAX_GROUPS:
        return None
    pieces = list(pieces_to_read(batch, ranges).values())
    full = (tiles[0], pieces[0]) if tiles else None
    return FewTilesAttention(diagonals, full, num_kv_heads, cut.heads_per_kv)


class FewTilesAttention(Attention):
    """A few groups of diagonal tiles, and at most one tile of query tokens that read a prefix."""

    def __init__(
        self,
        diagonals: Sequence[DiagonalTiles],
        full: tuple[FullTile, list[Piece]] | None,  # with where its prefix lies
        num_kv_heads: int,
        heads_per_kv: int,
    ) -> None:
        self._num_kv_heads, self._heads_per_kv = num_kv_heads, heads_per_kv
        self._full = full
        self._shapes = [each.tokens.shape for each in diagonals]
        rows = [each for tiles in diagonals for each in self._diagonal_rows(tiles.tokens.reshape(-1))]
        if full is not None:
            rows.append(self._full_rows(full[0]))
        self._rows = torch.from_numpy(np.concatenate(rows))
        self._num_rows = [len(each) for each in rows]
        self._slots = _slots_of_tokens(diagonals)
        self._full_slots = self._slots if full is None else self._slots[full[0].tokens]

    def __call__(self, qkv: Tensor, num_heads: int, cached: KeysValues | None, window: int = 0) -> Tensor:
        num_rows, _, head_size = qkv.shape
        parts = qkv.view(-1, head_size).index_select(0, self._rows).split_with_sizes(self._num_rows)
        out, lse = self._attend_diagonals(parts, num_heads, head_size)
        attended = out.index_select(0, self._slots).float()
        if self._full is not None:
            tile = self._full[0]
            queries = parts[-1].view(1, self._num_kv_heads, tile.num_rows, head_size)
            prefix_out, prefix_lse = flash_of_groups(queries, *self._prefix(qkv, num_heads, cached), False, None, None)
            self._merge(attended[tile.tokens], lse.index_select(0, self._full_slots), prefix_out, prefix_lse)
        return pad_with_zeros(attended, num_rows)

    def _attend_diagonals(self, parts: Sequence[Tensor], num_heads: int, head_size: int) -> Partial:
        """[slots, N, H] and [slots, N]."""
        outs, lses = [], []
        for number, (num_tiles, width) in enumerate(self._shapes):
            q, k, v = parts[3 * number : 3 * number + 3]
            out, lse = flash_of_groups(
                q.view(num_tiles, width, num_heads, head_size).transpose(1, 2),
                k.view(num_tiles, width, -1, head_size).transpose(1, 2),
                v.view(num_tiles, width, -1, head_size).transpose(1, 2),
                True,
                None,
                None,
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))

    def _prefix(self, qkv: Tensor, num_heads: int, cached: KeysValues | None) -> KeysValues:
        """Keys and values [1, K, S, H]."""
        assert self._full is not None
        pieces, kv_heads = self._full[1], self._num_kv_heads
        if len(pieces) == 1 and not pieces[0].is_cached:
            heads = qkv[pieces[0].start : pieces[0].stop].transpose(0, 1).unsqueeze(0)
            _, keys, values = heads.split_with_sizes((num_heads, kv_heads, kv_heads), 1)
            return keys, values
        _, k, v = split_heads(qkv, num_heads)
        keys, values = read_pieces(pieces, k, v, cached)
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def _merge(self, out: Tensor, lse: Tensor, prefix_out: Tensor, prefix_lse: Tensor) -> None:
        """Prefix attention [1, K, rows, H] and [1, K, rows] into that of its tokens, [t, N, H] and [t, N]."""
        heads, kv_heads, head_size = self._heads_per_kv, self._num_kv_heads, out.shape[2]
        num_tokens, num_rows = out.shape[0], out.shape[0] * heads
        part = prefix_out[0, :, :num_rows].float().view(kv_heads, num_tokens, heads, head_size).transpose(0, 1)
        part_lse = prefix_lse[0, :, :num_rows].view(kv_heads, num_tokens, heads).transpose(0, 1)
        merge_into((out.view(part.shape), lse.view(part_lse.shape)), (part, part_lse), keeps_lse=False)

    @property
    def _num_columns(self) -> int:
        """Heads of `qkv`, N + 2 K: rows of each token."""
        return (self._heads_per_kv + 2) * self._num_kv_heads

    def _diagonal_rows(self, tokens: Int64Array) -> list[Int64Array]:
        """The rows of `qkv` that hold the queries, the keys and the values of these tokens."""
        k = self._num_kv_heads
        first, edges = tokens[:, None] * self._num_columns, accumulate((self._heads_per_kv * k, k, k), initial=0)
        return [(first + np.arange(start, stop)).reshape(-1) for start, stop in pairwise(edges)]

    def _full_rows(self, tile: FullTile) -> Int64Array:
        """The rows of the queries of a full tile, [K, rows of the GEMM]; copies of the first ones fill it up."""
        heads = np.arange(self._heads_per_kv * self._num_kv_heads).reshape(self._num_kv_heads, 1, -1)
        rows = (tile.part.queries[:, None] * self._num_columns + heads).reshape(self._num_kv_heads, -1)
        missing = tile.num_rows - rows.shape[1]
        return np.concatenate([rows, np.repeat(rows[:, :1], missing, 1)], 1).reshape(-1)


def _slots_of_tokens(diagonals: Sequence[DiagonalTiles]) -> Tensor:
    """Where the tokens of the batch are among those of the tiles, group after group."""
    starts = accumulate((tiles.tokens.size for tiles in diagonals), initial=0)
    slots = np.concatenate([start + tiles.slots for start, tiles in zip(starts, diagonals, strict=False)])
    tokens = np.concatenate([tiles.tokens.reshape(-1)[tiles.slots] for tiles in diagonals])
    return torch.from_numpy(slots[np.argsort(tokens)])
