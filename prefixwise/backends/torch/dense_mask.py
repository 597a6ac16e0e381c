"""The `dense` mask of packed rows: one [row, row] array that says who sees whom, as the earlier system sent it.

It serves as the baseline that `segment` is measured against. The tiles are the same as those of `segment`, with their
masks read from the array, and no pair is skipped: what the tiles do not visit is scored and masked, block by block.
Hidden pairs add exactly nothing, so both masks give the same bits; dense pays with memory and time that grow with the
square of the row, which is why it refuses long rows (`plan/algorithms.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixwise.backends.torch.softmax import Partial, masked_softmax, merge
from prefixwise.backends.torch.tiles import DiagonalTiles, FullRange
from prefixwise.backends.torch.transfer import upload
from prefixwise.forward.batch import ForwardBatch

BLOCK = 512  # tokens on a side of the blocks in which the pairs outside all tiles are scored

BoolArray = NDArray[np.bool_]


class DenseMask:
    """The masks of all rows of a packed batch, on the device."""

    def __init__(
        self,
        batch: ForwardBatch,
        diagonals: Sequence[DiagonalTiles],
        full_ranges: Sequence[FullRange],
        device: torch.device,
    ) -> None:
        self._row_starts = [int(start) for start in batch.row_starts]
        rows = [_dense_mask(batch, row) for row in range(len(self._row_starts) - 1)]
        self.hidden_in_diagonals = [upload(~self._read_diagonals(rows, tiles), device) for tiles in diagonals]
        for part in full_ranges:
            self._take_full_range(batch, rows, part)
        for tiles in diagonals:
            self._take_diagonals(rows, tiles)
        # What no tile visits stays hidden, unless the masks show something that the tiles left out.
        self._hidden = [upload(~row, device) for row in rows]

    def _row_of(self, token: int) -> int:
        return int(np.searchsorted(self._row_starts, token, side="right")) - 1

    def _read_diagonals(self, rows: list[BoolArray], tiles: DiagonalTiles) -> BoolArray:
        """[g, 1, W, W]. Padding repeats a token of its own tile, so the tile's own order is laid over it."""
        masks = np.empty((len(tiles.tokens), 1, tiles.tokens.shape[1], tiles.tokens.shape[1]), np.bool_)
        for number, tokens in enumerate(tiles.tokens):
            row = self._row_of(int(tokens[0]))
            local = tokens - self._row_starts[row]
            masks[number, 0] = np.tril(rows[row][np.ix_(local, local)])
        return masks

    def _take_diagonals(self, rows: list[BoolArray], tiles: DiagonalTiles) -> None:
        for tokens in tiles.tokens:
            row = self._row_of(int(tokens[0]))
            local = tokens - self._row_starts[row]
            rows[row][np.ix_(local, local)] = False

    def _take_full_range(self, batch: ForwardBatch, rows: list[BoolArray], part: FullRange) -> None:
        row = self._row_of(int(part.queries[0]))
        start, stop = part.start, part.stop
        if part.prefix is not None:
            start = _prefix_start(batch, part.prefix)
            stop += start
        local = part.queries - self._row_starts[row]
        rows[row][local, start - self._row_starts[row] : stop - self._row_starts[row]] = False

    def attend_rest(self, q: Tensor, k: Tensor, v: Tensor, total: Partial) -> None:
        """Score every pair of every row, masked by what the tiles left over, and merge it into `total`."""
        for row, hidden in enumerate(self._hidden):
            start = self._row_starts[row]
            for query in range(0, len(hidden), BLOCK):
                for key in range(0, len(hidden), BLOCK):
                    block = hidden[query : query + BLOCK, key : key + BLOCK]
                    _attend_block(
                        q[start:], k[start:], v[start:], query, key, block, (total[0][start:], total[1][start:])
                    )


def _attend_block(q: Tensor, k: Tensor, v: Tensor, query: int, key: int, hidden: Tensor, total: Partial) -> None:
    heads_per_kv = q.shape[1] // k.shape[1]
    rows, columns = slice(query, query + hidden.shape[0]), slice(key, key + hidden.shape[1])
    queries = q[rows].float().transpose(0, 1)[None]  # [1, N, R, H]
    keys = k[columns].float().transpose(0, 1).repeat_interleave(heads_per_kv, 0)[None]
    values = v[columns].float().transpose(0, 1).repeat_interleave(heads_per_kv, 0)[None]
    out, lse = masked_softmax(queries, keys, values, hidden)
    part = (out[0].transpose(0, 1), lse[0].transpose(0, 1))
    total[0][rows], total[1][rows] = merge((total[0][rows], total[1][rows]), part)


def _prefix_start(batch: ForwardBatch, prefix: int) -> int:
    """The first token of a prefix, which runs on over the segments that are its blocks."""
    source = batch.prefixes[prefix]
    assert source.segment is not None and not source.blocks, "a packed row holds its own prefix"
    return int(batch.segment_starts[source.segment])


def _dense_mask(batch: ForwardBatch, row: int) -> BoolArray:
    """[row tokens, row tokens]: True where the query (first axis) may see the key."""
    start, stop = int(batch.row_starts[row]), int(batch.row_starts[row + 1])
    mask = np.zeros((stop - start, stop - start), np.bool_)
    first, last = np.searchsorted(batch.segment_starts, [start, stop])
    for segment in range(int(first), int(last)):
        own = slice(*(int(edge) - start for edge in batch.segment_starts[segment : segment + 2]))
        mask[own, own] = np.tri(own.stop - own.start, dtype=np.bool_)
        if batch.prefix_index[segment] >= 0:
            prefix_start = _prefix_start(batch, int(batch.prefix_index[segment])) - start
            mask[own, prefix_start : prefix_start + int(batch.prefix_lens[segment])] = True
    return mask
