"""Attention over segments, in PyTorch: what a token sees is cut into tiles whose shapes never depend on neighbours.

Every query token has exactly one *diagonal* tile, its own tokens up to itself, and any number of *full* ranges that it
sees whole: earlier tiles of its own segment, and its prefix. For a prefix P and an item of tiles a, b:

                keys  P P P P | a a | b b
    queries a         full      diag
            b         full      full  diag

The parts are merged by their log-sum-exps. Prefix keys are never copied per item (cascade attention). Memory is linear
in tokens. Isolation is bit for bit because every matrix product has one of a few fixed shapes (rows padded), key ranges
count from the prefix's start or the segment's own start, and padding points at the item's own tokens.

The `dense` mask goes through the same tiles with the mask read from one [row, row] array, and then scores every pair
that the tiles left out, which the array says are hidden: the same bits at the price that dense masks have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from itemwise.backends.base import ForwardBatch, Layout
from itemwise.backends.torch.dense_mask import DenseMask
from itemwise.backends.torch.softmax import NEG_INF, Partial, masked_softmax, merge
from itemwise.backends.torch.tiles import DiagonalTiles, FullRange, cut_diagonals, cut_full_ranges

FULL_ROWS = 256  # query rows (heads of one KV head folded in) of one full-range product
KEY_BLOCK = 512  # keys that are scored at a time where no flash attention is at hand

KeysValues = tuple[Tensor, Tensor]  # each [S, K, H]


class Attention(ABC):
    """Attention of one forward pass; made once, called for every layer."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prefixes: Sequence[KeysValues | None]) -> Tensor:
        """Attend.

        Args:
            q: [T, N, H] queries, rotated. T includes padding tokens at the end, whose output is zero.
            k: [T, K, H] keys, rotated.
            v: [T, K, H] values.
            prefixes: this layer's keys and values of each cached prefix; None where the prefix is in the batch.

        Returns:
            [T, N, H] in q's dtype.
        """


class TiledAttention(Attention):
    """For CPUs, and for float32 on a GPU."""

    def __init__(self, batch: ForwardBatch, device: torch.device) -> None:
        self._prefix_starts = batch_prefix_starts(batch)
        full_ranges, diagonals = cut_full_ranges(batch), cut_diagonals(batch)
        self._full_ranges = [(part, torch.from_numpy(part.queries).to(device)) for part in full_ranges]
        self._diagonals = [_DiagonalGroup.on_device(tiles, device) for tiles in diagonals]
        self._dense: DenseMask | None = None
        if batch.layout is Layout.PACKED and batch.mask == "dense":
            self._dense = DenseMask(batch, diagonals, full_ranges, device)
            masks = self._dense.diagonal_masks
            self._diagonals = [replace(group, mask=mask) for group, mask in zip(self._diagonals, masks, strict=True)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prefixes: Sequence[KeysValues | None]) -> Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], NEG_INF, dtype=torch.float32, device=q.device)
        for group in self._diagonals:
            _attend_diagonal(q, k, v, group, (out, lse))
        for part, queries in self._full_ranges:
            keys, values = self._keys_of(part, k, v, prefixes)
            _attend_full(q, keys, values, queries, (out, lse))
        if self._dense is not None:
            self._dense.attend_rest(q, k, v, (out, lse))
        return out.to(q.dtype)

    def _keys_of(self, part: FullRange, k: Tensor, v: Tensor, prefixes: Sequence[KeysValues | None]) -> KeysValues:
        start, stop = part.start, part.stop
        if part.prefix is not None:
            cached = prefixes[part.prefix]
            if cached is not None:
                return cached[0][:stop], cached[1][:stop]
            start = self._prefix_starts[part.prefix]
            stop += start
        return k[start:stop], v[start:stop]


@dataclass(frozen=True)
class _DiagonalGroup:
    """`DiagonalTiles` on the device, with the mask that is laid over each tile."""

    index: Tensor  # [g * W] tokens
    slots: Tensor  # [real tokens] places in `index`
    mask: Tensor  # [g, 1, W, W], True where visible

    @classmethod
    def on_device(cls, tiles: DiagonalTiles, device: torch.device) -> _DiagonalGroup:
        num_tiles, width = tiles.tokens.shape
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        index = torch.from_numpy(tiles.tokens.reshape(-1)).to(device)
        return cls(index, torch.from_numpy(tiles.slots).to(device), causal.expand(num_tiles, 1, width, width))


