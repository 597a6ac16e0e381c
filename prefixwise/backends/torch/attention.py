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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.dense_mask import DenseMask
from prefixwise.backends.torch.prefixes import KeysValues, Piece, PrefixPlaces, longest_reads, read_pieces
from prefixwise.backends.torch.softmax import NEG_INF, Partial, masked_softmax, merge, merge_into
from prefixwise.backends.torch.tiles import DiagonalTiles, FullRange, cut_diagonals, cut_full_ranges
from prefixwise.backends.torch.transfer import token_index, upload
from prefixwise.backends.torch.workers import Workers
from prefixwise.forward.batch import ForwardBatch, Layout

# Query rows (heads of one KV head folded in) of one full-range GEMM: on a CPU a multiple of CPU_FULL_ROWS. Larger
# GEMMs are faster, as keys are reordered in each; from 64 rows on a row's bits do not depend on their number there.
# On a GPU they do, so that all GEMMs have CUDA_FULL_ROWS.
CPU_FULL_ROWS, CPU_MAX_FULL_ROWS = 64, 1024
CUDA_FULL_ROWS = 256
KEY_TILE = 512  # keys that are scored at a time where no flash attention is at hand
KEY_ALIGNMENT = 16

# PyTorch's flash attention for CPUs; called by this name because it also returns the log-sum-exp.
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Attention(ABC):
    """Attention of one forward pass; made once, called for every layer."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kept: KeysValues | None) -> Tensor:
        """Attend.

        Args:
            q: [T, N, H] queries, rotated. T includes padding tokens at the end, whose output is zero.
            k: [T, K, H] keys, rotated.
            v: [T, K, H] values.
            kept: this layer's keys and values of the kept blocks of all prefixes, one after the other, each [S, K, H].

        Returns:
            [T, N, H], in float32 or already rounded to q's dtype.
        """


class TiledAttention(Attention):
    """For CPUs, and for float32 on a GPU.

    `pads_tiles`: diagonal tiles get one of a few widths. Without, they are as wide as they have tokens and nothing is
    copied where tiles of one width follow each other. In bfloat16 that is exact: a tile's bits depend on its width
    alone. In float32 they may depend on where in memory it begins, so that tiles begin at multiples of 64 bytes.
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
        # A token's parts are merged in turn: first its earlier tiles, then its prefix. Within a phase it comes once.
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

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kept: KeysValues | None) -> Tensor:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        out[self._num_tokens :] = 0.0  # every other token has a diagonal tile, which is the first to be written
        lse = torch.full(q.shape[:2], NEG_INF, dtype=torch.float32, device=q.device)
        total = (out, lse)
        # Put together once, at the greatest length that is read; shorter ones are slices of it.
        prefixes = {prefix: read_pieces(pieces, k, v, kept) for prefix, pieces in self._prefixes.items()}
        self._workers.run(lambda group: _attend_diagonal(q, k, v, group, total), self._diagonals)
        for blocks in self._phases:
            self._workers.run(
                lambda block: _attend_full(q, *_keys_of(block[0], k, v, prefixes), block[1], total), blocks
            )
        if self._dense is not None:
            self._dense.attend_rest(q, k, v, total)
        return out


def _pieces_to_read(batch: ForwardBatch, parts: Sequence[FullRange]) -> dict[int, list[Piece]]:
    """The pieces of every prefix that is read, up to the greatest length that is."""
    places = PrefixPlaces(batch)
    longest = longest_reads((part.prefix, part.stop) for part in parts if part.prefix is not None)
    return {prefix: places.pieces(prefix, length) for prefix, length in longest.items()}


def _keys_of(part: FullRange, k: Tensor, v: Tensor, prefixes: Mapping[int, KeysValues]) -> KeysValues:
    """The keys and values of a range: of a prefix, or of this batch."""
    if part.prefix is not None:
        k, v = prefixes[part.prefix]
    return k[part.start : part.stop], v[part.start : part.stop]


@dataclass(frozen=True)
class _DiagonalGroup:
    """`DiagonalTiles` on the device, with the mask that is laid over each tile."""

    index: Tensor | slice  # [g * W] tokens
    slots: Tensor | None  # [real tokens] places in `index`; None: all are real
    real: Tensor | slice  # [real tokens] themselves
    hidden: Tensor  # [g, 1, W, W], True where a key may not be seen
    is_causal: bool = True  # only where it comes after the query?

    @classmethod
    def on_device(cls, tiles: DiagonalTiles, device: torch.device) -> _DiagonalGroup:
        num_tiles, width = tiles.tokens.shape
        later = torch.ones(width, width, dtype=torch.bool, device=device).triu(1)
        tokens = tiles.tokens.reshape(-1)
        index, is_padded = token_index(tokens, device), len(tiles.slots) < len(tokens)
        slots = upload(tiles.slots, device) if is_padded else None
        real = upload(tokens[tiles.slots], device) if is_padded else index
        return cls(index, slots, real, later.expand(num_tiles, 1, width, width))


def _attend_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup, total: Partial) -> None:
    """The first part that any token gets: written to `total`, not merged."""
    attend = _flash_diagonal if q.device.type == "cpu" else _plain_diagonal
    if isinstance(group.real, slice):
        attend(q, k, v, group, (total[0][group.real], total[1][group.real]))
        return
    num_rows = group.hidden.shape[0] * group.hidden.shape[2]
    part = tuple(torch.empty(num_rows, *each.shape[1:], dtype=each.dtype, device=each.device) for each in total)
    attend(q, k, v, group, (part[0], part[1]))
    for whole, rows in zip(total, part, strict=True):
        whole[group.real] = rows if group.slots is None else rows[group.slots]


