"""Attention over segments, in PyTorch: what a token sees is cut into tiles whose shapes depend on its segment alone.

Every query token has exactly one *diagonal* tile, its own tokens up to itself, and any number of *full* ranges that it
sees whole: earlier tiles of its segment, and its prefix. For a prefix P and an item of tiles a, b:

                keys  P P P P | a a | b b
    queries a         full      diag
            b         full      full  diag

This is cascade attention: prefix keys are never copied per item, and the parts are merged by their log-sum-exps. Memory
is linear in tokens. Isolation is bit for bit because every GEMM has one of a few fixed shapes (rows padded), key ranges
count from the start of the prefix or of the segment, and padding repeats the item's own tokens. A layer with a sliding
window reads the ranges from the KV block of its first key on, and that block with a mask (`tiles.py`).

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
from prefixwise.backends.torch.softmax import (
    NEG_INF,
    PLAIN_SCORES,
    Partial,
    ScoreRule,
    masked_softmax,
    merge,
    merge_into,
)
from prefixwise.backends.torch.tiles import (
    DiagonalTiles,
    FullRange,
    cut_diagonals,
    cut_full_ranges,
    prefix_ranges,
    whole_segments,
)
from prefixwise.backends.torch.workers import Workers
from prefixwise.forward.batch import ForwardBatch, Layout

# Query rows (query heads of one KV head folded in) of one full-range GEMM: in flash attention a multiple of
# CPU_FULL_ROWS, the fewest that PyTorch takes at a time. Larger GEMMs are faster, as each reorders the keys. A row's
# bits do not depend on the number of rows, except in half precision: oneDNN multiplies from 64 rows and keys on, else
# MKL, which adds in another order on some CPUs. So there are CPU_LEAST_HALF_ROWS at least. In plain operations (on a
# GPU, and for capped scores) bits depend on the rows, so all GEMMs have PLAIN_FULL_ROWS.
CPU_FULL_ROWS, CPU_MAX_FULL_ROWS = 32, 1024
CPU_LEAST_HALF_ROWS = 64
PLAIN_FULL_ROWS = 256
PLAIN_KEY_TILE = 512  # keys that are scored at a time where there is no flash attention
KEY_ALIGNMENT = 16
_RANGES_PER_THREAD = 4  # that keep the threads about equally busy

# PyTorch's flash attention for CPUs; this entry point also returns the log-sum-exp.
_FLASH = torch._scaled_dot_product_flash_attention_for_cpu


class Attention(ABC):
    """Attention of one forward pass; made once, called for every layer."""

    @abstractmethod
    def __call__(self, qkv: Tensor, num_heads: int, cached: KeysValues | None, window: int = 0) -> Tensor:
        """Attend.

        Args:
            qkv: [T, N + 2 K, H] queries and keys, after RoPE, and values. T includes padding tokens at the end, whose
                output is zero.
            num_heads: N.
            cached: this layer's keys and values of the cached KV blocks of all prefixes, one after the other, each
                [S, K, H].
            window: the layer's sliding window; 0: tokens see all before them.

        Returns:
            [T, N, H], in float32 or already rounded to the dtype of `qkv`.
        """


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, N + 2 K, H] to views of the queries [T, N, H], the keys and the values [T, K, H]."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = torch.split_with_sizes(qkv, (num_heads, num_kv_heads, num_kv_heads), 1)
    return q, k, v


class TiledAttention(Attention):
    """For CPUs, and for float32 on a GPU.

    With `pads_tiles`, diagonal tiles have one of a few widths. Without it, a tile is as wide as it has tokens, and
    consecutive tiles of one width are read in place. In bfloat16 that is exact: a tile's bits depend on its width
    alone. With MKL in float32 they may depend on its address, so tiles are padded and begin at multiples of 64 bytes.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        device: torch.device,
        heads_per_kv: int,
        workers: Workers,
        *,
        dtype: torch.dtype,
        pads_tiles: bool = True,
        windows: Sequence[int] = (0,),  # of the layers
        rule: ScoreRule = PLAIN_SCORES,
        is_causal: bool = True,  # False: a segment is one full range, without diagonal tiles
    ) -> None:
        self._workers = workers
        self._num_tokens = len(batch.token_ids)
        self._rule = rule
        self._prefixes = pieces_to_read(batch, cut_full_ranges(batch))
        is_flash = device.type == "cpu" and not rule.softcap
        heads = QueryCut(heads_per_kv, workers.num_threads, device, dtype, is_flash)
        self._is_causal = is_causal
        if not is_causal:
            phases = (whole_segments(batch), prefix_ranges(batch))
            self._tiles = {0: _LayerTiles([], [cut_queries(each, heads) for each in phases if each], None)}
            return
        diagonals = cut_diagonals(batch, padded=pads_tiles or not is_flash, filled=device.type != "cpu")
        self._tiles = {window: _LayerTiles.cut(batch, diagonals, window, heads) for window in sorted(set(windows))}

    def __call__(self, qkv: Tensor, num_heads: int, cached: KeysValues | None, window: int = 0) -> Tensor:
        q, k, v = split_heads(qkv, num_heads)
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        if self._num_tokens < len(q):
            out[self._num_tokens :] = 0.0  # every other token has a diagonal tile, which is written first
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if not self._is_causal:  # its first part is merged, too
            out.zero_()
            lse.fill_(NEG_INF)
        merged, tiles, rule = (out, lse), self._tiles[window], self._rule
        # Each prefix once, at the greatest length that is read; shorter reads are slices of it.
        prefixes = {prefix: read_pieces(pieces, k, v, cached) for prefix, pieces in self._prefixes.items()}
        self._workers.run(lambda group: _attend_diagonal(q, k, v, group, merged, rule), tiles.diagonals)
        for phase in tiles.phases:
            self._workers.run(lambda tile: _attend_full(q, *tile.keys_of(k, v, prefixes), tile, merged, rule), phase)
        if tiles.dense is not None:
            tiles.dense.attend_rest(q, k, v, merged, rule)
        return out


