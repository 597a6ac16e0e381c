"""Attention over segments, in PyTorch: what a token sees is cut into tiles whose shapes depend on its segment alone.

Every query token has exactly one *diagonal* tile, its own tokens up to itself, and any number of *full* ranges that it
sees whole: earlier tiles of its segment, and its prefix. For a prefix P and an item of tiles a, b:

                keys  P P P P | a a | b b
    queries a         full      diag
            b         full      full  diag

This is cascade attention: prefix keys are never copied per item, and the parts are merged by their log-sum-exps. Memory
is linear in tokens. Isolation is bit for bit because every GEMM has one of a few fixed shapes (rows padded), key ranges
count from the start of the prefix or of the segment, and padding repeats the item's own tokens.

The `dense` mask goes through the same tiles with the mask read from one [tokens, tokens] array, and then scores every
pair outside the tiles, which the array hides: the same bits at the price of a dense mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.dense_mask import DenseMask
from prefixwise.backends.torch.devices import take, token_index, upload
from prefixwise.backends.torch.kv_blocks import KeysValues, Piece, PrefixLocations, longest_reads, read_pieces
from prefixwise.backends.torch.softmax import NEG_INF, Partial, masked_softmax, merge, merge_into
from prefixwise.backends.torch.tiles import DiagonalTiles, FullRange, cut_diagonals, cut_full_ranges
from prefixwise.backends.torch.workers import Workers
from prefixwise.forward.batch import ForwardBatch, Layout

# Query rows (query heads of one KV head folded in) of one full-range GEMM: on a CPU a multiple of CPU_FULL_ROWS. Larger
# GEMMs are faster, as each reorders the keys; from 64 rows on a row's bits do not depend on the number of rows. On a
# GPU they do, so all GEMMs have CUDA_FULL_ROWS.
CPU_FULL_ROWS, CPU_MAX_FULL_ROWS = 64, 1024
CUDA_FULL_ROWS = 256
PLAIN_KEY_TILE = 512  # keys that are scored at a time where there is no flash attention
KEY_ALIGNMENT = 16

# PyTorch's flash attention for CPUs; this entry point also returns the log-sum-exp.
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Attention(ABC):
    """Attention of one forward pass; made once, called for every layer."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cached: KeysValues | None) -> Tensor:
        """Attend.

        Args:
            q: [T, N, H] queries, after RoPE. T includes padding tokens at the end, whose output is zero.
            k: [T, K, H] keys, after RoPE.
            v: [T, K, H] values.
            cached: this layer's keys and values of the cached KV blocks of all prefixes, one after the other, each
                [S, K, H].

        Returns:
            [T, N, H], in float32 or already rounded to q's dtype.
        """


