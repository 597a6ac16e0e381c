"""Where label logits are read, for labels of one token and of many.

A label of one token is read after the item. A label `x y z` is read in three places: `x` after the item, `y`
after `item x`, `z` after `item x y`. So the item is computed with the *stem* `x y` behind it, and three rows
of logits are taken from it. Labels share a stem where one's is the beginning of another's; labels of one
token need none.

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

from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, numbers, ranges, starts_from_lens
from prefixwise.plan.shared_prefix import SplitItems

Ids = tuple[int, ...]


@dataclass(frozen=True)
class LabelRows:
    """How one item's labels are read; the same for every item of the request."""

    stems: tuple[Ids, ...]  # what is put behind the item; one segment each
    targets: Int32Array  # [rows per item, L]: token ids whose logits are read; unused places hold 0
    readings: tuple[Int64Array, ...]  # per label: its rows, one per token; its column is its number

    @property
    def rows_per_item(self) -> int:
        return len(self.targets)

    @property
    def num_labels(self) -> int:
        return len(self.readings)

    @property
    def longest_stem(self) -> int:
        return max(len(stem) for stem in self.stems)

    def logprobs(self, logits: NDArray[np.float32], normalizers: NDArray[np.float32]) -> NDArray[np.float64]:
        """[I * rows, L] logits and [I * rows] normalizers to each label's summed log-probability, [I, L]."""
        wide = logits.reshape(-1, self.rows_per_item, logits.shape[1]).astype(np.float64)
        norms = normalizers.reshape(-1, self.rows_per_item).astype(np.float64)
        parts = [wide[:, rows, column] - norms[:, rows] for column, rows in enumerate(self.readings)]
        # In C order an item's tokens are added up by themselves, in the same order whoever is beside it.
        return np.stack([np.ascontiguousarray(part).sum(1) for part in parts], 1)


@lru_cache(maxsize=1024)  # a service is asked for few different sets of labels
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
    """The same rows, which behind their labels read every token of the vocabulary."""
    whole = np.tile(np.arange(vocab_size, dtype=np.int32), (labels.rows_per_item, 1))
    return replace(labels, targets=np.concatenate([labels.targets, whole], 1))


def _distinct_stems(labels: Sequence[Ids]) -> tuple[Ids, ...]:
    """Every label without its last token, less those that another one begins with."""
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
    tails: Ragged  # [segments rows]: the item's tail and a stem
    score_offsets: Int64Array  # [R]: tokens of the flat tails after which logits are read, in order
    rows_of_segment: Int64Array  # [segments + 1]: which of the R rows belong to a segment
    label_ids: Int32Array  # [rows per item, L], repeated for every item
    segments_per_item: int = 1  # as many as the labels have stems


def lay_out_segments(split: SplitItems, labels: LabelRows) -> Segments:
    """Put every stem behind every item."""
    num_items, num_stems = len(split.tails), len(labels.stems)
    if labels.stems == ((),):  # labels of one token: one segment per item, read after its last token
        tails, rows = split.tails, numbers(num_items + 1)
        return Segments(split.prefix_ids, split.prefix_lens, tails, tails.starts[1:] - 1, rows, labels.targets)
    stem_lens = np.array([len(stem) for stem in labels.stems], np.int64)
    tails = _append_stems(split.tails, labels.stems)
    rows_per_segment = np.tile(stem_lens + 1, num_items)
    score_offsets = ranges(tails.starts[1:] - rows_per_segment, rows_per_segment)
    return Segments(
        prefix_ids=split.prefix_ids,
        prefix_lens=np.repeat(split.prefix_lens, num_stems),
        tails=tails,
        score_offsets=score_offsets,
        rows_of_segment=starts_from_lens(rows_per_segment),
        label_ids=labels.targets,
        segments_per_item=num_stems,
    )


def _append_stems(tails: Ragged, stems: Sequence[Ids]) -> Ragged:
    rows = [np.concatenate([tail, np.asarray(stem, np.int32)]) for tail in tails for stem in stems]
    lens = np.array([len(row) for row in rows], np.int64)
    return Ragged(np.concatenate(rows), starts_from_lens(lens))