def pieces_to_read(batch: ForwardBatch, parts: Sequence[FullRange]) -> dict[int, list[Piece]]:
    """The pieces of every prefix that is read, up to the greatest length that is read."""
    locations = PrefixLocations(batch)
    longest = longest_reads((part.prefix, part.stop) for part in parts if part.prefix is not None)
    return {prefix: locations.pieces(prefix, length) for prefix, length in longest.items()}


@dataclass(frozen=True)
class QueryCut:
    """What decides how query tokens are cut into GEMMs."""

    heads_per_kv: int
    num_threads: int
    device: torch.device
    dtype: torch.dtype
    is_flash: bool  # PyTorch's flash attention for CPUs, or plain operations

    @property
    def full_rows(self) -> tuple[int, int]:
        """The number of rows of a full-range GEMM is a multiple of the first number, and at most the second."""
        return (CPU_FULL_ROWS, CPU_MAX_FULL_ROWS) if self.is_flash else (PLAIN_FULL_ROWS, PLAIN_FULL_ROWS)

    @property
    def least_rows(self) -> int:
        """Of a full-range GEMM."""
        return CPU_FULL_ROWS if self.dtype == torch.float32 else CPU_LEAST_HALF_ROWS


@dataclass(frozen=True)
class _LayerTiles:
    """All tiles of a layer with some sliding window, on the device."""

    diagonals: list[_DiagonalGroup]
    # A token's parts are merged in order: first its earlier tiles, then its prefix; of each first the KV block with a
    # mask. A token is at most once in each phase.
    phases: list[list[FullTile]]
    dense: DenseMask | None

    @classmethod
    def cut(cls, batch: ForwardBatch, diagonals: Sequence[DiagonalTiles], window: int, heads: QueryCut) -> _LayerTiles:
        full_ranges = cut_full_ranges(batch, window)
        groups = [_DiagonalGroup.on_device(tiles, heads.device, window) for tiles in diagonals]
        phases = [
            cut_queries([each for each in full_ranges if (each.prefix is None, each.first is None) == kind], heads)
            for kind in ((True, False), (True, True), (False, False), (False, True))
        ]
        dense: DenseMask | None = None
        if batch.layout is Layout.PACKED and batch.mask == "dense":
            dense = DenseMask(batch, diagonals, full_ranges, heads.device, window)
            masks = zip(groups, dense.hidden_in_diagonals, strict=True)
            groups = [replace(group, hidden=each, is_causal=False) for group, each in masks]
        return cls(groups, [phase for phase in phases if phase], dense)