class TiledAttention(Attention):
    """For CPUs, and for float32 on a GPU.

    With `pads_tiles`, diagonal tiles have one of a few widths. Without it, a tile is as wide as it has tokens, and
    consecutive tiles of one width are read in place. In bfloat16 that is exact: a tile's bits depend on its width
    alone. In float32 they may depend on its address, so tiles are padded and begin at multiples of 64 bytes.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        device: torch.device,
        heads_per_kv: int,
        workers: Workers,
        *,
        pads_tiles: bool = True,
    ) -> None:
        self._workers = workers
        full_ranges, diagonals = (
            cut_full_ranges(batch),
            cut_diagonals(batch, padded=pads_tiles, filled=device.type != "cpu"),
        )
        self._num_tokens = len(batch.token_ids)
        self._prefixes = _pieces_to_read(batch, full_ranges)
        # A token's parts are merged in order: first its earlier tiles, then its prefix. A token is once in each phase.
        self._phases = [
            _cut_queries(parts, heads_per_kv, workers.num_threads, device)
            for parts in (
                [part for part in full_ranges if part.prefix is None],
                [part for part in full_ranges if part.prefix is not None],
            )
        ]
        self._diagonals = [_DiagonalGroup.on_device(tiles, device) for tiles in diagonals]
        self._dense: DenseMask | None = None
        if batch.layout is Layout.PACKED and batch.mask == "dense":
            self._dense = DenseMask(batch, diagonals, full_ranges, device)
            masks = self._dense.hidden_in_diagonals
            self._diagonals = [
                replace(group, hidden=each, is_causal=False) for group, each in zip(self._diagonals, masks, strict=True)
            ]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cached: KeysValues | None) -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        if self._num_tokens < len(q):
            out[self._num_tokens :] = 0.0  # every other token has a diagonal tile, which is written first
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        merged = (out, lse)
        # Each prefix once, at the greatest length that is read; shorter reads are slices of it.
        prefixes = {prefix: read_pieces(pieces, k, v, cached) for prefix, pieces in self._prefixes.items()}
        self._workers.run(lambda group: _attend_diagonal(q, k, v, group, merged), self._diagonals)
        for tiles in self._phases:
            self._workers.run(lambda tile: _attend_full(q, *_keys_of(tile[0], k, v, prefixes), tile[1], merged), tiles)
        if self._dense is not None:
            self._dense.attend_rest(q, k, v, merged)
        return out


def _pieces_to_read(batch: ForwardBatch, parts: Sequence[FullRange]) -> dict[int, list[Piece]]:
    """The pieces of every prefix that is read, up to the greatest length that is read."""
    locations = PrefixLocations(batch)
    longest = longest_reads((part.prefix, part.stop) for part in parts if part.prefix is not None)
    return {prefix: locations.pieces(prefix, length) for prefix, length in longest.items()}


def _keys_of(part: FullRange, k: Tensor, v: Tensor, prefixes: Mapping[int, KeysValues]) -> KeysValues:
    """The keys and values of a range, in a prefix or in the batch."""
    if part.prefix is not None:
        k, v = prefixes[part.prefix]
    return k[part.start : part.stop], v[part.start : part.stop]


@dataclass(frozen=True)
class _DiagonalGroup:
    """`DiagonalTiles` on the device, with the mask of each tile."""

    index: Tensor | slice  # [g * W] tokens
    slots: Tensor | None  # [real tokens] their indices in `index`; None: all are real
    real: Tensor | slice  # [real tokens] in the batch
    hidden: Tensor  # [g, 1, W, W], True where a key may not be seen
    is_causal: bool = True  # are exactly the keys after the query hidden?

    @classmethod
    def on_device(cls, tiles: DiagonalTiles, device: torch.device) -> _DiagonalGroup:
        num_tiles, width = tiles.tokens.shape
        later = torch.ones(width, width, dtype=torch.bool, device=device).triu(1)
        tokens = tiles.tokens.reshape(-1)
        index, is_padded = token_index(tokens, device), len(tiles.slots) < len(tokens)
        slots = upload(tiles.slots, device) if is_padded else None
        real = token_index(tokens[tiles.slots], device) if is_padded else index
        return cls(index, slots, real, later.expand(num_tiles, 1, width, width))


def _attend_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup, merged: Partial) -> None:
    """The first part of every token: written to `merged`, not merged into it."""
    attend = _flash_diagonal if q.device.type == "cpu" else _plain_diagonal
    for target, rows in zip(merged, attend(q, k, v, group), strict=True):
        target[group.real] = (rows if group.slots is None else rows.index_select(0, group.slots)).to(target.dtype)


def _flash_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup) -> Partial:
    """[g W, N, H] in q's dtype, and [g W, N]."""
    num_tiles, _, width, _ = group.hidden.shape
    q, k, v = (take(each, group.index).view(num_tiles, width, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
    mask = None
    if not group.is_causal:
        mask = torch.zeros(group.hidden.shape, dtype=q.dtype).masked_fill_(group.hidden, NEG_INF)
    out, lse = _flash_of_groups(q, k, v, group.is_causal, mask)
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _flash_of_groups(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None) -> Partial:
    """q [g, N, W, H], k and v [g, K, W, H] to [g, N, W, H] and [g, N, W]."""
    if not _flash_knows_groups():
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out, lse = _FLASH(q, k, v, 0.0, is_causal, attn_mask=mask)
    return out, lse


@cache
def _flash_knows_groups() -> bool:
    """Does PyTorch's flash attention take fewer KV heads than query heads?

    One that does not would read on after the last KV head, where this probe has other keys.
    """
    q, keys = torch.randn(2, 1, 4, 2, 16, generator=torch.Generator().manual_seed(0))
    groups, _ = _FLASH(q, keys[:, :2], keys[:, :2])
    repeated = keys[:, :2].repeat_interleave(2, 1)
    return torch.equal(groups, _FLASH(q, repeated, repeated)[0])


def _plain_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup) -> Partial:
    """[g W, N, H] and [g W, N]. Query heads of one KV head become rows."""
    (num_tiles, _, width, _), (_, num_kv_heads, head_size) = group.hidden.shape, k.shape
    heads_per_kv = q.shape[1] // num_kv_heads
    queries = q[group.index].float().view(num_tiles, width, num_kv_heads, heads_per_kv, head_size)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, heads_per_kv * width, head_size)
    keys = k[group.index].float().view(num_tiles, width, num_kv_heads, head_size).transpose(1, 2)
    values = v[group.index].float().view(num_tiles, width, num_kv_heads, head_size).transpose(1, 2)
    out, lse = masked_softmax(queries, keys, values, group.hidden.repeat(1, 1, heads_per_kv, 1))
    out = out.view(num_tiles, num_kv_heads, heads_per_kv, width, head_size).permute(0, 3, 1, 2, 4)
    lse = lse.view(num_tiles, num_kv_heads, heads_per_kv, width).permute(0, 3, 1, 2)
    return out.reshape(-1, *q.shape[1:]), lse.reshape(-1, q.shape[1])


