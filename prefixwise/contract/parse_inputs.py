"""The fields of a request that hold text or token ids: query, suffix, items and labels.

Part of `parse.py`, which has made sure that nothing required is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefixwise.contract.describe import describe
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, RequestError
from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.contract.request import LabelScoring, OnItemError
from prefixwise.contract.token_ids import Place, id_error, ids_error, parse_ids, plain_list, try_id_rows

Labels = tuple[tuple[str, ...] | None, tuple[tuple[int, ...], ...] | None]  # labels, label_token_ids


def parse_query(value: object) -> str | Int32Array:
    """Text or ids; the items and the suffix must be of the same kind."""
    query = _text_or_ids(value, "query")
    if len(query) == 0:
        message = f"query must hold at least one character or token id, got {describe(value)}"
        raise InvalidValueError(message, code="empty_query", param="query")
    return query


def parse_suffix(fields: Mapping[str, object], query: str | Int32Array) -> str | Int32Array | None:
    """What stands after every item: None when absent; may be empty."""
    if "suffix" not in fields:
        return None
    suffix = _text_or_ids(fields["suffix"], "suffix")
    if isinstance(suffix, str) != isinstance(query, str):
        expected = "a string" if isinstance(query, str) else "a list of token ids"
        message = f"suffix must be {expected} like query, got {describe(fields['suffix'])}"
        raise InvalidRequestError(message, code="mixed_input_types", param="suffix")
    return suffix


def _text_or_ids(value: object, name: str) -> str | Int32Array:
    place = Place(name, name)
    if isinstance(value, str):
        return checked_text(value, place)
    if isinstance(value, (list, tuple)):
        return parse_ids(value, place)
    message = f"{name} must be a string or a list of token ids, got {describe(value)}"
    raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)


def checked_text(text: str, place: Place) -> str:
    """The text. Raises invalid_unicode."""
    error = _text_error(text, place)
    if error is not None:
        raise error
    return text


def _text_error(text: str, place: Place) -> RequestError | None:
    """JSON can spell half a surrogate pair (`"\\ud800"`), which no tokenizer can read."""
    if _is_unicode(text):
        return None
    message = f"{place.name} must be valid Unicode, got a lone surrogate in {describe(text)}"
    return InvalidValueError(message, code="invalid_unicode", param=place.param, item_index=place.item_index)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Items


def parse_items(
    value: object, is_text: bool, on_item_error: OnItemError
) -> tuple[tuple[str, ...] | Ragged, dict[int, RequestError]]:
    """All items, and the errors of those that became empty because they are at fault."""
    rows = _item_rows(value)
    items = _try_texts(rows) if is_text else try_id_rows(rows)
    if items is not None:
        return items, {}
    # Something is wrong: judge item by item, each by itself, so that no item's verdict depends on another.
    errors: dict[int, RequestError] = {}
    for index, row in enumerate(rows):
        error = _text_item_error(row, index) if is_text else _id_item_error(row, index)
        if error is not None and on_item_error == "fail":
            raise error
        if error is not None:
            errors[index] = error
            rows[index] = "" if is_text else []
    items = _try_texts(rows) if is_text else try_id_rows(rows)
    assert items is not None, "every item at fault has been emptied"
    return items, errors


def _item_rows(value: object) -> list[object]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, (list, tuple)):
        message = f"items must be a list of strings or a list of lists of token ids, got {describe(value)}"
        raise InvalidRequestError(message, code="invalid_items_type", param="items")
    if len(value) == 0:
        message = f"items must hold at least one item, got {describe(value)}"
        raise InvalidValueError(message, code="empty_items", param="items")
    return plain_list(value)


def _try_texts(rows: Sequence[object]) -> tuple[str, ...] | None:
    if not all(issubclass(kind, str) for kind in set(map(type, rows))):
        return None
    texts: tuple[str, ...] = tuple(rows)  # type: ignore[arg-type]  # the line above has checked it
    return texts if _is_unicode("".join(texts)) else None


def _text_item_error(row: object, index: int) -> RequestError | None:
    if isinstance(row, str):
        return _text_error(row, Place.of_item(index))
    if isinstance(row, (list, tuple)):
        return _item_type_error(row, index, "a string because query is one", "mixed_input_types")
    return _item_type_error(row, index, "a string", "invalid_items_type")


def _id_item_error(row: object, index: int) -> RequestError | None:
    if isinstance(row, (list, tuple)):
        return ids_error(row, Place.of_item(index))
    if isinstance(row, str):
        expected = "a list of token ids because query is one"
        return _item_type_error(row, index, expected, "mixed_input_types")
    return _item_type_error(row, index, "a list of token ids", "invalid_items_type")


def _item_type_error(row: object, index: int, expected: str, code: str) -> RequestError:
    message = f"items[{index}] must be {expected}, got {describe(row)}"
    return InvalidRequestError(message, code=code, param="items", item_index=index)


# Labels


def parse_labels(fields: Mapping[str, object], label_scoring: LabelScoring) -> Labels:
    """One of the two, the other None."""
    if "labels" in fields and "label_token_ids" in fields:
        message = "labels and label_token_ids exclude each other: expected one of them, got both"
        raise InvalidValueError(message, code="conflicting_parameters", param="labels")
    if "labels" in fields:
        return _parse_text_labels(_label_list(fields, "labels", "strings")), None
    values = _label_list(fields, "label_token_ids", "token ids")
    return None, _parse_id_labels(values, label_scoring)


def _label_list(fields: Mapping[str, object], name: str, of_what: str) -> Sequence[object]:
    value = fields[name]
    if not isinstance(value, (list, tuple)):
        message = f"{name} must be a list of {of_what}, got {describe(value)}"
        raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)
    if len(value) == 0:
        raise _empty_label(name, name, "label", value)
    return plain_list(value)


def _parse_text_labels(values: Sequence[object]) -> tuple[str, ...]:
    labels = []
    for index, value in enumerate(values):
        place = Place(f"labels[{index}]", "labels")
        if not isinstance(value, str):
            message = f"{place.name} must be a string, got {describe(value)}"
            raise InvalidRequestError(message, code="invalid_labels_type", param="labels")
        if not value:
            raise _empty_label("labels", place.name, "character", value)
        labels.append(checked_text(value, place))
    return tuple(labels)


def _parse_id_labels(values: Sequence[object], label_scoring: LabelScoring) -> tuple[tuple[int, ...], ...]:
    places = [Place(f"label_token_ids[{index}]", "label_token_ids") for index in range(len(values))]
    parse = _parse_label_sequence if label_scoring == "sequence" else _parse_single_label
    return tuple(parse(value, place) for value, place in zip(values, places, strict=True))


def _parse_label_sequence(value: object, place: Place) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        return _parse_single_label(value, place)
    if len(value) == 0:
        raise _empty_label(place.param, place.name, "token id", value)
    return tuple(parse_ids(value, place).tolist())


def _parse_single_label(value: object, place: Place) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        hint = 'label_scoring "sequence" takes labels of many tokens'
        message = f"{place.name} must be an integer token id, got {describe(value)}; {hint}"
        raise InvalidRequestError(message, code="invalid_token_id_type", param=place.param)
    error = id_error(value, place)
    if error is not None:
        raise error
    return (int(value),)  # type: ignore[call-overload]  # an integer, by the check above


def _empty_label(param: str, name: str, of_what: str, value: object) -> InvalidValueError:
    message = f"{name} must hold at least one {of_what}, got {describe(value)}"
    return InvalidValueError(message, code="empty_label_token_ids", param=param)
