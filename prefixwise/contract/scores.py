"""From label logits to scores and relevance: the last arithmetic on the data path, on the host and in float64.

    labels of one token     logits [I, L] (and logsumexp [I])   -> scores_from_logits
    labels of many tokens   log-probabilities [I, L]            -> scores_from_logprobs

An item's scores must not depend, bit for bit, on the items beside it. NumPy's order of additions depends on the memory
layout, so both functions first copy their input to C order, where each row is summed by itself.

The relevance of a document, from the scores of its labels (the first label is the positive one):

    softmax      raw: logit of the first label minus the logsumexp of the others   relevance: sigmoid(raw)
    logit_diff   raw: logit of the first label minus that of the second            relevance: sigmoid(raw)
    logit        raw: logit of the label                                           relevance: sigmoid(raw)
    prob         raw: log-probability of the label                                 relevance: exp(raw)

A profile with a temperature divides the raw score by it.

With `softmax`, the sigmoid is the first label's share of the softmax. The head of a classifier has one row, which is
the row of one label or the difference of two, so that its logit is `raw`; or two rows, which are two labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prefixwise.contract.ragged import Int64Array
from prefixwise.contract.request import LabelScoring, ScoreMode

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
RelevanceKind = Literal["softmax", "logit", "logit_diff", "prob"]
ClassActivation = Literal["softmax", "sigmoid", "identity"]


def needs_logsumexp(mode: ScoreMode, label_scoring: LabelScoring) -> bool:
    """Whether the mode needs the logsumexp over the whole vocabulary, and so every row of the head."""
    return label_scoring == "sequence" or mode in ("prob", "logprob")


def scores_from_logits(mode: ScoreMode, label_logits: Float32Array, logsumexp: Float32Array | None) -> Float64Array:
    """Scores [I, C] of one-token labels; C is 1 for logit_diff and sigmoid, else L.

    `label_logits` is [I, L]. `logsumexp` is [I]; ValueError if it is None and the mode needs it.
    """
    logits = _by_row(label_logits)
    if mode in ("prob", "logprob"):
        if logsumexp is None:
            raise ValueError(f"score mode {mode} needs logsumexp, got None")
        return _absolute(mode, logits - _by_row(logsumexp)[:, None])
    if mode == "logit":
        return logits
    if mode == "sigmoid" and logits.shape[1] == 1:
        return sigmoid(logits)
    return _relative(mode, logits)


def scores_from_logprobs(mode: ScoreMode, label_logprobs: Float64Array) -> Float64Array:
    """Scores [I, C] of labels of many tokens, from the sums [I, L] of their tokens' log-probabilities.

    ValueError for the modes that need a raw logit: logit, and sigmoid of one label.
    """
    logprobs = _by_row(label_logprobs)
    if mode == "logit" or (mode == "sigmoid" and logprobs.shape[1] == 1):
        raise ValueError(f"score mode {mode} needs a raw logit, and a label of many tokens has none")
    if mode in ("prob", "logprob"):
        return _absolute(mode, logprobs)
    return _relative(mode, logprobs)


def _by_row(values: ArrayLike) -> Float64Array:
    return np.array(values, np.float64, order="C")


def _absolute(mode: ScoreMode, logprobs: Float64Array) -> Float64Array:
    # A float32 logsumexp may round to just below the logit of a near-certain label; no probability exceeds 1.
    logprobs = np.minimum(logprobs, 0.0)
    return np.exp(logprobs) if mode == "prob" else logprobs


def _relative(mode: ScoreMode, values: Float64Array) -> Float64Array:
    """The modes that compare labels with each other; logits and log-probabilities give the same."""
    if mode == "softmax":
        return _softmax(values)
    if values.shape[1] != 2:
        raise ValueError(f"score mode {mode} compares two labels, got {values.shape[1]}")
    difference = values[:, :1] - values[:, 1:]
    return difference if mode == "logit_diff" else sigmoid(difference)


def _softmax(values: Float64Array) -> Float64Array:
    powers: Float64Array = np.exp(values - values.max(axis=1, keepdims=True))
    totals: Float64Array = powers.sum(axis=1, keepdims=True)
    return powers / totals


def sigmoid(values: Float64Array) -> Float64Array:
    """1 / (1 + exp(-x)); exp only gets negative numbers, so that it cannot overflow."""
    small = np.exp(-np.abs(values))
    return np.where(values >= 0, 1.0, small) / (1.0 + small)


def class_scores(activation: ClassActivation, logits: Float64Array) -> Float64Array:
    """[I, C]: the logits of a classifier's classes under its activation, each item by itself."""
    if activation == "softmax":
        return _softmax(_by_row(logits))
    return sigmoid(logits) if activation == "sigmoid" else logits


def needed_score_mode(kind: RelevanceKind) -> ScoreMode:
    """The score mode of the labels."""
    return "logprob" if kind == "prob" else "logit"


def raw_scores(values: Float64Array, temperature: float = 1.0) -> Float64Array:
    """[I, L] to [I]: the first label against the others, or by itself if it is the only one."""
    first, others = values[:, 0], values[:, 1:]
    raw = first - np.logaddexp.reduce(others, axis=1) if others.shape[1] else first
    return raw / temperature


def relevance_scores(kind: RelevanceKind, raw: Float64Array) -> Float64Array:
    """[I], from 0 to 1."""
    return np.exp(raw) if kind == "prob" else sigmoid(raw)


class ScoreRows(Sequence[list[float] | None]):
    """The scores of all items, as an array: 8 bytes a score, where lists take 32. A row becomes a list when it is read.

    `good`: the items that have scores, ascending; the others have None.
    """

    def __init__(self, values: Float64Array, good: Int64Array, num_items: int) -> None:
        self._values = values  # [len(good), L]
        self._rows: Int64Array | None = None  # [num_items]: the row of each item, -1 for none; None: all have scores
        if len(good) < num_items:
            self._rows = np.full(num_items, -1, np.int64)
            self._rows[good] = np.arange(len(good))
        self._num_items = num_items

    def __len__(self) -> int:
        return self._num_items

    @overload
    def __getitem__(self, index: int) -> list[float] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[float] | None]: ...
    def __getitem__(self, index: int | slice) -> list[float] | list[list[float] | None] | None:
        if isinstance(index, slice):
            if self._rows is not None:
                return [self[each] for each in range(self._num_items)[index]]
            rows: list[list[float] | None] = self._values[index].tolist()
            return rows
        row = index if self._rows is None else int(self._rows[index])
        if self._rows is not None and row < 0:
            return None
        found: list[float] = self._values[row].tolist()
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Float64Array:
        """[items with scores, L]."""
        return np.array(self._values, dtype, copy=copy)

    @property
    def num_labels(self) -> int:
        return int(self._values.shape[1])