@dataclass(frozen=True)
class _DiagonalGroup:
    """`DiagonalTiles` on the device, with the mask of each tile."""

    index: Tensor | slice  # [g * W] tokens
    slots: Tensor | None  # [real tokens] their indices in `index`; None: all are real
    real: Tensor | slice  # [real tokens] in the batch
    hidden: Tensor  # [g, 1, W, W], True where a key may not be seen
    is_causal: bool = True  # are exactly the keys after the query hidden?

    @classmethod
    def on_device(cls, tiles: DiagonalTiles, device: torch.device, window: int) -> _DiagonalGroup:
        num_tiles, width = tiles.tokens.shape
        hidden = torch.ones(width, width, dtype=torch.bool, device=device).triu(1)
        is_causal = not 0 < window < width
        if not is_causal:
            hidden |= torch.ones_like(hidden).tril(-window)
        tokens = tiles.tokens.reshape(-1)
        index, is_padded = token_index(tokens, device), len(tiles.slots) < len(tokens)
        slots = upload(tiles.slots, device) if is_padded else None
        real = token_index(tokens[tiles.slots], device) if is_padded else index
        return cls(index, slots, real, hidden.expand(num_tiles, 1, width, width), is_causal)


def _is_flash(q: Tensor, rule: ScoreRule) -> bool:
    """Does PyTorch's flash attention for CPUs compute these scores?"""
    return q.device.type == "cpu" and not rule.softcap


def _attend_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup, merged: Partial, rule: ScoreRule) -> None:
    """The first part of every token: written to `merged`, not merged into it."""
    attend = _flash_diagonal if _is_flash(q, rule) else _plain_diagonal
    for target, rows in zip(merged, attend(q, k, v, group, rule), strict=True):
        target[group.real] = (rows if group.slots is None else rows.index_select(0, group.slots)).to(target.dtype)


