"""From the parts of a step to the arrays of a forward: tokens, positions, attention layout, scored tokens.

prefill     KV blocks of prefixes; each block attends to those before it
extend      item tokens, which attend to cached blocks
joined      both in one forward: the blocks, then the items, which may attend to them
sequences   prefix and items in one sequence, for serial and packed
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.ragged import Int32Array, Int64Array, numbers, starts_from_lens
from prefixwise.forward.batch import KV_BLOCK_SIZE, EmbedOverrides, ForwardBatch, Layout, Prefix
from prefixwise.plan.algorithms import PackedSequence, ScorePlan
from prefixwise.plan.segments import Segments

Integer = TypeVar("Integer", np.int32, np.int64)

_NO_LABELS = np.zeros((0, 0), np.int32)
_NO_TOKENS = np.zeros(0, np.int64)


class BlockRun(NamedTuple):
    """Blocks first..stop of a prefix, after its cached blocks."""

    prefix_ids: Int32Array  # of the whole prefix
    first: int
    stop: int
    vectors: Vectors | None = None  # of ids below 0
    block_starts: Sequence[int] | None = None  # and where the last one ends; None: at multiples of KV_BLOCK_SIZE
    scored: Segments | None = None  # some of these segments are blocks of the run; None: no block is scored
    units: Collection[int] = ()  # of these segments: the blocks that are scored

    def rows(self) -> tuple[Int64Array, Int32Array]:
        """The tokens of the run after which logits are read, and the labels of each row."""
        if self.scored is None or self.scored.segment_of_block is None:
            return _NO_TOKENS, _NO_LABELS
        starts, units, places, labels = self.starts, set(self.units), [], []
        for block, segment in enumerate(self.scored.segment_of_block[self.first : self.stop].tolist()):
            if segment in units:
                moved_by = starts[block] - starts[0] - int(self.scored.tokens.starts[segment])
                places.append(_score_offsets(self.scored, segment, segment + 1) + moved_by)
                labels.append(_label_ids(self.scored, segment, segment + 1))
        return _concatenate(places), _concatenate(labels)

    @property
    def starts(self) -> Sequence[int]:
        """Where the blocks of this run begin; at last, where the last one ends."""
        if self.block_starts is None:
            num_tokens = len(self.prefix_ids)
            return [min(KV_BLOCK_SIZE * block, num_tokens) for block in range(self.first, self.stop + 1)]
        return self.block_starts[self.first : self.stop + 1]

    @property
    def num_tokens(self) -> int:
        starts = self.starts
        return starts[-1] - starts[0]


class ItemRun(NamedTuple):
    """The item tokens of segments first..stop, which attend to one of the forward's prefixes."""

    segments: Segments
    first: int
    stop: int
    prefix: int  # its index; -1: no prefix


@dataclass(frozen=True)
class SequenceRun:
    """Sequences first..stop of a plan."""

    plan: ScorePlan
    first: int
    stop: int

    @property
    def sequences(self) -> Sequence[PackedSequence]:
        return self.plan.sequences[self.first : self.stop]


def joined_batch(
    blocks: Sequence[BlockRun],
    items: Sequence[ItemRun],
    *,
    need_logsumexp: bool,
    need_hidden: bool = False,
    top_k: int = 0,
    lora_slots: Int32Array | None = None,
) -> ForwardBatch:
    """Blocks to be cached, then items to be scored; either may be missing.

    The prefix of the first run of blocks has index 0, that of the second 1, and so on. Items that attend to those
    blocks have that index. Prefixes that are wholly cached have the indices after them. The cached blocks are added
    when the forward starts (`StepForward.batch_with_prefixes`), as the device may still compute them.
    """
    firsts, lens, prefix_lens, pieces = _block_arrays(blocks)
    indices, num_segments = [*range(len(blocks))], [run.stop - run.first for run in blocks]
    num_blocks, num_tokens = sum(num_segments), sum([len(token_ids) for token_ids, _ in pieces])
    offsets, moved_by, labels = [], [], []
    for segments, first, stop, prefix in items:
        token_ids, item_lens, item_reads, score_offsets, begin = _item_arrays(segments, first, stop)
        lens.append(item_lens)
        prefix_lens.append(item_reads)
        indices.append(prefix)
        num_segments.append(stop - first)
        offsets.append(score_offsets)
        moved_by.append(num_tokens - begin)
        labels.append((segments, first, stop))
        pieces.append((token_ids, segments.vectors))
        num_tokens += len(token_ids)
    all_lens, all_reads = _concatenate(lens), _concatenate(prefix_lens)
    starts = starts_from_lens(all_lens)
    num_rows = [len(each) for each in offsets]
    label_ids = _join_labels(labels, num_rows)
    score_tokens = _concatenate(offsets) + np.array(moved_by).repeat(num_rows) if items else _NO_TOKENS
    if any(run.scored is not None for run in blocks):
        block_tokens, block_labels = _block_rows(blocks)
        label_ids = np.concatenate([block_labels, label_ids]) if len(label_ids) else block_labels
        score_tokens = np.concatenate([block_tokens, score_tokens])
    batch_ids, overrides = _embedded(pieces)
    return ForwardBatch(
        layout=Layout.EXTEND,
        token_ids=batch_ids,
        positions=_positions(all_reads, starts, all_lens),
        segment_starts=starts,
        prefix_index=np.where(all_reads > 0, np.array(indices).repeat(num_segments), -1),
        prefix_lens=all_reads,
        prefixes=tuple([Prefix((), first) for first in firsts]),
        sequence_starts=np.array([0, num_tokens]),
        score_tokens=score_tokens,
        label_ids=label_ids,
        need_logsumexp=need_logsumexp,
        need_hidden=need_hidden,
        top_k=top_k,
        cache_segments=tuple(range(num_blocks)),
        embed_overrides=overrides,
        lora_slots=lora_slots,
    )


