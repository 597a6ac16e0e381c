"""Forwards over prefixes and tails, as the engine would ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixwise.contract.ragged import Int32Array, ranges, starts_from_lens
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, KVBlock, Layout, MaskImpl, Prefix

RANDOM = np.random.default_rng(5)
PREFIXES = [RANDOM.integers(0, 512, length).astype(np.int32) for length in (300, 40, 1)]
TAILS = [RANDOM.integers(0, 512, length).astype(np.int32) for length in (20, 3, 140, 20, 1, 7)]
READS = [0, 1, 0, 2, 1, 1]  # which prefix each tail reads
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
        self.rows: list[int] = []  # the first segment of each

    def add_prefix(self, tokens: Int32Array, kept: Blocks = ()) -> int:
        """The blocks of a prefix that were not kept; gives the prefix's number."""
        start = prefix_len(kept)
        self.prefixes.append(Prefix(kept, len(self.pieces) if start < len(tokens) else None))
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

    def batch(self, layout: Layout, *, keep: bool = False, mask: MaskImpl = "segment") -> ForwardBatch:
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
            row_starts=starts[[*self.rows, len(lens)]] if self.rows else starts,
            score_tokens=starts[1:][self.scored] - 1,
            label_ids=np.repeat(LABELS, len(self.scored), 0),
            need_logsumexp=bool(self.scored),
            cache_segments=tuple(range(len(lens))) if keep else (),
            mask=mask,
        )


def prefill_batch(prefixes: Sequence[Int32Array], kept: Sequence[Blocks] = ()) -> ForwardBatch:
    """All blocks of the prefixes that were not kept before."""
    segments = Segments()
    for number, tokens in enumerate(prefixes):
        segments.add_prefix(tokens, kept[number] if kept else ())
    return segments.batch(Layout.EXTEND, keep=True)


def prefill(backend: Backend, prefixes: Sequence[Int32Array], kept: Sequence[Blocks] = ()) -> list[Blocks]:
    """The blocks of every prefix, kept ones first; the others are computed in one forward."""
    new = iter(backend.forward(prefill_batch(prefixes, kept)).blocks)
    kept = kept or [()] * len(prefixes)
    return [
        (*blocks, *(next(new) for _ in cut_blocks(tokens, prefix_len(blocks))))
        for tokens, blocks in zip(prefixes, kept, strict=True)
    ]


def extend_batch(tails: Sequence[Int32Array], reads: Sequence[int], prefixes: Sequence[Blocks]) -> ForwardBatch:
    segments = Segments()
    segments.prefixes = [Prefix(blocks) for blocks in prefixes]
    for tail, number in zip(tails, reads, strict=True):
        segments.add(tail, number, prefix_len(prefixes[number]), is_scored=True)
    return segments.batch(Layout.EXTEND)


def rows_batch(
    prefix: Int32Array, rows: Sequence[Sequence[Int32Array]], layout: Layout, mask: MaskImpl = "segment"
) -> ForwardBatch:
    """Every row with its own copy of the prefix: packed, or serial where each has one tail."""
    segments = Segments()
    for tails in rows:
        segments.rows.append(len(segments.pieces))
        number = segments.add_prefix(prefix)
        for tail in tails:
            segments.add(tail, number, len(prefix), is_scored=True)
    return segments.batch(layout, mask=mask)
