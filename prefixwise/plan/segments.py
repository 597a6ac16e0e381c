"""From a prompt to segments: the tokens that the model computes for each item, and where label logits are read.

First, each item's tokens are split into shared prefix and item tokens. The split is the longest common prefix of *that
item's* tokens and the prefix's tokens. It never depends on other items: otherwise a new item could move another item's
split, and with it the bits of its scores.

    prefix        q q q q
    separate      q q q q | a b        split 4
    joint         q q q X | a b        split 3: the tokenizer merged across the border
    empty         q q q | q            split 3: the last prefix token is computed again, to read logits after it
    item_first    | a b q q q q        split 0

Then the labels are planned. A label of one token is read after the item. A label `x y z` is read in three places: `x`
after the item, `y` after `item x`, `z` after `item x y`. So the item is computed with the *stem* `x y` behind it, and
three rows of logits are taken from it. Labels share a stem if one stem is the beginning of another; labels of one token
need none.

    labels  (a)  (x y z)  (x q)       stems  (x y)
            stem x y:  row 0 after item      reads a, x, x
                       row 1 after item x    reads y, q
                       row 2 after item x y  reads z
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.checks import check_token_count
from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, numbers, ranges, starts_from_lens
from prefixwise.prompts.template import Prompt

Ids = tuple[int, ...]


# Shared prefix


@dataclass(frozen=True)
class SplitItems:
    """The request's prefix, and for every item how much of the prefix it reads and the tokens after that."""

    prefix_ids: Int32Array  # [S]
    prefix_lens: Int64Array  # [I]: tokens of the prefix that the item reads
    item_tokens: Ragged  # [I], each at least one token


def split_items(prompt: Prompt) -> SplitItems:
    """Find every item's split."""
    return _split_joined(prompt) if prompt.joined else _split_items(prompt)


def _split_joined(prompt: Prompt) -> SplitItems:
    """Whole sequences, which may begin with the prefix's tokens."""
    whole = prompt.sequences
    shared = np.fromiter((common_prefix_len(prompt.prefix_ids, each) for each in whole), np.int64, len(whole))
    shared = np.minimum(shared, whole.lens - 1)
    item_lens = whole.lens - shared
    flat = whole.flat[ranges(whole.starts[:-1] + shared, item_lens)]
    return SplitItems(prompt.prefix_ids, shared, Ragged(flat, starts_from_lens(item_lens)))


def _split_items(prompt: Prompt) -> SplitItems:
    """Items that follow the prefix or its first tokens. An empty item takes the last of these tokens."""
    items, prefix_ids = prompt.sequences, prompt.prefix_ids
    shared = prompt.shared_lens
    if shared is None:
        shared = np.full(len(items), len(prefix_ids))
    is_empty = items.lens == 0
    if not is_empty.any():
        return SplitItems(prefix_ids, shared, items)
    shared = shared - is_empty
    flat = np.insert(items.flat, items.starts[:-1][is_empty], prefix_ids[shared[is_empty]])
    return SplitItems(prefix_ids, shared, Ragged(flat, starts_from_lens(np.maximum(items.lens, 1))))


def common_prefix_len(prefix: Int32Array, tokens: Int32Array) -> int:
    """How many of the first tokens are the prefix's."""
    compared = min(len(prefix), len(tokens))
    differs = np.flatnonzero(prefix[:compared] != tokens[:compared])
    return int(differs[0]) if len(differs) else compared


# Labels


@dataclass(frozen=True)
class LabelRows:
    """How one item's labels are read; the same for every item of the request."""

    stems: tuple[Ids, ...]  # label tokens after the item; one segment each
    targets: Int32Array  # [rows per item, L]: token ids whose logits are read; unused entries are 0
    readings: tuple[Int64Array, ...]  # per label: its rows of logits, one per token

    @property
    def rows_per_item(self) -> int:
        return len(self.targets)

    @property
    def num_labels(self) -> int:
        return len(self.readings)

    @property
    def longest_stem(self) -> int:
        return max(len(stem) for stem in self.stems)

    def logprobs(self, logits: NDArray[np.float32], logsumexp: NDArray[np.float32]) -> NDArray[np.float64]:
        """[I * rows, L] logits and [I * rows] logsumexp to each label's summed log-probability, [I, L]."""
        wide = logits.reshape(-1, self.rows_per_item, logits.shape[1]).astype(np.float64)
        norms = logsumexp.reshape(-1, self.rows_per_item).astype(np.float64)
        parts = [wide[:, rows, column] - norms[:, rows] for column, rows in enumerate(self.readings)]
        # In C order an item's tokens are added up in the same order, whichever items are beside it.
        return np.stack([np.ascontiguousarray(part).sum(1) for part in parts], 1)


@lru_cache(maxsize=1024)  # requests have few different sets of labels
def plan_labels(labels: tuple[Ids, ...]) -> LabelRows:
    """Find the stems and the rows."""
    stems = _distinct_stems(labels)
    first_rows = starts_from_lens(np.array([len(stem) + 1 for stem in stems], np.int64))
    targets = np.zeros((int(first_rows[-1]), len(labels)), np.int32)
    readings = []
    for column, label in enumerate(labels):
        number = next(i for i, stem in enumerate(stems) if stem[: len(label) - 1] == label[:-1])
        rows = first_rows[number] + np.arange(len(label))
        targets[rows, column] = label
        readings.append(rows)
    return LabelRows(stems, targets, tuple(readings))


