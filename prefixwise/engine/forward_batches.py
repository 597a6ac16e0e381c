"""From the parts of a step to the arrays of a forward: tokens, positions, attention layout, scored tokens.

prefill     KV blocks of prefixes; each block attends to those before it
extend      item tokens, which attend to cached blocks
joined      both in one forward: the blocks, then the items, which may attend to them
sequences   prefix and items in one sequence, for serial and packed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.ragged import Int32Array, Int64Array, numbers, ranges, starts_from_lens
from prefixwise.forward.batch import KV_BLOCK_SIZE, EmbedOverrides, ForwardBatch, Layout, Prefix
from prefixwise.plan.algorithms import PackedSequence, ScorePlan
from prefixwise.plan.segments import Segments

Integer = TypeVar("Integer", np.int32, np.int64)

_NO_LABELS = np.zeros((0, 0), np.int32)
_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class BlockRun:
    """Blocks first..stop of a prefix, after its cached blocks."""

    prefix_ids: Int32Array  # of the whole prefix
    first: int
    stop: int
    vectors: Vectors | None = None  # of ids below 0

    @property
    def num_blocks(self) -> int:
        return self.stop - self.first

    @property
    def token_ids(self) -> Int32Array:
        return self.prefix_ids[self.first * KV_BLOCK_SIZE : self.stop * KV_BLOCK_SIZE]

    @property
    def lens(self) -> Int64Array:
        num_full = self.num_blocks - 1
        return np.array([KV_BLOCK_SIZE] * num_full + [len(self.token_ids) - num_full * KV_BLOCK_SIZE])

    @property
    def prefix_lens(self) -> Int64Array:
        """Each block attends to all blocks before it."""
        return KV_BLOCK_SIZE * numbers(self.stop)[self.first :]


@dataclass(frozen=True)
class ItemRun:
    """The item tokens of segments first..stop, which attend to one of the forward's prefixes."""

    segments: Segments
    first: int
    stop: int
    prefix: int  # its index; -1: no prefix

    @property
    def token_range(self) -> tuple[int, int]:
        """Where its tokens begin and end in the item tokens of its request."""
        starts = self.segments.tokens.starts
        return int(starts[self.first]), int(starts[self.stop])

    @property
    def num_tokens(self) -> int:
        begin, end = self.token_range
        return end - begin

    @property
    def token_ids(self) -> Int32Array:
        return self.segments.tokens.flat[slice(*self.token_range)]

    @property
    def vectors(self) -> Vectors | None:
        return self.segments.vectors

    @property
    def lens(self) -> Int64Array:
        return self.segments.tokens.lens[self.first : self.stop]

    @property
    def prefix_lens(self) -> Int64Array:
        return self.segments.prefix_lens[self.first : self.stop]


@dataclass(frozen=True)
class SequenceRun:
    """Sequences first..stop of a plan."""

    plan: ScorePlan
    first: int
    stop: int

    @property
    def sequences(self) -> Sequence[PackedSequence]:
        return self.plan.sequences[self.first : self.stop]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


def joined_batch(
    blocks: Sequence[BlockRun], items: Sequence[ItemRun], *, need_logsumexp: bool, need_hidden: bool = False
) -> ForwardBatch:
    """Blocks to be cached, then items to be scored; either may be missing.

    The prefix of the first run of blocks has index 0, that of the second 1, and so on. Items that attend to those
    blocks have that index. Prefixes that are wholly cached have the indices after them. The cached blocks are added
    when the forward starts (`StepForward.batch_with_prefixes`), as the device may still compute them.
    """
    firsts = list(accumulate((run.num_blocks for run in blocks), initial=0))
    lens = _concatenate([*(run.lens for run in blocks), *(run.lens for run in items)])
    prefix_lens = _concatenate([*(run.prefix_lens for run in blocks), *(run.prefix_lens for run in items)])
    prefix_indices = [*range(len(blocks)), *(run.prefix for run in items)]
    num_segments = [*(run.num_blocks for run in blocks), *(run.stop - run.first for run in items)]
    starts = starts_from_lens(lens)
    runs: list[BlockRun | ItemRun] = [*blocks, *items]
    token_ids, overrides = _embedded([(run.token_ids, run.vectors) for run in runs])
    return ForwardBatch(
        layout=Layout.EXTEND,
        token_ids=token_ids,
        positions=_positions(prefix_lens, lens),
        segment_starts=starts,
        prefix_index=np.where(prefix_lens > 0, np.repeat(prefix_indices, num_segments), -1),
        prefix_lens=prefix_lens,
        prefixes=tuple(Prefix(segment=first) for first in firsts[:-1]),
        sequence_starts=starts[[0, -1]],
        score_tokens=_score_tokens(items, int(starts[firsts[-1]])),
        label_ids=_join_labels([_label_ids(run.segments, run.first, run.stop) for run in items]),
        need_logsumexp=need_logsumexp,
        need_hidden=need_hidden,
        cache_segments=tuple(range(firsts[-1])),
        embed_overrides=overrides,
    )


def _score_tokens(items: Sequence[ItemRun], offset: int) -> Int64Array:
    """`offset`: where in the batch the first item begins."""
    found = [_NO_TOKENS]
    for run in items:
        found.append(_score_offsets(run.segments, run.first, run.stop) + (offset - run.token_range[0]))
        offset += run.num_tokens
    return np.concatenate(found)