def _attend_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup, total: Partial) -> None:
    """The first part that any token gets: written to `total`, not merged. Query heads of one KV head become rows."""
    (num_tiles, _, width, _), (_, num_kv_heads, head_size) = group.mask.shape, k.shape
    heads_per_kv = q.shape[1] // num_kv_heads
    queries = q[group.index].float().view(num_tiles, width, num_kv_heads, heads_per_kv, head_size)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, heads_per_kv * width, head_size)
    keys = k[group.index].float().view(num_tiles, width, num_kv_heads, head_size).transpose(1, 2)
    values = v[group.index].float().view(num_tiles, width, num_kv_heads, head_size).transpose(1, 2)
    out, lse = masked_softmax(queries, keys, values, group.mask.repeat(1, 1, heads_per_kv, 1))
    out = out.view(num_tiles, num_kv_heads, heads_per_kv, width, head_size).permute(0, 3, 1, 2, 4)
    lse = lse.view(num_tiles, num_kv_heads, heads_per_kv, width).permute(0, 3, 1, 2)
    tokens = group.index[group.slots]
    total[0][tokens] = out.reshape(-1, *q.shape[1:])[group.slots]
    total[1][tokens] = lse.reshape(-1, q.shape[1])[group.slots]


def _attend_full(q: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, total: Partial) -> None:
    """Query rows in blocks of FULL_ROWS, the last one filled up; merged into `total`."""
    num_kv_heads, head_size = keys.shape[1:]
    queries = q[tokens].view(len(tokens), num_kv_heads, -1, head_size).transpose(0, 1)  # [K, tokens, G, H]
    queries = queries.reshape(num_kv_heads, -1, head_size)
    parts = [full_attention(block, keys, values) for block in _padded_blocks(queries, FULL_ROWS)]
    num_rows = queries.shape[1]
    out = torch.cat([part[0] for part in parts], 1)[:, :num_rows].view(num_kv_heads, len(tokens), -1, head_size)
    lse = torch.cat([part[1] for part in parts], 1)[:, :num_rows].view(num_kv_heads, len(tokens), -1)
    part_out = out.transpose(0, 1).reshape(len(tokens), -1, head_size).float()
    part_lse = lse.transpose(0, 1).reshape(len(tokens), -1)
    total[0][tokens], total[1][tokens] = merge((total[0][tokens], total[1][tokens]), (part_out, part_lse))


def _padded_blocks(rows: Tensor, size: int) -> Iterator[Tensor]:
    """Blocks of `size` along axis 1 of [K, rows, H]; the last is filled up with copies of its first row."""
    for start in range(0, rows.shape[1], size):
        block = rows[:, start : start + size]
        missing = size - block.shape[1]
        yield block if not missing else torch.cat([block, block[:, :1].expand(-1, missing, -1)], 1)


def full_attention(q: Tensor, keys: Tensor, values: Tensor) -> Partial:
    """No mask: q [K, R, H] over keys and values [S, K, H]; gives [K, R, H] and [K, R]."""
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    if q.device.type == "cpu":
        # PyTorch's own flash attention; called by this name because it also returns the log-sum-exp.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q.contiguous().unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
        return out[0], lse[0]
    visible = torch.ones(1, 1, dtype=torch.bool, device=q.device)
    return _softmax_over_key_blocks(q.float(), k.float(), v.float(), visible)


def _softmax_over_key_blocks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Partial:
    """masked_softmax over keys in blocks, so that the scores stay small whatever the prefix's length."""
    total: Partial | None = None
    for start in range(0, k.shape[1], KEY_BLOCK):
        keys, values = k[:, start : start + KEY_BLOCK], v[:, start : start + KEY_BLOCK]
        out, lse = masked_softmax(q[None], keys[None], values[None], visible)
        total = (out[0], lse[0]) if total is None else merge(total, (out[0], lse[0]))
    assert total is not None, "a full range is never empty"
    return total


def batch_prefix_starts(batch: ForwardBatch) -> list[int]:
    """Where each in-batch prefix begins (0 for cached ones, never read)."""
    return [int(batch.segment_starts[p]) if isinstance(p, int) else 0 for p in batch.prefixes]
