"""KV blocks that own their memory, as CPUs cache them, and where a forward reads the prefixes of its segments.

Dropping a block frees its memory, whatever happens to other blocks. A forward copies all cached blocks that it reads
into one array, prefix after prefix, and every layer reads its part. A prefix may continue with tokens of the batch: a
segment then reads it in two *pieces*, which a layer puts together.
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
    """A KV block: keys and values in every layer."""

    keys_values: Tensor  # [layers, 2, tokens, K, H], with memory of its own


def gather_blocks(prefixes: Sequence[Prefix]) -> list[KeysValues] | None:
    """The cached blocks of all prefixes one after the other, as a pair of [S, K, H] per layer; None without blocks.

    The copy has three axes: with more, PyTorch copies block by block on a GPU.
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


def tokens_to_cache(batch: ForwardBatch) -> Int64Array:
    """The tokens of all segments to cache, in order."""
    segments = np.asarray(batch.cache_segments, np.int64)
    return ranges(batch.segment_starts[segments], np.diff(batch.segment_starts)[segments])


def split_blocks(batch: ForwardBatch, keys_values: Tensor | None) -> tuple[TorchBlock, ...]:
    """[layers, 2, tokens to cache, K, H] to a KV block per segment, each a copy unless it is the only one."""
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
    """Consecutive tokens in one array: that of the cached KV blocks, or the batch."""

    is_cached: bool
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class PrefixLocations:
    """Where the tokens of each prefix of a batch lie."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._cached: list[Piece] = []
        self._batch_starts: list[int] = []
        start = 0
        for prefix in batch.prefixes:
            stop = start + sum(block.num_tokens for block in prefix.blocks)
            self._cached.append(Piece(True, start, stop))
            self._batch_starts.append(0 if prefix.segment is None else int(batch.segment_starts[prefix.segment]))
            start = stop

    def pieces(self, prefix: int, length: int) -> list[Piece]:
        """The first `length` tokens of a prefix: cached ones, then those of the batch; empty pieces are left out."""
        cached, start = self._cached[prefix], self._batch_starts[prefix]
        num_cached = min(cached.num_tokens, length)
        both = Piece(True, cached.start, cached.start + num_cached), Piece(False, start, start + length - num_cached)
        return [piece for piece in both if piece.num_tokens]


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """The same tokens in the fewest pieces."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and (last.is_cached, last.stop) == (piece.is_cached, piece.start):
            joined[-1] = Piece(last.is_cached, last.start, piece.stop)
        else:
            joined.append(piece)
    return joined


def read_pieces(pieces: Sequence[Piece], k: Tensor, v: Tensor, cached: KeysValues | None) -> KeysValues:
    """One layer's keys and values of the pieces, one after the other; a single one is a view, not a copy."""
    both = [_read_piece(piece, k, v, cached) for piece in pieces]
    if len(both) == 1:
        return both[0]
    return torch.cat([keys for keys, _ in both]), torch.cat([values for _, values in both])


def _read_piece(piece: Piece, k: Tensor, v: Tensor, cached: KeysValues | None) -> KeysValues:
    if piece.is_cached:
        assert cached is not None, "a piece of cached blocks, but none were gathered"
        k, v = cached
    return k[piece.start : piece.stop], v[piece.start : piece.stop]


def longest_reads(reads: Iterable[tuple[int, int]]) -> dict[int, int]:
    """From (prefix, length) pairs: the greatest length at which each prefix is read."""
    longest: dict[int, int] = {}
    for prefix, length in reads:
        longest[prefix] = max(length, longest.get(prefix, 0))
    return longest


@dataclass(frozen=True)
class OverlappingRanges:
    """Ranges that may overlap, in an array that holds every prefix once: how to build it, and where each begins."""

    pieces: list[Piece]  # of the array; `read_pieces` builds it
    starts: list[int]  # of each range in it

    @classmethod
    def of(cls, locations: PrefixLocations, reads: Sequence[tuple[int, int]]) -> OverlappingRanges:
        """`reads`: which prefix, and how many of its tokens."""
        longest = longest_reads(reads)
        pieces_of = {prefix: locations.pieces(prefix, length) for prefix, length in longest.items()}
        pieces = list(chain.from_iterable(pieces_of.values()))
        if len({piece.is_cached for piece in pieces}) == 1:  # all in one array: read in place
            first, last = min(piece.start for piece in pieces), max(piece.stop for piece in pieces)
            starts = {prefix: found[0].start - first for prefix, found in pieces_of.items()}
            pieces = [Piece(pieces[0].is_cached, first, last)]
        else:
            ends = np.cumsum(list(longest.values()))
            starts = {prefix: int(end) - longest[prefix] for prefix, end in zip(longest, ends, strict=True)}
        return cls(join_pieces(pieces), [starts[prefix] for prefix, _ in reads])
