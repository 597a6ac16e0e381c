"""Checks of a parsed request that depend on what is served: model names, limits, vocabulary."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.errors import InvalidValueError, ModelNotFoundError, RequestError, quote
from prefixwise.contract.fields import MAX_WARNINGS, missing
from prefixwise.contract.inputs import Place, vocabulary_error
from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, starts_from_lens
from prefixwise.contract.request import ScoreRequest

MAX_TOKENS_PER_REQUEST = 1 << 23  # about 20 bytes each while they are planned


def check_item_count(num_items: int, max_items: int, field: str = "items") -> None:
    """Raises too_many_items. `field`: the request's name for the items."""
    if num_items > max_items:
        raise InvalidValueError(
            f"{field} must hold at most {max_items} items (max_items_per_request), got {num_items}; "
            "send several smaller requests",
            code="too_many_items",
            param=field,
        )


def check_token_count(num_tokens: int, field: str | None = None, max_tokens: int = MAX_TOKENS_PER_REQUEST) -> None:
    """Raises too_many_tokens: all tokens of a request are in memory at once, those that its items repeat many times."""
    if num_tokens > max_tokens:
        raise InvalidValueError(
            f"a request must have at most {max_tokens} tokens, counting what each item repeats, got {num_tokens} or "
            "more; send several smaller requests",
            code="too_many_tokens",
            param=field,
        )


def check_score_count(request: ScoreRequest, max_scores: int, model_size: int) -> None:
    """Raises too_many_scores: the scores of all items and labels are in memory at the same time, and so are hidden
    states, each of `model_size` numbers."""
    if request.return_pooled_hidden_states and request.num_items * model_size > max_scores:
        raise InvalidValueError(
            f"hidden states must be at most {max_scores} numbers, got {request.num_items} items x {model_size}; "
            "send several smaller requests",
            code="too_many_scores",
            param="items",
        )
    num_scores = request.num_items * request.num_labels
    if num_scores > max_scores:
        raise InvalidValueError(
            f"items x labels must be at most {max_scores} scores, got {request.num_items} x {request.num_labels}; "
            "send several smaller requests",
            code="too_many_scores",
            param="items",
        )


def check_label_count(request: ScoreRequest) -> None:
    """Raises wrong_label_count if the score mode compares another number of labels. Without labels all is well."""
    allowed = {"logit_diff": (2,), "sigmoid": (1, 2)}.get(request.score_mode)
    if allowed is None or request.num_labels in (0, *allowed):
        return
    expected = " or ".join(map(str, allowed))
    message = f'score_mode "{request.score_mode}" takes {expected} labels, got {request.num_labels}'
    param = "labels" if request.labels is not None else "label_token_ids"
    raise InvalidValueError(message, code="wrong_label_count", param=param)


def label_warnings(request: ScoreRequest) -> tuple[str, ...]:
    """What is legal about the labels and hardly meant: one of them under softmax, the same one twice."""
    warnings = []
    if request.score_mode == "softmax" and request.num_labels == 1:
        warnings.append(
            "softmax over one label is always 1.0: add the labels that it competes with, or leave softmax out"
        )
    field, labels = ("labels", request.labels) if request.labels else ("label_token_ids", request.label_token_ids or ())
    places: dict[object, int] = {}
    for place, label in enumerate(labels):
        first = places.setdefault(label, place)
        if first != place:
            shown = quote(label) if isinstance(label, str) else " ".join(map(str, label))
            warnings.append(f"{field}[{place}] is the same label as {field}[{first}], {shown}: softmax counts it twice")
    if len(warnings) > MAX_WARNINGS:
        warnings[MAX_WARNINGS:] = [f"{len(warnings) - MAX_WARNINGS} more labels occur twice"]
    return tuple(warnings)