def _flash_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup, rule: ScoreRule) -> Partial:
    """[g W, N, H] in q's dtype, and [g W, N]."""
    num_tiles, _, width, _ = group.hidden.shape
    q, k, v = (take(each, group.index).view(num_tiles, width, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
    mask = None
    if not group.is_causal:
        mask = _added(group.hidden, q.dtype)
    out, lse = flash_of_groups(q, k, v, group.is_causal, mask, rule.scale)
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that flash attention adds to the scores: -inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, NEG_INF)


def flash_of_groups(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> Partial:
    """q [g, N, W, H], k and v [g, K, W, H] to [g, N, W, H] and [g, N, W]."""
    if not _flash_knows_groups():
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out, lse = _FLASH(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
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


def _plain_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup, rule: ScoreRule) -> Partial:
    """[g W, N, H] and [g W, N]. Query heads of one KV head become rows."""
    (num_tiles, _, width, _), (_, num_kv_heads, head_size) = group.hidden.shape, k.shape
    heads_per_kv = q.shape[1] // num_kv_heads
    queries = q[group.index].float().view(num_tiles, width, num_kv_heads, heads_per_kv, head_size)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, heads_per_kv * width, head_size)
    keys = k[group.index].float().view(num_tiles, width, num_kv_heads, head_size).transpose(1, 2)
    values = v[group.index].float().view(num_tiles, width, num_kv_heads, head_size).transpose(1, 2)
    out, lse = masked_softmax(queries, keys, values, group.hidden.repeat(1, 1, heads_per_kv, 1), rule)
    out = out.view(num_tiles, num_kv_heads, heads_per_kv, width, head_size).permute(0, 3, 1, 2, 4)
    lse = lse.view(num_tiles, num_kv_heads, heads_per_kv, width).permute(0, 3, 1, 2)
    return out.reshape(-1, *q.shape[1:]), lse.reshape(-1, q.shape[1])


@dataclass(frozen=True)
class FullTile:
    """Query tokens of one GEMM over a range of keys."""

    part: FullRange
    tokens: Tensor | slice
    num_rows: int  # of the GEMM: its tokens x query heads of one KV head, padded
    first: Tensor | None  # [tokens]: the first key of the range that each of them sees; None: all

    def keys_of(self, k: Tensor, v: Tensor, prefixes: Mapping[int, KeysValues]) -> KeysValues:
        """The keys and values of the range, in a prefix or in the batch."""
        if self.part.prefix is not None:
            k, v = prefixes[self.part.prefix]
        return k[self.part.start : self.part.stop], v[self.part.start : self.part.stop]

    def hidden(self, heads_per_kv: int) -> Tensor | None:
        """[rows, keys]: which keys a row of the GEMM does not see; the rows of padding are as the first one."""
        if self.first is None:
            return None
        rows = _filled_up(self.first.repeat_interleave(heads_per_kv)[None, :, None], self.num_rows)[0]
        return torch.arange(self.part.stop - self.part.start, device=rows.device) < rows


def cut_queries(parts: Sequence[FullRange], heads: QueryCut) -> list[FullTile]:
    """Every range with its query tokens cut into tiles of one GEMM each: large ones, and at least one per thread.

    Many ranges are enough for all threads: they stay whole, as threads wait for each other between small operations.
    """
    cut, (multiple, most) = [], heads.full_rows
    num_threads = 1 if len(parts) >= _RANGES_PER_THREAD * heads.num_threads else heads.num_threads
    for part in parts:
        rows_per_thread = -(-len(part.queries) * heads.heads_per_kv // num_threads)
        rows = max(heads.least_rows, _up_to(multiple, rows_per_thread))
        step = max(1, min(most, rows) // heads.heads_per_kv)
        for start in range(0, len(part.queries), step):
            tokens = part.queries[start : start + step]
            first = None
            if part.first is not None:
                first = upload(part.first[start : start + step] - part.start, heads.device)
            num_rows = max(heads.least_rows, _up_to(multiple, len(tokens) * heads.heads_per_kv))
            cut.append(FullTile(part, token_index(tokens, heads.device), num_rows, first))
    return cut


def _up_to(multiple: int, number: int) -> int:
    return -(-number // multiple) * multiple


def _attend_full(q: Tensor, keys: Tensor, values: Tensor, tile: FullTile, merged: Partial, rule: ScoreRule) -> None:
    """One GEMM, padded where the tokens give fewer rows; merged into `merged`."""
    num_kv_heads, head_size = keys.shape[1:]
    tokens = tile.tokens
    queries = take(q, tokens)
    num_tokens, heads_per_kv = len(queries), q.shape[1] // num_kv_heads
    num_rows = num_tokens * heads_per_kv
    queries = queries.view(num_tokens, num_kv_heads, heads_per_kv, head_size).transpose(0, 1)
    queries = queries.reshape(num_kv_heads, num_rows, head_size)
    out, lse = full_attention(_filled_up(queries, tile.num_rows), keys, values, tile.hidden(heads_per_kv), rule)
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


def full_attention(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None, rule: ScoreRule = PLAIN_SCORES
) -> Partial:
    """q [K, R, H] over keys and values [S, K, H], without those that `hidden` [R, S] names; to [K, R, H] and [K, R].

    Every row sees a key.
    """
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    if _is_flash(q, rule):
        mask = None if hidden is None else _added(hidden, q.dtype)[None, None]
        out, lse = _FLASH(q.contiguous().unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, scale=rule.scale)
        return out[0], lse[0]
    return _softmax_over_key_tiles(q.float(), k.float(), v.float(), hidden, rule)


def _softmax_over_key_tiles(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, rule: ScoreRule) -> Partial:
    """Keys in tiles, so that the scores stay small whatever the prefix's length; all [K, .., H].

    A tile's keys are padded, and masked, to a multiple of KEY_ALIGNMENT: CUDA sums a row of another length in an order
    that depends on the row's address, that is, on its index.
    """
    merged: Partial | None = None
    for start in range(0, k.shape[1], PLAIN_KEY_TILE):
        keys, values = k[:, start : start + PLAIN_KEY_TILE], v[:, start : start + PLAIN_KEY_TILE]
        missing = -keys.shape[1] % KEY_ALIGNMENT
        unseen = torch.arange(keys.shape[1] + missing, device=k.device) >= keys.shape[1]
        if hidden is not None:
            unseen = unseen | F.pad(hidden[:, start : start + PLAIN_KEY_TILE], (0, missing), value=True)
        keys, values = (F.pad(each, (0, 0, 0, missing))[None] for each in (keys, values))
        out, lse = masked_softmax(q[None], keys, values, unseen, rule)
        merged = (out[0], lse[0]) if merged is None else merge(merged, (out[0], lse[0]))
    assert merged is not None, "a full range is never empty"
    return merged
