"""The results of score and rerank requests, the same for Python and HTTP: the end of the data path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import RequestError
from prefixwise.contract.ragged import Int64Array, Ragged
from prefixwise.contract.request import ScoreMode


@dataclass(frozen=True)
class Usage:
    """The tokens of a request: the prefix once, plus all items."""

    prompt_tokens: int
    cached_tokens: int = 0  # of these, prefix tokens that were in the KV cache

    @classmethod
    def total(cls, usages: Iterable[Usage]) -> Usage:
        usages = list(usages)
        return cls(sum(each.prompt_tokens for each in usages), sum(each.cached_tokens for each in usages))

    @property
    def completion_tokens(self) -> int:
        return 0  # scoring generates nothing

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.total_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class ItemError:
    """Why an item has no score, if on_item_error is "report"."""

    index: int
    code: str
    message: str

    @classmethod
    def from_error(cls, index: int, error: RequestError) -> ItemError:
        return cls(index, error.code, error.message)


@dataclass(frozen=True)
class Truncation:
    """An item or document that was cut."""

    index: int
    original_tokens: int
    kept_tokens: int


@dataclass(frozen=True)
class RankedItem:
    """One item in `ScoreResult.ranked()`."""

    index: int  # in the request
    item: str | list[int]
    score: float  # the first column, which ranks the items
    scores: list[float]


class ScoreRows(Sequence[list[float] | None]):
    """The scores of all items, as an array: 8 bytes a score, where lists take 32. A row becomes a list when it is read.

    `good`: the items that have scores, ascending; the others have None.
    """

    def __init__(self, values: NDArray[np.float64], good: Int64Array, num_items: int) -> None:
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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.float64]:
        """[items with scores, L]."""
        return np.array(self._values, dtype, copy=copy)

    @property
    def num_labels(self) -> int:
        return int(self._values.shape[1])


@dataclass(frozen=True, eq=False)  # eq: items may be arrays, which have no single truth value
class ScoreResult:
    """The scores of one request. Rows are in item order, columns in label order."""

    scores: list[list[float] | None]  # None where the item is in item_errors
    items: Sequence[str] | Sequence[list[int]] | Ragged  # as in the request
    labels: tuple[str, ...]  # names for display
    score_mode: ScoreMode
    model: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()
    item_errors: tuple[ItemError, ...] = ()
    # If return_pooled_hidden_states is set: [D] of each item, None where the item is in item_errors.
    pooled_hidden_states: list[NDArray[np.float32] | None] | None = None
    are_classes: bool = False  # the labels are the classes of a classifier
    warnings: tuple[str, ...] = ()
    debug: Mapping[str, object] | None = None
    rows: ScoreRows | None = None  # in place of `scores`, which is empty then: what a server makes JSON of

    def ranked(self) -> list[RankedItem]:
        """The items with scores, best first by their first score, ties in item order."""
        scored = [(index, row) for index, row in enumerate(self.scores) if row is not None]
        scored.sort(key=lambda pair: -pair[1][0])  # a stable sort, so ties stay in item order
        return [RankedItem(index, self._item(index), row[0], row) for index, row in scored]

    def to_json(self) -> dict[str, object]:
        """The body of a `/v1/score` response; the last keys only if they are not empty."""
        lazy = (Iterator, ScoreRows)
        return {name: list(value) if isinstance(value, lazy) else value for name, value in self.fields().items()}

    def fields(self) -> dict[str, object]:
        """As `to_json`, but long lists are iterators, which make their entries when they are read."""
        body: dict[str, object] = {
            "object": "scoring",
            "model": self.model,
            "scores": self.scores if self.rows is None else self.rows,
            "usage": self.usage.to_json(),
        }
        if self.are_classes:
            body["labels"] = list(self.labels)
        if self.pooled_hidden_states is not None:
            states = self.pooled_hidden_states
            body["pooled_hidden_states"] = (None if state is None else state.tolist() for state in states)
        if self.truncated:
            body["truncated"] = (asdict(truncation) for truncation in self.truncated)
        if self.item_errors:
            body["item_errors"] = (asdict(error) for error in self.item_errors)
        if self.warnings:
            body["warnings"] = list(self.warnings)
        if self.debug:
            body["debug"] = dict(self.debug)
        return body

    def _item(self, index: int) -> str | list[int]:
        if isinstance(self.items, Ragged):
            ids: list[int] = self.items[index].tolist()
            return ids
        return self.items[index]


@dataclass(frozen=True)
class Classification:
    """One input and its classes."""

    index: int  # in the request
    label: str  # the class with the largest number, by its name in id2label
    probs: list[float]  # in the order of the classes; logits if the request wants no activation


@dataclass(frozen=True)
class ClassifyResult:
    """The classes of every input, in the order of the request."""

    results: list[Classification]
    labels: tuple[str, ...]  # the names of the classes, in the order of `probs`
    model: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()


@dataclass(frozen=True, eq=False)  # eq: arrays have no single truth value
class EmbedResult:
    """The hidden state after the last token of every input."""

    embeddings: NDArray[np.float32]  # [inputs, D], after the final norm, not normalised to a length
    model: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()


@dataclass(frozen=True)
class RerankedDocument:
    """A document and its relevance."""

    index: int  # in the request
    document: str
    relevance_score: float  # from 0 to 1
    raw_score: float  # before the mapping to 0 .. 1: for most profiles a difference of logits


@dataclass(frozen=True)
class RerankResult:
    """The documents, best first, ties in the order of the request."""

    results: list[RerankedDocument]
    model: str
    profile: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()
    warnings: tuple[str, ...] = ()
    debug: Mapping[str, object] | None = None