def with_classes(request: ScoreRequest, class_labels: tuple[str, ...]) -> ScoreRequest:
    """The request with its labels: its own, or the classes of a classifier (`class_labels`; (): the model is none).

    Raises missing_label_token_ids, and no_label_logits for labels that a classifier does not have.
    """
    has_labels = request.num_labels > 0
    if not class_labels and not has_labels:
        raise missing("label_token_ids", "a list of token ids (or labels, a list of strings)")
    if not class_labels:
        return request
    if has_labels:
        raise InvalidValueError(
            "this model is a classifier, which has no logits of label tokens: expected a request without labels, "
            f"which scores its {len(class_labels)} classes, got one with {request.num_labels} label(s)",
            code="no_label_logits",
        )
    if request.label_scoring == "sequence":
        message = 'label_scoring "sequence" needs label tokens, and this model is a classifier: expected "single"'
        raise InvalidValueError(message, code="conflicting_parameters", param="label_scoring")
    rows = tuple((row,) for row in range(len(class_labels)))
    request = replace(request, labels=class_labels, label_token_ids=rows)
    check_label_count(request)
    return replace(request, warnings=(*request.warnings, *label_warnings(replace(request, labels=None))))


def check_model(request: ScoreRequest, served_names: Collection[str]) -> None:
    """Raises model_not_found."""
    check_model_name(request.model, served_names)


def check_model_name(model: str | None, served_names: Collection[str]) -> None:
    """Raises model_not_found. No name and "default" mean the served model."""
    if model in (None, "default") or model in served_names:
        return
    served = ", ".join(map(quote, served_names))
    message = f'model must be one of {served} or "default", got {quote(str(model))}'
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
    bad = (ids >= vocab_size).nonzero()[0]
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
    bad = (items.flat >= vocab_size).nonzero()[0]
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


# Embedding overrides

_LARGEST = {"float16": 65_504.0, "bfloat16": 3.3895313892515355e38}  # finite numbers; vectors are finite in float32


def check_embed_overrides(request: ScoreRequest, vocab_size: int, model_size: int, dtype: str) -> ScoreRequest:
    """The request with all vectors as [vectors, D]; items with wrong ones are reported as by `check_vocabulary`.

    Raises invalid_embed_overrides if a vector does not fit the model. `dtype`: of the embedding table.
    """
    token_id, of_query, of_items = (
        request.embed_override_token_id,
        request.query_embed_overrides,
        request.item_embed_overrides,
    )
    if token_id is not None and token_id >= vocab_size:
        place = Place("embed_override_token_id", "embed_override_token_id")
        raise vocabulary_error(token_id, place, _below(vocab_size))
    if of_query is not None:
        place = Place("query_embed_overrides", "query_embed_overrides")
        request = replace(request, query_embed_overrides=_fitting(of_query, model_size, dtype, place))
    if of_items is None:
        return request
    found: list[Vectors | None] = []
    errors = dict(request.item_errors)
    for index, vectors in enumerate(of_items):
        place = Place(f"item_embed_overrides[{index}]", "item_embed_overrides", index)
        try:
            found.append(None if vectors is None else _fitting(vectors, model_size, dtype, place))
        except RequestError as error:
            if request.on_item_error == "fail":
                raise
            found.append(None)
            errors.setdefault(index, error)
    return replace(request, item_embed_overrides=tuple(found), item_errors=errors)


def _fitting(vectors: Vectors, model_size: int, dtype: str, place: Place) -> Vectors:
    is_flat, width = vectors.ndim == 1, vectors.shape[-1]  # flat: bytes, vector after vector
    largest = float(np.abs(vectors).max(initial=0.0))
    if len(vectors) and (width % model_size or (width != model_size and not is_flat)):
        unit = f"a multiple of {model_size} numbers" if is_flat else f"vectors of {model_size} numbers"
        problem = f"must hold {unit}, the model's hidden size, got {width}"
    elif largest > _LARGEST.get(dtype, np.inf):
        problem = f"must hold numbers of the model's {dtype}, up to {_LARGEST[dtype]:.5g}, got {largest:.5g}"
    else:
        return vectors.reshape(-1, model_size)
    message = f"{place.name} {problem}"
    raise InvalidValueError(message, code="invalid_embed_overrides", param=place.param, item_index=place.item_index)
