"""A legal request, and the checks that need to know what is served: the first object on the data path.

`parse.py` makes a `ScoreRequest` from what a caller sent. The server and `Scorer` then hold it against their
own limits with the three `check_*` functions here, and hand it on to `prompts`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from prefixwise.contract.describe import quote
from prefixwise.contract.errors import InvalidValueError, ModelNotFoundError, RequestError
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, starts_from_lens
from prefixwise.contract.token_ids import Place, vocabulary_error

ScoreMode = Literal["softmax", "prob", "logprob", "logit", "logit_diff", "sigmoid"]
LabelScoring = Literal["single", "sequence"]  # a label is one token, or as many as it needs
Tokenization = Literal["apart", "joint"]
Algorithm = Literal["auto", "serial", "packed", "prefill_extend"]
OnItemError = Literal["fail", "report"]


@dataclass(frozen=True, eq=False)  # eq: arrays have no single truth value, so two requests cannot be compared
class ScoreRequest:
    """One query, its items and labels, and how to score them. Text throughout, or token ids throughout."""

    query: str | Int32Array
    items: tuple[str, ...] | Ragged
    labels: tuple[str, ...] | None = None  # exactly one of labels and label_token_ids is set
    label_token_ids: tuple[tuple[int, ...], ...] | None = None  # one id per label unless label_scoring is "sequence"
    score_mode: ScoreMode = "prob"
    label_scoring: LabelScoring = "single"
    item_first: bool = False
    tokenization: Tokenization = "apart"
    max_tokens_per_item: int | None = None  # None: never truncate
    algorithm: Algorithm = "auto"
    return_debug: bool = False
    debug_top_k: int | None = None  # also its only item's tokens, and so many of the most likely next ones
    on_item_error: OnItemError = "fail"
    model: str | None = None
    suffix: str | Int32Array | None = None  # stands after every item; text or ids like the query
    # Items that cannot be scored (on_item_error "report" only). Each is "" or an empty row in `items`, so
    # that the others keep their index; whoever walks the items skips these.
    item_errors: Mapping[int, RequestError] = field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        return isinstance(self.query, str)

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def num_labels(self) -> int:
        return len(self.labels or self.label_token_ids or ())


def check_item_count(num_items: int, max_items: int, field: str = "items") -> None:
    """Raises too_many_items. `field`: what the request calls them."""
    if num_items > max_items:
        raise InvalidValueError(
            f"{field} must hold at most {max_items} items (max_items_per_request), got {num_items}; "
            "send several smaller requests",
            code="too_many_items",
            param=field,
        )


def check_score_count(request: ScoreRequest, max_scores: int) -> None:
    """Raises too_many_scores: every item gets a score for every label, and all of them are in memory at a time."""
    num_scores = request.num_items * request.num_labels
    if num_scores > max_scores:
        raise InvalidValueError(
            f"items x labels must be at most {max_scores} scores, got {request.num_items} x {request.num_labels}; "
            "send several smaller requests",
            code="too_many_scores",
            param="items",
        )


def check_model(request: ScoreRequest, served_names: Collection[str]) -> None:
    """Raises model_not_found; no name and "default" mean whatever is served."""
    if request.model in (None, "default") or request.model in served_names:
        return
    served = ", ".join(map(quote, served_names))
    message = f'model must be one of {served} or "default", got {quote(str(request.model))}'
    raise ModelNotFoundError(message, code="model_not_found", param="model")


def check_vocabulary(request: ScoreRequest, vocab_size: int) -> ScoreRequest:
    """The request; under on_item_error "report", items with ids that the model lacks are in `item_errors`.

    Raises token_id_exceeds_vocab for any other id at or above `vocab_size`, the rows of the embedding.
    """
    if not isinstance(request.query, str):
        _check_ids(request.query, Place("query", "query"), vocab_size)
    if request.suffix is not None and not isinstance(request.suffix, str):
        _check_ids(request.suffix, Place("suffix", "suffix"), vocab_size)
    _check_labels(request, vocab_size)
    return _check_items(request, vocab_size)


def _check_ids(ids: Int32Array, place: Place, vocab_size: int) -> None:
    bad = np.flatnonzero(ids >= vocab_size)
    if bad.size:
        raise _beyond(ids, int(bad[0]), place, vocab_size)


def _check_labels(request: ScoreRequest, vocab_size: int) -> None:
    for index, label in enumerate(request.label_token_ids or ()):
        name = f"label_token_ids[{index}]"
        for position, token in enumerate(label):
            if token >= vocab_size:
                place = Place(name if len(label) == 1 else f"{name}[{position}]", "label_token_ids")
                raise vocabulary_error(token, place, _below(vocab_size))


def _check_items(request: ScoreRequest, vocab_size: int) -> ScoreRequest:
    items = request.items
    if not isinstance(items, Ragged):
        return request
    bad = np.flatnonzero(items.flat >= vocab_size)
    if not bad.size:
        return request
    rows, first = np.unique(np.searchsorted(items.starts, bad, side="right") - 1, return_index=True)
    errors: dict[int, RequestError] = {}
    for row, position in zip(rows.tolist(), bad[first].tolist(), strict=True):
        within = position - int(items.starts[row])
        errors[row] = _beyond(items[row], within, Place.of_item(row), vocab_size)
        if request.on_item_error == "fail":
            raise errors[row]
    return replace(request, items=_emptied(items, rows), item_errors={**request.item_errors, **errors})


def _emptied(items: Ragged, rows: Int64Array) -> Ragged:
    """The same number of rows, the given ones without ids."""
    keep = np.ones(len(items), bool)
    keep[rows] = False
    return Ragged(items.flat[np.repeat(keep, items.lens)], starts_from_lens(items.lens * keep))


def _beyond(ids: Int32Array, position: int, place: Place, vocab_size: int) -> RequestError:
    place = place._replace(name=f"{place.name}[{position}]")
    return vocabulary_error(int(ids[position]), place, _below(vocab_size))


def _below(vocab_size: int) -> str:
    return f"below {vocab_size}, the model's vocabulary size"