def _block_arrays(
    runs: Sequence[BlockRun],
) -> tuple[list[int], list[Int64Array], list[Int64Array], list[tuple[Int32Array, Vectors | None]]]:
    """The first segment of each run; of all blocks their lengths and the tokens before them, which they attend to, as
    one array each; the tokens and vectors of each run."""
    firsts: list[int] = []
    reads: list[int] = []
    ends: list[int] = []
    pieces: list[tuple[Int32Array, Vectors | None]] = []
    for run in runs:  # lists for all runs, then arrays: many small requests are many runs
        starts = run.starts
        firsts.append(len(reads))
        reads += starts[:-1]
        ends += starts[1:]
        pieces.append((run.prefix_ids[starts[0] : starts[-1]], run.vectors))
    if not runs:
        return firsts, [], [], pieces
    block_reads = np.array(reads, np.int64)
    return firsts, [np.array(ends) - block_reads], [block_reads], pieces


def _block_rows(runs: Sequence[BlockRun]) -> tuple[Int64Array, Int32Array]:
    """The rows of all blocks that are scored: tokens of the batch, which begins with the blocks, and labels."""
    begins = accumulate([run.num_tokens for run in runs[:-1]], initial=0)
    rows = [(run.rows(), begin) for run, begin in zip(runs, begins, strict=True) if run.scored is not None]
    return (
        _concatenate([tokens + begin for (tokens, _), begin in rows]),
        _concatenate([labels for (_, labels), _ in rows]),
    )


def _item_arrays(
    segments: Segments, first: int, stop: int
) -> tuple[Int32Array, Int64Array, Int64Array, Int64Array, int]:
    """Of a run of items: token ids, lengths, prefix lengths, the offsets of scored tokens in the item tokens of the
    request, and where the run begins in them. Views of the request's arrays; the arrays themselves where the run is the
    whole request, as it often is."""
    tokens = segments.tokens
    if stop - first == len(segments.prefix_lens):
        return tokens.flat, tokens.lens, segments.prefix_lens, segments.score_offsets, 0
    begin, end = tokens.starts[[first, stop]].tolist()
    return (
        tokens.flat[begin:end],
        tokens.lens[first:stop],
        segments.prefix_lens[first:stop],
        _score_offsets(segments, first, stop),
        begin,
    )


def sequences_batch(
    runs: Sequence[SequenceRun],
    *,
    need_logsumexp: bool,
    need_hidden: bool = False,
    top_k: int = 0,
    lora_slots: Int32Array | None = None,
) -> ForwardBatch:
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
    segment_starts = starts_from_lens(lens)
    sequence_of = np.repeat(numbers(len(parts)), np.diff(segments_before))
    token_ids, overrides = _embedded([(part.token_ids, part.vectors) for part in parts])
    return ForwardBatch(
        layout=Layout.CAUSAL if plan.algorithm == "serial" else Layout.PACKED,
        token_ids=token_ids,
        positions=_positions(prefix_lens, segment_starts, lens),
        segment_starts=segment_starts,
        prefix_index=np.where(prefix_lens > 0, sequence_of, -1),
        prefix_lens=prefix_lens,
        prefixes=tuple(Prefix(segment=int(segment)) for segment in segments_before[:-1]),
        sequence_starts=sequence_starts,
        score_tokens=_concatenate(
            [part.score_offsets + start for part, start in zip(parts, sequence_starts[:-1], strict=True)]
        ),
        label_ids=_join_labels(
            [(run.plan.segments, sequence.first, sequence.stop) for run in runs for sequence in run.sequences],
            [len(part.score_offsets) for part in parts],
        ),
        need_logsumexp=need_logsumexp,
        need_hidden=need_hidden,
        top_k=top_k,
        mask=plan.mask or "segment",
        embed_overrides=overrides,
        lora_slots=lora_slots,
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


def _positions(prefix_lens: Int64Array, starts: Int64Array, lens: Int64Array) -> Int32Array:
    """A segment's positions continue from the part of the prefix that it attends to."""
    moved_by = (prefix_lens - starts[:-1]).astype(np.int32)
    return numbers(int(starts[-1])).astype(np.int32) + moved_by.repeat(lens)


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


def _join_labels(runs: Sequence[tuple[Segments, int, int]], num_rows: Sequence[int]) -> Int32Array:
    """[R, L] of segments first..stop of each request, which have so many rows. One width for all: a request with fewer
    labels repeats its last one."""
    if not runs:
        return _NO_LABELS
    tables = [segments.label_ids for segments, _, _ in runs]
    if len({table.shape for table in tables}) == len(tables[0]) == 1:  # as in most forwards
        return _concatenate(tables).repeat(num_rows, axis=0)
    width = max(table.shape[1] for table in tables)
    return np.concatenate([_widened(_label_ids(*run), width) for run in runs])


def _widened(labels: Int32Array, width: int) -> Int32Array:
    missing = width - labels.shape[1]
    return np.pad(labels, ((0, 0), (0, missing)), mode="edge") if missing else labels