def with_vocabulary(labels: LabelRows, vocab_size: int) -> LabelRows:
    """The same rows; after the labels they read every token of the vocabulary."""
    whole = np.tile(np.arange(vocab_size, dtype=np.int32), (labels.rows_per_item, 1))
    return replace(labels, targets=np.concatenate([labels.targets, whole], 1))


def _distinct_stems(labels: Sequence[Ids]) -> tuple[Ids, ...]:
    """Every label without its last token, except those that another stem begins with."""
    stems = sorted({label[:-1] for label in labels}, key=lambda stem: (-len(stem), stem))
    kept: list[Ids] = []
    for stem in stems:
        if not any(longer[: len(stem)] == stem for longer in kept):
            kept.append(stem)
    return tuple(sorted(kept))


@dataclass(frozen=True)
class Segments:
    """The segments of a request, item by item and within an item stem by stem, and where they are read."""

    prefix_ids: Int32Array  # [S]
    prefix_lens: Int64Array  # [segments]
    tokens: Ragged  # [segments]: the item's tokens and a stem
    score_offsets: Int64Array  # [R]: positions in the flat tokens after which logits are read, in order
    rows_of_segment: Int64Array  # [segments + 1]: which of the R rows of logits belong to a segment
    label_ids: Int32Array  # [rows per item, L], repeated for every item
    segments_per_item: int = 1  # as many as the labels have stems
    vectors: Vectors | None = None  # [E, D]: id `~row` in prefix or tokens has this row in place of its embedding
    block_starts: tuple[int, ...] | None = (
        None  # of the prefix; at last, where it ends. None: blocks are whole, as usual
    )
    # [KV blocks of the prefix]: the segment that is the block itself, -1 for none. A forward that computes the block
    # reads the rows of the segment, too. None: there are no such segments.
    segment_of_block: Int64Array | None = None

    @property
    def item_lens(self) -> Int64Array:
        """[segments]: the item's tokens without the stem, after each of which one more row is read."""
        return self.tokens.lens - np.diff(self.rows_of_segment) + 1

    def take(self, chosen: Int64Array) -> Segments:
        """These segments, in this order: whole items."""
        tokens, num_rows = self.tokens.take(chosen), np.diff(self.rows_of_segment)[chosen]
        return replace(
            self,
            prefix_lens=self.prefix_lens[chosen],
            tokens=tokens,
            score_offsets=ranges(tokens.starts[1:] - num_rows, num_rows),
            rows_of_segment=starts_from_lens(num_rows),
        )

    def rows_of(self, chosen: Int64Array) -> Int64Array:
        """The rows of logits of these segments."""
        return ranges(self.rows_of_segment[chosen], np.diff(self.rows_of_segment)[chosen])


def without_shared_prefix(segments: Segments) -> Segments:
    """Every segment with its own copy of the prefix, for models whose tokens see those after them. Raises
    too_many_tokens: all copies are in memory at once."""
    shared, items = segments.prefix_lens, segments.tokens
    check_token_count(len(items.flat) + int(shared.sum()))
    lens = items.lens + shared
    starts = starts_from_lens(lens)
    flat = np.empty(int(starts[-1]), np.int32)
    flat[ranges(starts[:-1], shared)] = segments.prefix_ids[ranges(np.zeros_like(shared), shared)]
    flat[ranges(starts[:-1] + shared, items.lens)] = items.flat
    num_rows = np.diff(segments.rows_of_segment)
    return replace(
        segments,
        prefix_ids=segments.prefix_ids[:0],
        prefix_lens=np.zeros_like(shared),
        tokens=Ragged(flat, starts),
        score_offsets=ranges(starts[1:] - num_rows, num_rows),
    )


def lay_out_segments(split: SplitItems, labels: LabelRows) -> Segments:
    """Put every stem behind every item."""
    num_items, num_stems = len(split.item_tokens), len(labels.stems)
    if labels.stems == ((),):  # labels of one token: one segment per item, read after its last token
        tokens, rows = split.item_tokens, numbers(num_items + 1)
        return Segments(split.prefix_ids, split.prefix_lens, tokens, tokens.starts[1:] - 1, rows, labels.targets)
    stem_lens = np.array([len(stem) for stem in labels.stems], np.int64)
    tokens = _append_stems(split.item_tokens, labels.stems)
    rows_per_segment = np.tile(stem_lens + 1, num_items)
    score_offsets = ranges(tokens.starts[1:] - rows_per_segment, rows_per_segment)
    return Segments(
        prefix_ids=split.prefix_ids,
        prefix_lens=np.repeat(split.prefix_lens, num_stems),
        tokens=tokens,
        score_offsets=score_offsets,
        rows_of_segment=starts_from_lens(rows_per_segment),
        label_ids=labels.targets,
        segments_per_item=num_stems,
    )


def _append_stems(item_tokens: Ragged, stems: Sequence[Ids]) -> Ragged:
    segments = [np.concatenate([item, np.asarray(stem, np.int32)]) for item in item_tokens for stem in stems]
    lens = np.array([len(segment) for segment in segments], np.int64)
    return Ragged(np.concatenate(segments), starts_from_lens(lens))
