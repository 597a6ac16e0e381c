"""The results of score and rerank requests, the same for Python and HTTP: the end of the data path."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from prefixwise.contract.errors import RequestError, count
from prefixwise.contract.request import ScoreMode
from prefixwise.contract.result_table import ResultTable, Shown, distinct
from prefixwise.contract.scores import ScoreRows

# A request of texts has items of type str, one of token ids list[int]. Its rows are list[float]; those of a request
# with on_item_error "report" may also be None. `ScoreResult` without parameters is any of them.
Item = TypeVar("Item", covariant=True, default=str | list[int])
Row = TypeVar("Row", covariant=True, default=list[float] | None)

_ONE_COLUMN_MODES = ("logit_diff", "sigmoid")


@dataclass(frozen=True)
class Usage:
    """The tokens of a request: the prefix once, plus all items.

    Attributes:
        prompt_tokens: All of them.
        cached_tokens: Of these, prefix tokens that were in the KV cache.

    Examples:
        >>> Usage(prompt_tokens=9, cached_tokens=4).total_tokens
        9
    """

    prompt_tokens: int
    cached_tokens: int = 0

    @classmethod
    def total(cls, usages: Iterable[Usage]) -> Usage:
        """The sum of several usages."""
        usages = list(usages)
        return cls(sum(each.prompt_tokens for each in usages), sum(each.cached_tokens for each in usages))

    @property
    def completion_tokens(self) -> int:
        """0: scoring generates nothing."""
        return 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> dict[str, object]:
        """The field `usage` of a response."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.total_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class ItemError:
    """Why an item has no score, if on_item_error is "report".

    Attributes:
        index: Of the item, in the request.
        code: What is wrong, as in `RequestError.code`.
        message: The same in words.

    Examples:
        >>> ItemError(3, "token_id_exceeds_vocab", "items[3][0] must be below 100").index
        3
    """

    index: int
    code: str
    message: str

    @classmethod
    def from_error(cls, index: int, error: RequestError) -> ItemError:
        """The entry of an item whose request alone would raise this error."""
        return cls(index, error.code, error.message)


@dataclass(frozen=True)
class Truncation:
    """An item, document or input that was cut.

    Attributes:
        index: In the request.
        original_tokens: Its length.
        kept_tokens: The length that was scored.

    Examples:
        >>> cut = Truncation(index=0, original_tokens=900, kept_tokens=512)
        >>> cut.original_tokens - cut.kept_tokens
        388
    """

    index: int
    original_tokens: int
    kept_tokens: int


def truncation_warnings(truncated: Sequence[Truncation]) -> list[str]:
    """One warning if documents were cut, else none."""
    num_cut = len(truncated)
    return [f"{num_cut} document(s) were longer than is read, and were cut: `truncated` says which"] if num_cut else []


@dataclass(frozen=True)
class ScoredItem(Generic[Item, Row]):
    """One item of a `ScoreResult`, and its scores.

    Attributes:
        index: In the request.
        item: The text or the token ids.
        scores: In label order; None if the item is in `item_errors`.

    Examples:
        >>> ScoredItem(0, "great", [0.9, 0.1]).score
        0.9
    """

    index: int
    item: Item
    scores: Row

    @property
    def score(self) -> float:
        """The first score, which ranks the items; NaN for an item without scores."""
        return self.scores[0] if isinstance(self.scores, list) else math.nan


RankedItem = ScoredItem[Item, list[float]]  # in `ScoreResult.ranked()`: every item there has scores


