"""Forwards made by hand, as the engine makes them: prefixes in blocks, and who reads how much of which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixwise.contract.ragged import Int32Array, ranges, starts_from_lens
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, KVBlock, Layout, MaskImpl, Prefix

LABELS = (3, 5, 300)
Blocks = tuple[KVBlock, ...]


@dataclass(frozen=True)
class Segment:
    """Tokens, and what they read."""

    ids: Int32Array
    prefix: int = -1
    prefix_len: int = 0


@dataclass(frozen=True)
class Suffix:
    """An item's own tokens, behind so many of a prefix."""

    ids: Int32Array
    prefix_len: int
    prefix: int = 0


def draw_ids(seed: int, *lens: int) -> list[Int32Array]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 500, length).astype(np.int32) for length in lens]


def segments_batch(
    segments: Sequence[Segment],
    prefixes: Sequence[Prefix],
    layout: Layout,
    *,
    sequence_starts: Sequence[int] | None = None,
    scored: Sequence[int] = (),
    cached: Sequence[int] = (),
    mask: MaskImpl = "segment",
) -> ForwardBatch:
    """`sequence_starts`, `scored` (behind their last token) and `cached` are numbers of segments."""
    lens = np.array([len(segment.ids) for segment in segments], np.int64)
    prefix_lens = np.array([segment.prefix_len for segment in segments], np.int64)
    starts = starts_from_lens(lens)
    return ForwardBatch(
        layout=layout,
        token_ids=np.concatenate([segment.ids for segment in segments]),
        positions=ranges(prefix_lens, lens).astype(np.int32),
        segment_starts=starts,
        prefix_index=np.array([segment.prefix for segment in segments], np.int64),
        prefix_lens=prefix_lens,
        prefixes=tuple(prefixes),
        sequence_starts=starts[[0, -1] if sequence_starts is None else list(sequence_starts)],
        score_tokens=starts[1:][list(scored)] - 1,
        label_ids=np.tile(np.array(LABELS, np.int32), (len(scored), 1)),
        need_logsumexp=len(scored) > 0,
        cache_segments=tuple(cached),
        mask=mask,
    )


def cut_blocks(ids: Int32Array, prefix: int, num_cached: int = 0) -> list[Segment]:
    """The blocks of a prefix behind those that are cached; each reads all before it."""
    starts = range(num_cached * KV_BLOCK_SIZE, len(ids), KV_BLOCK_SIZE)
    return [Segment(ids[start : start + KV_BLOCK_SIZE], prefix, start) for start in starts]


def prefill_batch(prefix_ids: Sequence[Int32Array], cached: Sequence[Blocks] | None = None) -> ForwardBatch:
    """What is not cached yet of some prefixes, all of it to be cached."""
    segments: list[Segment] = []
    prefixes: list[Prefix] = []
    for ids, blocks in zip(prefix_ids, cached or [()] * len(prefix_ids), strict=True):
        prefixes.append(Prefix(blocks, segment=len(segments)))
        segments += cut_blocks(ids, len(prefixes) - 1, len(blocks))
    return segments_batch(segments, prefixes, Layout.EXTEND, cached=range(len(segments)))


def extend_batch(suffixes: Sequence[Suffix], prefixes: Sequence[Blocks]) -> ForwardBatch:
    """Suffixes over prefixes that are cached."""
    segments = [Segment(suffix.ids, suffix.prefix, suffix.prefix_len) for suffix in suffixes]
    read = [Prefix(blocks) for blocks in prefixes]
    return segments_batch(segments, read, Layout.EXTEND, scored=range(len(suffixes)))


def sequences_batch(
    prefix_ids: Int32Array, rows: Sequence[Sequence[Suffix]], layout: Layout, mask: MaskImpl = "segment"
) -> ForwardBatch:
    """Rows of the prefix and some suffixes: one each in serial sequences, any number in packed ones."""
    segments: list[Segment] = []
    prefixes: list[Prefix] = []
    sequence_starts, scored = [0], list[int]()
    for suffixes in rows:
        number = len(prefixes)
        prefixes.append(Prefix(segment=len(segments)))
        segments += cut_blocks(prefix_ids, number)
        scored += range(len(segments), len(segments) + len(suffixes))
        segments += [Segment(suffix.ids, number, suffix.prefix_len) for suffix in suffixes]
        sequence_starts.append(len(segments))
    return segments_batch(segments, prefixes, layout, sequence_starts=sequence_starts, scored=scored, mask=mask)