def _cut_queries(
    parts: Sequence[FullRange], heads_per_kv: int, num_threads: int, device: torch.device
) -> list[tuple[FullRange, Tensor | slice]]:
    """Every range with its query tokens cut into tiles of one GEMM each: large ones, and at least one per thread."""
    cut = []
    for part in parts:
        rows_per_thread = -(-len(part.queries) * heads_per_kv // num_threads)
        multiple, most = _full_rows(device)
        step = max(1, min(most, -(-rows_per_thread // multiple) * multiple) // heads_per_kv)
        starts = range(0, len(part.queries), step)
        cut += [(part, token_index(part.queries[start : start + step], device)) for start in starts]
    return cut


def _full_rows(device: torch.device) -> tuple[int, int]:
    """The number of rows of a full-range GEMM is a multiple of the first number, and at most the second."""
    return (CPU_FULL_ROWS, CPU_MAX_FULL_ROWS) if device.type == "cpu" else (CUDA_FULL_ROWS, CUDA_FULL_ROWS)


def _attend_full(q: Tensor, keys: Tensor, values: Tensor, tokens: Tensor | slice, merged: Partial) -> None:
    """One GEMM of a multiple of `_full_rows` query rows, padded where the tokens give fewer; merged into `merged`."""
    num_kv_heads, head_size = keys.shape[1:]
    queries = take(q, tokens)
    num_tokens, heads_per_kv = len(queries), q.shape[1] // num_kv_heads
    num_rows = num_tokens * heads_per_kv
    queries = queries.view(num_tokens, num_kv_heads, heads_per_kv, head_size).transpose(0, 1)
    queries = queries.reshape(num_kv_heads, num_rows, head_size)
    multiple, _ = _full_rows(q.device)
    out, lse = full_attention(_filled_up(queries, -(-num_rows // multiple) * multiple), keys, values)
    out = out[:, :num_rows].view(num_kv_heads, num_tokens, heads_per_kv, head_size).transpose(0, 1)
    lse = lse[:, :num_rows].view(num_kv_heads, num_tokens, heads_per_kv).transpose(0, 1)
    so_far = take(merged[0], tokens), take(merged[1], tokens)  # views where the tokens are a slice
    merge_into(so_far, (out.float().reshape(so_far[0].shape), lse.reshape(so_far[1].shape)))
    if not isinstance(tokens, slice):
        merged[0][tokens], merged[1][tokens] = so_far


def _filled_up(rows: Tensor, size: int) -> Tensor:
    """[K, rows, H] to [K, size, H] with copies of the first row."""
    missing = size - rows.shape[1]
    return torch.cat([rows, rows[:, :1].expand(-1, missing, -1)], 1) if missing else rows


def full_attention(q: Tensor, keys: Tensor, values: Tensor) -> Partial:
    """No mask: q [K, R, H] over keys and values [S, K, H]; gives [K, R, H] and [K, R]."""
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    if q.device.type == "cpu":
        out, lse = _FLASH(q.contiguous().unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
        return out[0], lse[0]
    return _softmax_over_key_tiles(q.float(), k.float(), v.float())


def _softmax_over_key_tiles(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Keys in tiles, so that the scores stay small whatever the prefix's length; all [K, .., H].

    A tile's keys are padded, and masked, to a multiple of KEY_ALIGNMENT: CUDA sums a row of another length in an order
    that depends on the row's address, that is, on its index.
    """
    merged: Partial | None = None
    for start in range(0, k.shape[1], PLAIN_KEY_TILE):
        keys, values = k[:, start : start + PLAIN_KEY_TILE], v[:, start : start + PLAIN_KEY_TILE]
        missing = -keys.shape[1] % KEY_ALIGNMENT
        hidden = torch.arange(keys.shape[1] + missing, device=k.device) >= keys.shape[1]
        keys, values = (F.pad(each, (0, 0, 0, missing))[None] for each in (keys, values))
        out, lse = masked_softmax(q[None], keys, values, hidden)
        merged = (out[0], lse[0]) if merged is None else merge(merged, (out[0], lse[0]))
    assert merged is not None, "a full range is never empty"
    return merged