@dataclass(frozen=True, eq=False, repr=False)  # eq: hidden states are arrays, which have no single truth value
class ScoreResult(ResultTable[ScoredItem[Item, Row]], Generic[Item, Row]):
    """The scores of one request: a sequence of `ScoredItem`, in the order of the request.

    Attributes:
        scores: Rows in item order, columns in label order; None where the item is in `item_errors`.
        items: As in the request.
        labels: Their names, for display.
        score_mode: What the scores are, like `softmax`.
        model: The name of the model.
        usage: The tokens of the request.
        truncated: The items that were cut.
        item_errors: The items without scores, if on_item_error is "report".
        pooled_hidden_states: If return_pooled_hidden_states is set: [D] of each item, None where the item is in
            `item_errors`.
        are_classes: Whether the labels are the classes of a classifier.
        warnings: What about the request is legal and hardly meant.
        debug: If return_debug is set: how the request was computed.
        rows: In place of `scores`, which is empty then: what a server makes JSON of.

    Examples:
        >>> scores, items, labels = [[0.2, 0.8], [0.9, 0.1]], ["cold food", "great"], (" good", " bad")
        >>> result = ScoreResult(scores, items, labels, "softmax", "a-model", Usage(9))
        >>> len(result), result[0].item, result[0].score
        (2, 'cold food', 0.2)
        >>> [each.item for each in result.ranked()]
        ['great', 'cold food']
        >>> result.to_dicts()[1]
        {'index': 1, 'item': 'great', ' good': 0.9, ' bad': 0.1}
        >>> result
        ScoreResult: 2 items, softmax, model a-model
        index  item        good   bad
        0      cold food  0.2    0.8
        1      great      0.9    0.1
    """

    scores: list[Row]
    items: Sequence[Item]
    labels: tuple[str, ...]
    score_mode: ScoreMode
    model: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()
    item_errors: tuple[ItemError, ...] = ()
    pooled_hidden_states: list[NDArray[np.float32] | None] | None = None
    are_classes: bool = False
    warnings: tuple[str, ...] = ()
    debug: Mapping[str, object] | None = None
    rows: ScoreRows | None = None

    def ranked(self) -> list[RankedItem[Item]]:
        """The items that have scores, best first by their first score.

        Returns:
            The items; ties are in item order.
        """
        scored = [
            ScoredItem(index, self.items[index], row) for index, row in enumerate(self.scores) if isinstance(row, list)
        ]
        return sorted(scored, key=lambda each: -each.score)  # a stable sort, so ties stay in item order

    def __len__(self) -> int:
        return len(self.scores if self.rows is None else self.rows)

    def _entry(self, index: int) -> ScoredItem[Item, Row]:
        return ScoredItem(index, self.items[index], self.scores[index])

    def _columns(self) -> list[str]:
        names = (self.score_mode,) if self.score_mode in _ONE_COLUMN_MODES else self.labels
        return distinct(["index", "item", *(["error"] if self.item_errors else []), *names])

    def _cells(self, num_rows: int) -> Iterator[list[object]]:
        messages = {error.index: error.message for error in self.item_errors}
        none = [None] * (len(self._columns()) - 2 - bool(messages))
        for index, row in enumerate(self.scores[:num_rows]):
            error = [messages.get(index)] if messages else []
            yield [index, self.items[index], *error, *(row if isinstance(row, list) else none)]

    def _shown(self) -> Shown:
        return Shown(f"ScoreResult: {count(len(self), 'item')}, {self.score_mode}, model {self.model}", self.warnings)

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


@dataclass(frozen=True)
class Classification:
    """One input and its classes.

    Attributes:
        index: In the request.
        label: The class with the largest number, by its name in id2label.
        probs: In the order of the classes; logits if the request wants no activation.

    Examples:
        >>> Classification(0, "good", [0.9, 0.1]).label
        'good'
    """

    index: int
    label: str
    probs: list[float]


@dataclass(frozen=True, repr=False)
class ClassifyResult(ResultTable[Classification]):
    """The classes of every input: a sequence of `Classification`, in the order of the request.

    Attributes:
        results: The entries.
        labels: The names of the classes, in the order of `probs`.
        model: The name of the model.
        usage: The tokens of the request.
        truncated: The inputs that were cut.
        warnings: What about the request is legal and hardly meant.

    Examples:
        >>> result = ClassifyResult([Classification(0, "good", [0.9, 0.1])], ("good", "bad"), "a-model", Usage(4))
        >>> result[0].label, result.to_dicts()
        ('good', [{'index': 0, 'label': 'good', 'good': 0.9, 'bad': 0.1}])
    """

    results: list[Classification]
    labels: tuple[str, ...]
    model: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.results)

    def _entry(self, index: int) -> Classification:
        return self.results[index]

    def _columns(self) -> list[str]:
        return distinct(["index", "label", *self.labels])

    def _cells(self, num_rows: int) -> Iterator[list[object]]:
        return ([each.index, each.label, *each.probs] for each in self.results[:num_rows])

    def _shown(self) -> Shown:
        return Shown(f"ClassifyResult: {count(len(self), 'input')}, model {self.model}", self.warnings)


