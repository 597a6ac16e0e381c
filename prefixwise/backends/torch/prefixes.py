"""Prefixes in PyTorch: the blocks that are kept between forwards, and where a forward finds what its segments read.

A block owns its memory, so dropping one gives it back whatever happens to the others. For a forward all blocks that it
reads are copied once into one array, prefix after prefix, of which every layer sees its part. A prefix may go on with
tokens of the batch: what a segment reads of it is then in two *pieces*, which a layer puts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from prefixwise.contract.ragged import Int64Array, ranges
from prefixwise.forward.batch import ForwardBatch, KVBlock, Prefix

KeysValues = tuple[Tensor, Tensor]  # each [S, K, H]


@dataclass(frozen=True, eq=False)
class TorchBlock(KVBlock):
    """A block's keys and values in every layer."""

    keys_values: Tensor  # [layers, 2, tokens, K, H], alone in its memory


def gather_blocks(prefixes: Sequence[Prefix]) -> list[KeysValues] | None:
    """The kept blocks of all prefixes one after the other, as a pair of [S, K, H] per layer; None where there are none.

    Three axes while it is copied: with more, PyTorch copies block by block on a GPU.
    """
    blocks = [_keys_values(block) for prefix in prefixes for block in prefix.blocks]
    if not blocks:
        return None
    num_layers, _, _, num_kv_heads, head_size = blocks[0].shape
    flat = [block.view(2 * num_layers, -1, num_kv_heads * head_size) for block in blocks]
    gathered = torch.cat(flat, 1) if len(flat) > 1 else flat[0]
    parts = gathered.view(2 * num_layers, -1, num_kv_heads, head_size).unbind()
    return list(zip(parts[0::2], parts[1::2], strict=True))


def _keys_values(block: KVBlock) -> Tensor:
    assert isinstance(block, TorchBlock), "a block of another backend"
    return block.keys_values


def kept_tokens(batch: ForwardBatch) -> Int64Array:
    """The tokens of all segments that are kept, in their order."""
    segments = np.asarray(batch.cache_segments, np.int64)
    return ranges(batch.segment_starts[segments], np.diff(batch.segment_starts)[segments])


def split_blocks(batch: ForwardBatch, keys_values: Tensor | None) -> tuple[TorchBlock, ...]:
    """[layers, 2, kept tokens, K, H] to a block per kept segment, each a copy unless it is the only one."""
    if keys_values is None:
        return ()
    lens = [int(batch.segment_starts[s + 1] - batch.segment_starts[s]) for s in batch.cache_segments]
    if len(lens) == 1:
        return (TorchBlock(lens[0], keys_values),)
    parts = torch.split(keys_values, lens, 2)
    return tuple(
        TorchBlock(length, part.clone(memory_format=torch.contiguous_format))
        for length, part in zip(lens, parts, strict=True)
    )


@dataclass(frozen=True)
class Piece:
    """Tokens that follow each other in one array: that of the kept blocks, or the batch's own."""

    is_kept: bool
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class PrefixPlaces:
    """Where the tokens of each prefix of a batch are."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._kept: list[Piece] = []
        self._batch_starts: list[int] = []
        start = 0
        for prefix in batch.prefixes:
            stop = start + sum(block.num_tokens for block in prefix.blocks)
            self._kept.append(Piece(True, start, stop))
            self._batch_starts.append(0 if prefix.segment is None else int(batch.segment_starts[prefix.segment]))
            start = stop

    def pieces(self, prefix: int, length: int) -> list[Piece]:
        """The first `length` tokens of a prefix: kept ones, then those of the batch; a piece without any is left
        out."""
        kept, start = self._kept[prefix], self._batch_starts[prefix]
        num_kept = min(kept.num_tokens, length)
        both = Piece(True, kept.start, kept.start + num_kept), Piece(False, start, start + length - num_kept)
        return [piece for piece in both if piece.num_tokens]


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """The same tokens in the fewest pieces."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and (last.is_kept, last.stop) == (piece.is_kept, piece.start):
            joined[-1] = Piece(last.is_kept, last.start, piece.stop)
        else:
            joined.append(piece)
    return joined


def read_pieces(pieces: Sequence[Piece], k: Tensor, v: Tensor, kept: KeysValues | None) -> KeysValues:
    """One layer's keys and values of the pieces, one after the other; a single one is a view, not a copy."""
    both = [_read_piece(piece, k, v, kept) for piece in pieces]
    if len(both) == 1:
        return both[0]
    return torch.cat([keys for keys, _ in both]), torch.cat([values for _, values in both])


def _read_piece(piece: Piece, k: Tensor, v: Tensor, kept: KeysValues | None) -> KeysValues:
    if piece.is_kept:
        assert kept is not None, "a piece of kept blocks, and none were gathered"
        k, v = kept
    return k[piece.start : piece.stop], v[piece.start : piece.stop]


def longest_reads(reads: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Of (prefix, length) pairs: every prefix with the greatest length at which it is read."""
    longest: dict[int, int] = {}
    for prefix, length in reads:
        longest[prefix] = max(length, longest.get(prefix, 0))
    return longest


@dataclass(frozen=True)
class OverlappingRanges:
    """Where ranges that may overlap begin in an array that holds every prefix once, and how that array is made."""

    pieces: list[Piece]  # the array, in `read_pieces`
    starts: list[int]  # of each range in it

    @classmethod
    def of(cls, places: PrefixPlaces, reads: Sequence[tuple[int, int]]) -> OverlappingRanges:
        """`reads`: which prefix, and how many of its tokens."""
        longest = longest_reads(reads)
        pieces_of = {prefix: places.pieces(prefix, length) for prefix, length in longest.items()}
        pieces = list(chain.from_iterable(pieces_of.values()))
        if len({piece.is_kept for piece in pieces}) == 1:  # all in one array: read where it is
            first, last = min(piece.start for piece in pieces), max(piece.stop for piece in pieces)
            starts = {prefix: own[0].start - first for prefix, own in pieces_of.items()}
            pieces = [Piece(pieces[0].is_kept, first, last)]
        else:
            ends = np.cumsum(list(longest.values()))
            starts = {prefix: int(end) - longest[prefix] for prefix, end in zip(longest, ends, strict=True)}
        return cls(join_pieces(pieces), [starts[prefix] for prefix, _ in reads])
