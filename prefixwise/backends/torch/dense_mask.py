"""The `dense` mask of packed sequences: one [tokens, tokens] array per sequence, as the earlier system sent it.

It is the baseline for `segment`. The tiles are those of `segment`, with their masks read from the array, and no pair is
skipped: pairs outside all tiles are scored and masked, in square tiles of their own. Hidden pairs add exactly nothing,
so both masks give the same bits; dense pays with memory and time that grow with the square of the sequence, so it
refuses long sequences (`plan/algorithms.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixwise.backends.torch.devices import upload
from prefixwise.backends.torch.softmax import PLAIN_SCORES, Partial, ScoreRule, masked_softmax, merge
from prefixwise.backends.torch.tiles import DiagonalTiles, FullRange
from prefixwise.forward.batch import ForwardBatch

TILE = 512  # tokens on a side of the square tiles in which the pairs outside all other tiles are scored

BoolArray = NDArray[np.bool_]


class DenseMask:
    """The masks of all sequences of a packed batch, on the device."""

    def __init__(
        self,
        batch: ForwardBatch,
        diagonals: Sequence[DiagonalTiles],
        full_ranges: Sequence[FullRange],
        device: torch.device,
        window: int = 0,  # of the layer; the full ranges are those of the same window
    ) -> None:
        self._starts = [int(start) for start in batch.sequence_starts]
        masks = [_dense_mask(batch, sequence, window) for sequence in range(len(self._starts) - 1)]
        self.hidden_in_diagonals = [upload(~self._read_diagonals(masks, tiles), device) for tiles in diagonals]
        for part in full_ranges:
            self._clear_full_range(batch, masks, part)
        for tiles in diagonals:
            self._clear_diagonals(masks, tiles)
        # Visible pairs that no tile has scored would be visible here.
        self._hidden = [upload(~mask, device) for mask in masks]

    def _sequence_of(self, token: int) -> int:
        return int(np.searchsorted(self._starts, token, side="right")) - 1

    def _read_diagonals(self, masks: list[BoolArray], tiles: DiagonalTiles) -> BoolArray:
        """[g, 1, W, W]. Padding repeats a token of the same tile, so the causal mask of the tile applies too."""
        read = np.empty((len(tiles.tokens), 1, tiles.tokens.shape[1], tiles.tokens.shape[1]), np.bool_)
        for number, tokens in enumerate(tiles.tokens):
            sequence = self._sequence_of(int(tokens[0]))
            local = tokens - self._starts[sequence]
            read[number, 0] = np.tril(masks[sequence][np.ix_(local, local)])
        return read

    def _clear_diagonals(self, masks: list[BoolArray], tiles: DiagonalTiles) -> None:
        for tokens in tiles.tokens:
            sequence = self._sequence_of(int(tokens[0]))
            local = tokens - self._starts[sequence]
            masks[sequence][np.ix_(local, local)] = False

    def _clear_full_range(self, batch: ForwardBatch, masks: list[BoolArray], part: FullRange) -> None:
        sequence = self._sequence_of(int(part.queries[0]))
        start, stop = part.start, part.stop
        if part.prefix is not None:
            start = _prefix_start(batch, part.prefix)
            stop += start
        first = self._starts[sequence]
        masks[sequence][part.queries - first, start - first : stop - first] = False

    def attend_rest(self, q: Tensor, k: Tensor, v: Tensor, merged: Partial, rule: ScoreRule = PLAIN_SCORES) -> None:
        """Score every pair of every sequence, with the pairs of the tiles hidden, and merge it into `merged`."""
        for sequence, hidden in enumerate(self._hidden):
            start = self._starts[sequence]
            for query in range(0, len(hidden), TILE):
                for key in range(0, len(hidden), TILE):
                    tile = hidden[query : query + TILE, key : key + TILE]
                    into = merged[0][start:], merged[1][start:]
                    _attend_tile(q[start:], k[start:], v[start:], query, key, tile, into, rule)


def _attend_tile(
    q: Tensor, k: Tensor, v: Tensor, query: int, key: int, hidden: Tensor, merged: Partial, rule: ScoreRule
) -> None:
    heads_per_kv = q.shape[1] // k.shape[1]
    rows, columns = slice(query, query + hidden.shape[0]), slice(key, key + hidden.shape[1])
    queries = q[rows].float().transpose(0, 1)[None]  # [1, N, R, H]
    keys = k[columns].float().transpose(0, 1).repeat_interleave(heads_per_kv, 0)[None]
    values = v[columns].float().transpose(0, 1).repeat_interleave(heads_per_kv, 0)[None]
    out, lse = masked_softmax(queries, keys, values, hidden, rule)
    part = (out[0].transpose(0, 1), lse[0].transpose(0, 1))
    merged[0][rows], merged[1][rows] = merge((merged[0][rows], merged[1][rows]), part)


def _prefix_start(batch: ForwardBatch, prefix: int) -> int:
    """The first token of a prefix, whose KV blocks are consecutive segments."""
    source = batch.prefixes[prefix]
    assert source.segment is not None and not source.blocks, "a packed sequence holds its own prefix"
    return int(batch.segment_starts[source.segment])


def _dense_mask(batch: ForwardBatch, sequence: int, window: int) -> BoolArray:
    """[tokens, tokens] of a sequence: True where the query (first axis) may see the key."""
    start, stop = int(batch.sequence_starts[sequence]), int(batch.sequence_starts[sequence + 1])
    mask = np.zeros((stop - start, stop - start), np.bool_)
    first, last = np.searchsorted(batch.segment_starts, [start, stop])
    for segment in range(int(first), int(last)):
        tokens = slice(*(int(edge) - start for edge in batch.segment_starts[segment : segment + 2]))
        length = tokens.stop - tokens.start
        mask[tokens, tokens] = _causal(length, 0, length, window)
        if batch.prefix_index[segment] >= 0:
            prefix_start = _prefix_start(batch, int(batch.prefix_index[segment])) - start
            num_read = int(batch.prefix_lens[segment])
            mask[tokens, prefix_start : prefix_start + num_read] = _causal(length, num_read, num_read, window)
    return mask


def _causal(num_queries: int, first_position: int, num_keys: int, window: int) -> BoolArray:
    """[queries, keys]: queries have positions from `first_position` on, keys from 0 on."""
    distance = first_position + np.arange(num_queries)[:, None] - np.arange(num_keys)
    return (distance >= 0) & ((distance < window) if window else True)