def sequences_batch(runs: Sequence[SequenceRun], *, need_logsumexp: bool, need_hidden: bool = False) -> ForwardBatch:
    """Sequences of a prefix, cut into blocks, and the items behind it: one (serial) or several (packed).

    All runs have one layout and one mask.
    """
    plan = runs[0].plan
    parts = [_sequence_segments(run.plan.segments, sequence) for run in runs for sequence in run.sequences]
    sequence_lens = np.array([sequence.num_tokens for run in runs for sequence in run.sequences], np.int64)
    sequence_starts = starts_from_lens(sequence_lens)
    segments_before = starts_from_lens(np.array([len(part.lens) for part in parts], np.int64))
    lens = _concatenate([part.lens for part in parts])
    prefix_lens = _concatenate([part.prefix_lens for part in parts])
    sequence_of = np.repeat(numbers(len(parts)), np.diff(segments_before))
    token_ids, overrides = _embedded([(part.token_ids, part.vectors) for part in parts])
    return ForwardBatch(
        layout=Layout.CAUSAL if plan.algorithm == "serial" else Layout.PACKED,
        token_ids=token_ids,
        positions=_positions(prefix_lens, lens),
        segment_starts=starts_from_lens(lens),
        prefix_index=np.where(prefix_lens > 0, sequence_of, -1),
        prefix_lens=prefix_lens,
        prefixes=tuple(Prefix(segment=int(segment)) for segment in segments_before[:-1]),
        sequence_starts=sequence_starts,
        score_tokens=_concatenate(
            [part.score_offsets + start for part, start in zip(parts, sequence_starts[:-1], strict=True)]
        ),
        label_ids=_join_labels(
            [_label_ids(run.plan.segments, sequence.first, sequence.stop) for run in runs for sequence in run.sequences]
        ),
        need_logsumexp=need_logsumexp,
        need_hidden=need_hidden,
        mask=plan.mask or "segment",
        embed_overrides=overrides,
    )


@dataclass(frozen=True)
class _SequenceSegments:
    """The segments of one sequence: the blocks of its prefix, then its items."""

    lens: Int64Array
    prefix_lens: Int64Array
    token_ids: Int32Array
    score_offsets: Int64Array  # from the sequence's start
    vectors: Vectors | None


def _sequence_segments(segments: Segments, sequence: PackedSequence) -> _SequenceSegments:
    prefix_len = len(segments.prefix_ids)
    block_starts = KV_BLOCK_SIZE * numbers(-(-prefix_len // KV_BLOCK_SIZE))
    block_lens = np.minimum(KV_BLOCK_SIZE, prefix_len - block_starts)
    items, first, stop = segments.tokens, sequence.first, sequence.stop
    begin, end = items.starts[first], items.starts[stop]
    return _SequenceSegments(
        lens=np.concatenate([block_lens, items.lens[first:stop]]),
        prefix_lens=np.concatenate([block_starts, segments.prefix_lens[first:stop]]),
        token_ids=np.concatenate([segments.prefix_ids, items.flat[begin:end]]),
        score_offsets=_score_offsets(segments, first, stop) + (prefix_len - begin),
        vectors=segments.vectors,
    )


def _embedded(pieces: list[tuple[Int32Array, Vectors | None]]) -> tuple[Int32Array, EmbedOverrides | None]:
    """The tokens of all pieces, and the vectors of those whose id is below 0; their id is 0 from here on."""
    token_ids = _concatenate([ids for ids, _ in pieces])
    found = [vectors[~ids[ids < 0]] for ids, vectors in pieces if vectors is not None]
    if not sum(map(len, found)):
        return token_ids, None
    return np.maximum(token_ids, 0), EmbedOverrides(np.flatnonzero(token_ids < 0), np.concatenate(found))


def _concatenate(pieces: list[NDArray[Integer]]) -> NDArray[Integer]:
    """Without a copy if there is one piece, as in most forwards."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _positions(prefix_lens: Int64Array, lens: Int64Array) -> Int32Array:
    """A segment's positions continue from the part of the prefix that it attends to."""
    return ranges(prefix_lens, lens).astype(np.int32)


def _score_offsets(segments: Segments, first: int, stop: int) -> Int64Array:
    rows = segments.rows_of_segment
    return segments.score_offsets[rows[first] : rows[stop]]


def _label_ids(segments: Segments, first: int, stop: int) -> Int32Array:
    """[R, L]: the request's label ids, which repeat with every item."""
    begin, end = segments.rows_of_segment[first], segments.rows_of_segment[stop]
    if len(segments.label_ids) == 1:
        return segments.label_ids.repeat(end - begin, axis=0)
    label_ids: Int32Array = segments.label_ids[np.arange(begin, end) % len(segments.label_ids)]
    return label_ids


def _join_labels(parts: list[Int32Array]) -> Int32Array:
    """One width for all: a request with fewer labels repeats its last one."""
    if not parts:
        return _NO_LABELS
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    return np.concatenate([_widened(part, width) for part in parts])


def _widened(labels: Int32Array, width: int) -> Int32Array:
    missing = width - labels.shape[1]
    return np.pad(labels, ((0, 0), (0, missing)), mode="edge") if missing else labels
