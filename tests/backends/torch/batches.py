"""Forwards over prefixes and items, as the engine would ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixwise.contract.ragged import Int32Array, ranges, starts_from_lens
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, KVBlock, Layout, MaskImpl, Prefix

RANDOM = np.random.default_rng(5)
PREFIXES = [RANDOM.integers(0, 512, length).astype(np.int32) for length in (300, 40, 1)]
ITEMS = [RANDOM.integers(0, 512, length).astype(np.int32) for length in (20, 3, 140, 20, 1, 7)]
READS = [0, 1, 0, 2, 1, 1]  # which prefix each item reads
LABELS = np.array([[3, 5, 300]], np.int32)

Blocks = tuple[KVBlock, ...]


def cut_blocks(tokens: Int32Array, start: int = 0) -> list[Int32Array]:
    """From `start` on, a multiple of KV_BLOCK_SIZE."""
    return [tokens[first : first + KV_BLOCK_SIZE] for first in range(start, len(tokens), KV_BLOCK_SIZE)]


def prefix_len(blocks: Blocks) -> int:
    return sum(block.num_tokens for block in blocks)


class Segments:
    """A batch under construction: segments are added one after the other."""

    def __init__(self) -> None:
        self.pieces: list[Int32Array] = []
        self.prefix_index: list[int] = []
        self.prefix_lens: list[int] = []
        self.prefixes: list[Prefix] = []
        self.scored: list[int] = []
        self.sequences: list[int] = []  # the first segment of each

    def add_prefix(self, tokens: Int32Array, cached: Blocks = ()) -> int:
        """Add the blocks of a prefix that are not cached. Returns the prefix's number."""
        start = prefix_len(cached)
        self.prefixes.append(Prefix(cached, len(self.pieces) if start < len(tokens) else None))
        number = len(self.prefixes) - 1
        for block in cut_blocks(tokens, start):
            self.add(block, number if start else -1, start)
            start += len(block)
        return number

    def add(self, tokens: Int32Array, prefix: int, length: int, *, is_scored: bool = False) -> None:
        if is_scored:
            self.scored.append(len(self.pieces))
        self.pieces.append(tokens)
        self.prefix_index.append(prefix)
        self.prefix_lens.append(length)

    def batch(self, layout: Layout, *, caches: bool = False, mask: MaskImpl = "segment") -> ForwardBatch:
        lens = np.array([len(piece) for piece in self.pieces], np.int64)
        starts, prefix_lens = starts_from_lens(lens), np.array(self.prefix_lens, np.int64)
        return ForwardBatch(
            layout=layout,
            token_ids=np.concatenate(self.pieces),
            positions=ranges(prefix_lens, lens).astype(np.int32),
            segment_starts=starts,
            prefix_index=np.array(self.prefix_index, np.int64),
            prefix_lens=prefix_lens,
            prefixes=tuple(self.prefixes),
            sequence_starts=starts[[*self.sequences, len(lens)]] if self.sequences else starts,
            score_tokens=starts[1:][self.scored] - 1,
            label_ids=np.repeat(LABELS, len(self.scored), 0),
            need_logsumexp=bool(self.scored),
            cache_segments=tuple(range(len(lens))) if caches else (),
            mask=mask,
        )


def prefill_batch(prefixes: Sequence[Int32Array], cached: Sequence[Blocks] = ()) -> ForwardBatch:
    """All blocks of the prefixes that are not cached."""
    segments = Segments()
    for number, tokens in enumerate(prefixes):
        segments.add_prefix(tokens, cached[number] if cached else ())
    return segments.batch(Layout.EXTEND, caches=True)


def prefill(backend: Backend, prefixes: Sequence[Int32Array], cached: Sequence[Blocks] = ()) -> list[Blocks]:
    """The blocks of every prefix, cached ones first; one forward computes the rest."""
    new = iter(backend.forward(prefill_batch(prefixes, cached)).blocks)
    cached = cached or [()] * len(prefixes)
    return [
        (*blocks, *(next(new) for _ in cut_blocks(tokens, prefix_len(blocks))))
        for tokens, blocks in zip(prefixes, cached, strict=True)
    ]


def extend_batch(items: Sequence[Int32Array], reads: Sequence[int], prefixes: Sequence[Blocks]) -> ForwardBatch:
    segments = Segments()
    segments.prefixes = [Prefix(blocks) for blocks in prefixes]
    for item, number in zip(items, reads, strict=True):
        segments.add(item, number, prefix_len(prefixes[number]), is_scored=True)
    return segments.batch(Layout.EXTEND)


def sequences_batch(
    prefix: Int32Array, sequences: Sequence[Sequence[Int32Array]], layout: Layout, mask: MaskImpl = "segment"
) -> ForwardBatch:
    """Every sequence with its own copy of the prefix: packed, or serial where each has one item."""
    segments = Segments()
    for items in sequences:
        segments.sequences.append(len(segments.pieces))
        number = segments.add_prefix(prefix)
        for item in items:
            segments.add(item, number, len(prefix), is_scored=True)
    return segments.batch(layout, mask=mask)