def _flash_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup, part: Partial) -> None:
    """To [g W, N, H] and [g W, N]. The query heads of one KV head come one after the other: no key is repeated."""
    (num_tiles, _, width, _), (num_kv_heads, head_size) = group.hidden.shape, k.shape[1:]
    shape = num_tiles, width, num_kv_heads
    queries = q[group.index].view(*shape, -1, head_size)
    keys, values = (each[group.index].view(*shape, head_size).transpose(1, 2) for each in (k, v))
    out, lse = part[0].view(*shape, -1, head_size), part[1].view(*shape, -1)
    mask = None
    if not group.is_causal:
        mask = torch.zeros(group.hidden.shape, dtype=q.dtype).masked_fill_(group.hidden, NEG_INF)
    for head in range(queries.shape[3]):
        found = _FLASH(queries[:, :, :, head].transpose(1, 2), keys, values, 0.0, group.is_causal, attn_mask=mask)
        out[:, :, :, head], lse[:, :, :, head] = (each.transpose(1, 2) for each in found)


def _plain_diagonal(q: Tensor, k: Tensor, v: Tensor, group: _DiagonalGroup, part: Partial) -> None:
    """To [g W, N, H] and [g W, N]. Query heads of one KV head become rows."""
    (num_tiles, _, width, _), (_, num_kv_heads, head_size) = group.hidden.shape, k.shape
    heads_per_kv = q.shape[1] // num_kv_heads
    queries = q[group.index].float().view(num_tiles, width, num_kv_heads, heads_per_kv, head_size)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, heads_per_kv * width, head_size)
    keys = k[group.index].float().view(num_tiles, width, num_kv_heads, head_size).transpose(1, 2)
    values = v[group.index].float().view(num_tiles, width, num_kv_heads, head_size).transpose(1, 2)
    out, lse = masked_softmax(queries, keys, values, group.hidden.repeat(1, 1, heads_per_kv, 1))
    out = out.view(num_tiles, num_kv_heads, heads_per_kv, width, head_size).permute(0, 3, 1, 2, 4)
    lse = lse.view(num_tiles, num_kv_heads, heads_per_kv, width).permute(0, 3, 1, 2)
    part[0].copy_(out.reshape(part[0].shape))
    part[1].copy_(lse.reshape(part[1].shape))


def _cut_queries(
    parts: Sequence[FullRange], heads_per_kv: int, num_threads: int, device: torch.device
) -> list[tuple[FullRange, Tensor | slice]]:
    """Every range with its query tokens in blocks that make one product each: large ones, and one for each thread."""
    cut = []
    for part in parts:
        for_each = -(-len(part.queries) * heads_per_kv // num_threads)
        multiple, most = _full_rows(device)
        step = max(1, min(most, -(-for_each // multiple) * multiple) // heads_per_kv)
        starts = range(0, len(part.queries), step)
        cut += [(part, token_index(part.queries[start : start + step], device)) for start in starts]
    return cut


def _full_rows(device: torch.device) -> tuple[int, int]:
    """What the rows of a full-range GEMM are a multiple of, and how many there are at most."""
    return (CPU_FULL_ROWS, CPU_MAX_FULL_ROWS) if device.type == "cpu" else (CUDA_FULL_ROWS, CUDA_FULL_ROWS)


def _attend_full(q: Tensor, keys: Tensor, values: Tensor, tokens: Tensor | slice, total: Partial) -> None:
    """One GEMM of a multiple of `_full_rows` query rows, padded where the tokens give fewer; merged into `total`."""
    num_kv_heads, head_size = keys.shape[1:]
    queries = q[tokens]
    num_tokens, heads_per_kv = len(queries), q.shape[1] // num_kv_heads
    num_rows = num_tokens * heads_per_kv
    queries = queries.view(num_tokens, num_kv_heads, heads_per_kv, head_size).transpose(0, 1)
    queries = queries.reshape(num_kv_heads, num_rows, head_size)
    multiple, _ = _full_rows(q.device)
    out, lse = full_attention(_filled_up(queries, -(-num_rows // multiple) * multiple), keys, values)
    out = out[:, :num_rows].view(num_kv_heads, num_tokens, heads_per_kv, head_size).transpose(0, 1)
    lse = lse[:, :num_rows].view(num_kv_heads, num_tokens, heads_per_kv).transpose(0, 1)
    so_far = total[0][tokens], total[1][tokens]  # views where the tokens are a slice
    merge_into(so_far, (out.float().reshape(so_far[0].shape), lse.reshape(so_far[1].shape)))
    if not isinstance(tokens, slice):
        total[0][tokens], total[1][tokens] = so_far


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
    return _softmax_over_key_blocks(q.float(), k.float(), v.float())


def _softmax_over_key_blocks(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Keys in blocks, so that the scores stay small whatever the prefix's length; all [K, .., H].

    A block's keys are padded, and masked, to a multiple of KEY_ALIGNMENT: CUDA sums a row of another length in an order
    that depends on the address where the row begins, that is, on its place among the others.
    """
    total: Partial | None = None
    for start in range(0, k.shape[1], KEY_TILE):
        keys, values = k[:, start : start + KEY_TILE], v[:, start : start + KEY_TILE]
        missing = -keys.shape[1] % KEY_ALIGNMENT
        hidden = torch.arange(keys.shape[1] + missing, device=k.device) >= keys.shape[1]
        keys, values = (F.pad(each, (0, 0, 0, missing))[None] for each in (keys, values))
        out, lse = masked_softmax(q[None], keys, values, hidden)
        total = (out[0], lse[0]) if total is None else merge(total, (out[0], lse[0]))
    assert total is not None, "a full range is never empty"
    return total
