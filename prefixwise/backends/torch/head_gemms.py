"""The GEMMs of a head: from the hidden states after items to the logits of their labels, in float32.

Only the label rows of the head are multiplied, unless a request needs a probability over the whole vocabulary; then
its log-sum-exp is taken in tiles of the vocabulary, and no [rows, V] array ever exists. GEMMs have fixed shapes, so a
row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.devices import upload
from prefixwise.backends.torch.linear import cut_rows, pad_rows
from prefixwise.backends.torch.workers import Workers
from prefixwise.contract.ragged import Int32Array

HEAD_ROW_TILES = (64, 16)  # hidden states at a time: the second where few are left and a probe shows the same bits
LABEL_TILE = 16  # label rows of the head at a time
MAX_LABEL_SETS = 64  # whose rows of the head stay on the device
VOCAB_TILE = 8192  # vocabulary rows of the head at a time
CUDA_ROW_TILE, CUDA_VOCAB_TILE = 256, 32768  # the same for the whole vocabulary on a GPU: fewer and larger GEMMs


class LabelHead:
    """Reads label logits. The head's rows of the latest sets of labels stay on the device: most requests of a server
    have the same labels, and gathering these rows takes the host longer than the GEMM."""

    def __init__(self, head: Tensor, row_tiles: Sequence[int], softcap: float = 0.0) -> None:
        self._head, self._row_tiles, self._softcap = head, row_tiles, softcap
        self._known: dict[bytes, tuple[Tensor, Tensor]] = {}  # a tile of columns, and each label's among them

    def __call__(self, hidden: Tensor, label_ids: Int32Array) -> Tensor:
        """hidden [R, D] float32, label_ids [R, L] to [R, L] float32."""
        labels = label_ids[0]
        if len(labels) <= LABEL_TILE and (label_ids == labels).all():
            columns, places = self._columns(labels)
            return _capped(_in_row_tiles(hidden, columns, self._row_tiles).index_select(1, places), self._softcap)
        distinct, places_of_rows = np.unique(label_ids, return_inverse=True)
        rows = self._rows(distinct)
        tiles = [rows[start : start + LABEL_TILE].T for start in range(0, len(rows), LABEL_TILE)]
        place_of = upload(places_of_rows.reshape(label_ids.shape), self._head.device).long()
        logits = torch.cat([_in_row_tiles(hidden, tile, self._row_tiles) for tile in tiles], 1)
        return _capped(logits.gather(1, place_of), self._softcap)

    def _columns(self, labels: Int32Array) -> tuple[Tensor, Tensor]:
        """[D, LABEL_TILE] with the columns of these labels, and where each label is among them."""
        key = labels.tobytes()
        if key not in self._known:
            if len(self._known) == MAX_LABEL_SETS:
                self._known.clear()
            distinct, places = np.unique(labels, return_inverse=True)
            self._known[key] = self._rows(distinct).T, upload(places, self._head.device).long()
        return self._known[key]

    def _rows(self, token_ids: Int32Array) -> Tensor:
        """[n, D] float32; n is a multiple of LABEL_TILE."""
        return _padded_to_multiple(self._head[upload(token_ids, self._head.device).long()].float(), LABEL_TILE)


def logsumexp(hidden: Tensor, head: Tensor, workers: Workers, row_tiles: Sequence[int], softcap: float = 0.0) -> Tensor:
    """The log-sum-exp of all logits: hidden [R, D] float32, head [V, D] to [R] float32."""
    row_tiles, vocab_tile = _tile_sizes(hidden, row_tiles)
    vocab_starts = range(0, len(head), vocab_tile)
    parts = hidden.new_empty(len(vocab_starts), len(hidden))

    def sum_vocab_tile(number: int) -> None:
        columns = _columns(head[vocab_starts[number] :][:vocab_tile])
        for start, stop in cut_rows(len(hidden), row_tiles):
            logits = _capped(_logits(pad_rows(hidden[start:stop], stop - start), columns), softcap)
            if not hidden.is_cuda:  # a row has the same bits in any number of rows
                logits = logits[: len(hidden) - start]
            parts[number, start:stop] = torch.logsumexp(_aligned_columns(logits), -1)[: len(hidden) - start]

    workers.run(sum_vocab_tile, range(len(vocab_starts)))
    return _sum_parts(parts)


class VocabularyScores(NamedTuple):
    """What one pass over the vocabulary gives for every scored token."""

    token_logits: Tensor  # [R] of one given token each
    logsumexp: Tensor  # [R]
    top_logits: Tensor  # [R, K]: the largest first
    top_ids: Tensor  # [R, K]


def score_vocabulary(
    hidden: Tensor,
    head: Tensor,
    token_ids: Tensor,
    top_k: int,
    workers: Workers,
    row_tiles: Sequence[int],
    softcap: float = 0.0,
) -> VocabularyScores:
    """Logits of given tokens, log-sum-exp and top-k: hidden [R, D] float32, head [V, D], token_ids [R].

    Tiles of the vocabulary are reduced one by one, and no [R, V] array exists.
    """
    row_tiles, vocab_tile = _tile_sizes(hidden, row_tiles)
    vocab_starts, num_rows = range(0, len(head), vocab_tile), len(hidden)
    sums, picked = hidden.new_empty(2, len(vocab_starts), num_rows)
    tops = hidden.new_full((num_rows, len(vocab_starts), top_k), float("-inf"))
    ids = torch.zeros(tops.shape, dtype=torch.long, device=hidden.device)

    def reduce_vocab_tile(number: int) -> None:
        first = vocab_starts[number]
        columns = _columns(head[first : first + vocab_tile])
        width, kept = columns.shape[1], min(top_k, columns.shape[1])
        for start, stop in cut_rows(num_rows, row_tiles):
            whole = _capped(_logits(pad_rows(hidden[start:stop], stop - start), columns), softcap)
            logits, rows = whole[: num_rows - start], slice(start, min(stop, num_rows))
            sums[number, rows] = torch.logsumexp(_aligned_columns(whole), -1)[: len(logits)]
            tops[rows, number, :kept], found = logits.topk(kept) if kept > 1 else logits.max(1, keepdim=True)
            ids[rows, number, :kept] = found + first
            places = (token_ids[rows] - first)[:, None]
            is_elsewhere = (places < 0) | (places >= width)
            found_logits = logits.gather(1, places.clamp(0, width - 1)).masked_fill(is_elsewhere, float("-inf"))
            picked[number, rows] = found_logits[:, 0]

    workers.run(reduce_vocab_tile, range(len(vocab_starts)))
    top_logits, places = tops.flatten(1).topk(top_k)
    return VocabularyScores(picked.amax(0), _sum_parts(sums), top_logits, ids.flatten(1).gather(1, places))


def _tile_sizes(hidden: Tensor, row_tiles: Sequence[int]) -> tuple[Sequence[int], int]:
    """Rows of hidden states, and of the vocabulary, of a GEMM over the vocabulary."""
    return ((CUDA_ROW_TILE,), CUDA_VOCAB_TILE) if hidden.is_cuda else (row_tiles, VOCAB_TILE)


def _columns(head: Tensor) -> Tensor:
    """Rows of the head [C, D] as `_logits` takes them: [D, C]."""
    is_multiplied_as_it_is = head.is_cuda and head.dtype == torch.bfloat16
    return head.T if is_multiplied_as_it_is else head.float().T


def _logits(hidden: Tensor, columns: Tensor) -> Tensor:
    """hidden [R, D] float32 times columns [D, C], in float32.

    A GPU multiplies bfloat16 some ten times as fast as float32: there, each hidden state is the sum of three bfloat16
    numbers, which together have all of its bits, and products are added up in float32.
    """
    if columns.dtype == torch.float32:
        if len(hidden) == HEAD_ROW_TILES[-1] and not hidden.is_cuda and _has_mkl():
            return (columns.T @ hidden.T).T  # MKL is faster with few columns
        return hidden @ columns
    high = hidden.bfloat16()
    middle = (hidden - high.float()).bfloat16()
    low = (hidden - high.float() - middle.float()).bfloat16()
    of_high, of_middle, of_low = torch.mm(torch.cat([high, middle, low]), columns, out_dtype=torch.float32).chunk(3)
    return of_low.add_(of_middle).add_(of_high)


def _has_mkl() -> bool:
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


def _sum_parts(parts: Tensor) -> Tensor:
    """The log-sum-exp of tiles [tiles, R] to that of the vocabulary, always in the same order."""
    lse = parts[0]
    for part in parts[1:]:
        most = torch.maximum(lse, part)  # not `logaddexp`, whose bits depend on a row's place on ARM
        lse = most + torch.log(torch.exp(lse - most) + torch.exp(part - most))
    return lse


def _capped(logits: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(logits / softcap), in place; 0: the logits themselves."""
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def exact_head_tiles(head: Tensor) -> tuple[int, ...]:
    """Those of HEAD_ROW_TILES in whose GEMMs with the head a row has the same bits as in those of the first."""
    hidden = torch.randn(HEAD_ROW_TILES[0], head.shape[1], generator=torch.Generator().manual_seed(0))
    last = len(head) // VOCAB_TILE * VOCAB_TILE
    labels = _padded_to_multiple(head[:LABEL_TILE], LABEL_TILE)
    sizes: tuple[int, ...] = HEAD_ROW_TILES
    for rows in (labels, head[:VOCAB_TILE], head[last:]):
        columns = rows.float().T
        expected = hidden @ columns
        sizes = tuple(size for size in sizes if torch.equal(_in_row_tiles(hidden, columns, (size,)), expected))
    return sizes


def _in_row_tiles(hidden: Tensor, columns: Tensor, row_tiles: Sequence[int]) -> Tensor:
    """hidden [R, D] times columns [D, C], in GEMMs of a few row counts; copies of the first row pad the last tile."""
    tiles = [pad_rows(hidden[start:stop], stop - start) for start, stop in cut_rows(len(hidden), row_tiles)]
    return torch.cat([_logits(tile, columns) for tile in tiles])[: len(hidden)]


def _aligned_columns(logits: Tensor) -> Tensor:
    """Columns of -inf up to a multiple of 16: CUDA sums other rows in an order that depends on their address."""
    missing = -logits.shape[1] % 16
    return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits.contiguous()


def _padded_to_multiple(rows: Tensor, multiple: int) -> Tensor:
    return pad_rows(rows, -(-len(rows) // multiple) * multiple)
