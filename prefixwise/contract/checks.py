"""Checks of a parsed request that depend on what is served: model names, limits, vocabulary."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from prefixwise.contract.errors import InvalidValueError, ModelNotFoundError, RequestError, quote
from prefixwise.contract.inputs import Place, vocabulary_error
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, starts_from_lens
from prefixwise.contract.request import ScoreRequest


def check_item_count(num_items: int, max_items: int, field: str = "items") -> None:
    """Raises too_many_items. `field`: the request's name for the items."""
    if num_items > max_items:
        raise InvalidValueError(
            f"{field} must hold at most {max_items} items (max_items_per_request), got {num_items}; "
            "send several smaller requests",
            code="too_many_items",
            param=field,
        )


def check_score_count(request: ScoreRequest, max_scores: int) -> None:
    """Raises too_many_scores: the scores of all items and labels are in memory at the same time."""
    num_scores = request.num_items * request.num_labels
    if num_scores > max_scores:
        raise InvalidValueError(
            f"items x labels must be at most {max_scores} scores, got {request.num_items} x {request.num_labels}; "
            "send several smaller requests",
            code="too_many_scores",
            param="items",
        )


def check_model(request: ScoreRequest, served_names: Collection[str]) -> None:
    """Raises model_not_found. No name and "default" mean the served model."""
    if request.model in (None, "default") or request.model in served_names:
        return
    served = ", ".join(map(quote, served_names))
    message = f'model must be one of {served} or "default", got {quote(str(request.model))}'
    raise ModelNotFoundError(message, code="model_not_found", param="model")


def check_vocabulary(request: ScoreRequest, vocab_size: int) -> ScoreRequest:
    """The request, which reports items with unknown token ids in `item_errors` if on_item_error is "report".

    Raises token_id_exceeds_vocab for any other id at or above `vocab_size`, the number of rows of the embedding.
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
    wrong, first = np.unique(np.searchsorted(items.starts, bad, side="right") - 1, return_index=True)
    errors: dict[int, RequestError] = {}
    for item, position in zip(wrong.tolist(), bad[first].tolist(), strict=True):
        within = position - int(items.starts[item])
        errors[item] = _beyond(items[item], within, Place.of_item(item), vocab_size)
        if request.on_item_error == "fail":
            raise errors[item]
    return replace(request, items=_emptied(items, wrong), item_errors={**request.item_errors, **errors})


def _emptied(items: Ragged, wrong: Int64Array) -> Ragged:
    """The same number of items, the wrong ones without ids."""
    keep = np.ones(len(items), bool)
    keep[wrong] = False
    return Ragged(items.flat[np.repeat(keep, items.lens)], starts_from_lens(items.lens * keep))


def _beyond(ids: Int32Array, position: int, place: Place, vocab_size: int) -> RequestError:
    place = place._replace(name=f"{place.name}[{position}]")
    return vocabulary_error(int(ids[position]), place, _below(vocab_size))


def _below(vocab_size: int) -> str:
    return f"below {vocab_size}, the model's vocabulary size"