@dataclass(frozen=True, eq=False, repr=False)  # eq: arrays have no single truth value
class EmbedResult(ResultTable[NDArray[np.float32]]):
    """The hidden state after the last token of every input: a sequence of arrays [D], in the order of the request.

    Attributes:
        embeddings: [inputs, D], after the final norm, not normalised to a length.
        model: The name of the model.
        usage: The tokens of the request.
        truncated: The inputs that were cut.

    Examples:
        >>> result = EmbedResult(np.zeros((2, 576), np.float32), "a-model", Usage(7))
        >>> result.embeddings.shape, len(result), result[0].shape
        ((2, 576), 2, (576,))
        >>> result
        EmbedResult: 2 inputs, hidden size 576, model a-model
        index  embedding
        0      [0. 0. 0. ... 0. 0. 0.]
        1      [0. 0. 0. ... 0. 0. 0.]
    """

    embeddings: NDArray[np.float32]
    model: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()

    def __len__(self) -> int:
        return len(self.embeddings)

    def _entry(self, index: int) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self.embeddings[index]
        return vector

    def _columns(self) -> list[str]:
        return ["index", "embedding"]

    def _cells(self, num_rows: int) -> Iterator[list[object]]:
        return ([index, vector] for index, vector in enumerate(self.embeddings[:num_rows]))

    def _shown(self) -> Shown:
        title = f"EmbedResult: {count(len(self), 'input')}, hidden size {self.embeddings.shape[1]}"
        return Shown(f"{title}, model {self.model}")


@dataclass(frozen=True)
class RerankedDocument:
    """A document and its relevance.

    Attributes:
        index: In the request.
        document: Its text.
        relevance_score: From 0 to 1.
        raw_score: Before the mapping to 0 .. 1: for most profiles a difference of logits.

    Examples:
        >>> RerankedDocument(1, "Paris is the capital.", 0.98, 3.9).relevance_score
        0.98
    """

    index: int
    document: str
    relevance_score: float
    raw_score: float


@dataclass(frozen=True, repr=False)
class RerankResult(ResultTable[RerankedDocument]):
    """A sequence of `RerankedDocument`, best first, ties in the order of the request.

    Attributes:
        results: The entries.
        model: The name of the model.
        profile: The name of the profile that made the prompts.
        usage: The tokens of the request.
        truncated: The documents that were cut.
        warnings: What about the request is legal and hardly meant.
        debug: If return_debug is set: how the request was computed.

    Examples:
        >>> best = RerankedDocument(1, "Paris is the capital.", 0.98, 3.9)
        >>> result = RerankResult([best, RerankedDocument(0, "Berlin", 0.1, -2.2)], "m", "default", Usage(9))
        >>> result[0].document
        'Paris is the capital.'
        >>> [each["index"] for each in result.to_dicts()]
        [1, 0]
    """

    results: list[RerankedDocument]
    model: str
    profile: str
    usage: Usage
    truncated: tuple[Truncation, ...] = ()
    warnings: tuple[str, ...] = ()
    debug: Mapping[str, object] | None = None

    def __len__(self) -> int:
        return len(self.results)

    def _entry(self, index: int) -> RerankedDocument:
        return self.results[index]

    def _columns(self) -> list[str]:
        return ["index", "document", "relevance_score", "raw_score"]

    def _cells(self, num_rows: int) -> Iterator[list[object]]:
        for each in self.results[:num_rows]:
            yield [each.index, each.document, each.relevance_score, each.raw_score]

    def _shown(self) -> Shown:
        title = f"RerankResult: {count(len(self), 'document')}, profile {self.profile}, model {self.model}"
        return Shown(title, self.warnings)
