"""The fields of a request that hold text or token ids: query, suffix, items, documents and labels.

Token ids have a fast path, which looks at the set of types and at the smallest and largest id: 200,000 ids take a few
milliseconds. If it fails, `ids_error` walks the ids to find the first wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence, Set
from itertools import chain
from struct import error as StructError  # noqa: N812  # a class, despite its name
from struct import pack
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from prefixwise.contract.errors import (
    InvalidRequestError,
    InvalidValueError,
    RequestError,
    VocabularyError,
    describe,
    quote,
)
from prefixwise.contract.ragged import Int32Array, Ragged, starts_from_lens

Labels = tuple[tuple[str, ...] | None, tuple[tuple[int, ...], ...] | None]  # labels, label_token_ids
MAX_TOKEN_ID = 2**31 - 1  # ids travel as int32
_BOOLS = {bool, np.bool_}
_PLAIN = frozenset((str, list, tuple, int, float, bool, type(None)))
_MAX_PACKED = 1 << 17  # ids that are checked at once: other threads may run in between
_SHOWN_KEYS = 5  # of a document that is an object, in an error message


class Place(NamedTuple):
    """A place in the request, which an error names."""

    name: str  # as a person would write it: "query", "items[3]"
    param: str  # the request field
    item_index: int | None = None

    @classmethod
    def of_item(cls, index: int) -> Place:
        return cls(f"items[{index}]", "items", index)


@runtime_checkable
class _Array(Protocol):
    """NumPy arrays and scalars, pandas' columns, Arrow's arrays, tensors."""

    def tolist(self) -> object: ...


@runtime_checkable
class _Column(Protocol):
    """Polars' columns."""

    def to_list(self) -> object: ...


@runtime_checkable
class _ArrowColumn(Protocol):
    """Arrow's columns in several chunks. Its tables are not iterable."""

    def to_pylist(self) -> object: ...
    def __iter__(self) -> Iterator[object]: ...


@runtime_checkable
class _Table(Protocol):
    """DataFrames, which iterate over the names of their columns."""

    @property
    def columns(self) -> object: ...


def plain(value: object) -> object:
    """Arrays, columns, generators and other ordered iterables as lists, and NumPy's scalars as Python's, so that later
    code meets one kind of list and of bool. What has no order, and a whole table, stays as it is.

    Arrays of vectors stay as they are: no list holds as many numbers.
    """
    if isinstance(value, (str, list, tuple, int, float, dict, bytes)):
        return value.item() if isinstance(value, np.generic) else value  # np.float64 is a float
    if isinstance(value, np.ndarray):  # first: there may be one per item, and asking for a protocol is slow
        return value if value.ndim > 1 and value.dtype.kind in "fV" else value.tolist()  # V: bfloat16
    if isinstance(value, _Array):
        return value.tolist()
    if isinstance(value, _Column):
        return value.to_list()
    if isinstance(value, _ArrowColumn):
        return value.to_pylist()
    is_ordered = isinstance(value, KeysView) or not isinstance(value, (Set, Mapping, _Table))
    return list(value) if is_ordered and isinstance(value, Iterable) else value


def plain_list(values: Sequence[object]) -> list[object]:
    """`plain` of every value, but iterators stay: a client reads values twice. Fast if all are plain."""
    if set(map(type, values)) <= _PLAIN:
        return list(values)
    return [value if isinstance(value, Iterator) else plain(value) for value in values]


def try_ids(values: Sequence[object]) -> Int32Array | None:
    """The values as token ids, or None if any of them is not one."""
    if len(values) <= _MAX_PACKED:
        return _pack_ids(values)
    parts = []
    for start in range(0, len(values), _MAX_PACKED):
        part = _pack_ids(values[start : start + _MAX_PACKED])
        if part is None:
            return None
        parts.append(part)
    return np.concatenate(parts)


def _pack_ids(values: Sequence[object]) -> Int32Array | None:
    try:
        numbers = pack(f"{len(values)}i", *values)  # raises for anything but 32-bit integers
    except (StructError, TypeError, OverflowError):
        return None
    ids = np.frombuffer(numbers, np.int32)
    # `pack` accepts true and false as integers, and those of NumPy 1, so a 1 or a 0 may be a bool.
    doubtful = (ids <= 1).nonzero()[0]
    if len(doubtful) and (ids.min() < 0 or not _BOOLS.isdisjoint(type(values[place]) for place in doubtful.tolist())):
        return None
    return ids


def try_id_lists(values: Sequence[object]) -> Ragged | None:
    """All lists as one ragged array, or None if any of them is not a list of token ids."""
    if not all(issubclass(kind, (list, tuple)) for kind in set(map(type, values))):
        return None
    lists: Sequence[Sequence[object]] = values  # type: ignore[assignment]  # the line above has checked it
    flat = try_ids(list(chain.from_iterable(lists)))
    if flat is None:
        return None
    lens = np.fromiter(map(len, lists), np.int64, count=len(lists))
    return Ragged(flat, starts_from_lens(lens))


def parse_ids(values: Sequence[object], place: Place) -> Int32Array:
    """The values as token ids. Raises the error of the first wrong one."""
    ids = try_ids(values)
    if ids is not None:
        return ids
    error = ids_error(values, place)
    assert error is not None, f"{place.name} is refused although every id in it is legal"
    raise error


def ids_error(values: Sequence[object], place: Place) -> RequestError | None:
    """The error of the first value that is not a token id, or None if all of them are."""
    bad = next((position for position, value in enumerate(values) if not _is_id(value)), None)
    if bad is None:
        return None
    return id_error(values[bad], place._replace(name=f"{place.name}[{bad}]"))


def id_error(value: object, place: Place) -> RequestError | None:
    """The error of one id, or None. `place` names the id itself."""
    if not _is_integer_type(type(value)):
        message = f"{place.name} must be an integer token id, got {describe(value)}"
        return InvalidRequestError(
            message, code="invalid_token_id_type", param=place.param, item_index=place.item_index
        )
    if value < 0:  # type: ignore[operator]  # an integer, by the check above
        message = f"{place.name} must be a token id of 0 or more, got {describe(value)}"
        return InvalidValueError(message, code="negative_token_id", param=place.param, item_index=place.item_index)
    if value > MAX_TOKEN_ID:  # type: ignore[operator]
        return vocabulary_error(value, place, f"at most {MAX_TOKEN_ID}, the largest id of any vocabulary")
    return None


def vocabulary_error(value: object, place: Place, expected: str) -> VocabularyError:
    """The error of an id beyond the vocabulary; `expected` ends the sentence "items[3][2] must be ..."."""
    message = f"{place.name} must be {expected}, got {describe(value)}"
    return VocabularyError(message, code="token_id_exceeds_vocab", param=place.param, item_index=place.item_index)


def _is_id(value: object) -> bool:
    return _is_integer_type(type(value)) and 0 <= value <= MAX_TOKEN_ID  # type: ignore[operator]


def _is_integer_type(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and kind is not bool


# Query and suffix


def parse_query(value: object) -> str | Int32Array:
    """Text or token ids; the items and the suffix must be of the same kind."""
    query = _text_or_ids(value, "query")
    if len(query) == 0:
        message = f"query must hold at least one character or token id, got {describe(value)}"
        raise InvalidValueError(message, code="empty_query", param="query")
    return query


def parse_suffix(fields: Mapping[str, object], query: str | Int32Array) -> str | Int32Array | None:
    """The text or token ids after every item: None if absent; may be empty."""
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
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Items


def parse_items(value: object, is_text: bool, report: bool) -> tuple[tuple[str, ...] | Ragged, dict[int, RequestError]]:
    """All items, and with `report` the errors of wrong ones, which become empty. Else raises the first error."""
    items = _item_list(value)
    parsed = _try_texts(items) if is_text else try_id_lists(items)
    if parsed is not None:
        return parsed, {}
    # An item is wrong. Each one is checked by itself, so that its error does not depend on another item.
    errors: dict[int, RequestError] = {}
    for index, item in enumerate(items):
        error = _text_item_error(item, index) if is_text else _id_item_error(item, index)
        if error is not None and not report:
            raise error
        if error is not None:
            errors[index] = error
            items[index] = "" if is_text else []
    parsed = _try_texts(items) if is_text else try_id_lists(items)
    assert parsed is not None, "every wrong item is empty now"
    return parsed, errors


def _item_list(value: object) -> list[object]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, (list, tuple)):
        message = f"items must be a list of strings or a list of lists of token ids, got {describe(value)}"
        raise InvalidRequestError(message, code="invalid_items_type", param="items")
    if len(value) == 0:
        message = f"items must hold at least one item, got {describe(value)}"
        raise InvalidValueError(message, code="empty_items", param="items")
    return plain_list(value)


def _try_texts(items: Sequence[object]) -> tuple[str, ...] | None:
    if not all(issubclass(kind, str) for kind in set(map(type, items))):
        return None
    texts: tuple[str, ...] = tuple(items)  # type: ignore[arg-type]  # the line above has checked it
    return texts if all(map(str.isascii, texts)) or _is_unicode("".join(texts)) else None


def _text_item_error(item: object, index: int) -> RequestError | None:
    if isinstance(item, str):
        return _text_error(item, Place.of_item(index))
    if isinstance(item, (list, tuple)):
        return _item_type_error(item, index, "a string because query is one", "mixed_input_types")
    return _item_type_error(item, index, "a string", "invalid_items_type")


def _id_item_error(item: object, index: int) -> RequestError | None:
    if isinstance(item, (list, tuple)):
        return ids_error(item, Place.of_item(index))
    if isinstance(item, str):
        expected = "a list of token ids because query is one"
        return _item_type_error(item, index, expected, "mixed_input_types")
    return _item_type_error(item, index, "a list of token ids", "invalid_items_type")


def _item_type_error(item: object, index: int, expected: str, code: str) -> RequestError:
    message = f"items[{index}] must be {expected}, got {describe(item)}"
    return InvalidRequestError(message, code=code, param="items", item_index=index)


# Documents


def parse_documents(value: object, name: str) -> tuple[str, ...]:
    """The texts of the documents. `name`: the field that holds them."""
    if not isinstance(value, (list, tuple)):
        message = f'{name} must be a list of strings, or of objects like {{"text": "..."}}, got {describe(value)}'
        raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)
    if len(value) == 0:
        message = f"{name} must hold at least one document, got {describe(value)}"
        raise InvalidValueError(message, code=f"empty_{name}", param=name)
    return tuple(_document(plain(entry), name, index) for index, entry in enumerate(value))


def _document(entry: object, name: str, index: int) -> str:
    text = entry.get("text") if isinstance(entry, Mapping) else entry
    place = Place(f"{name}[{index}]", name, index)
    if isinstance(text, str):
        return checked_text(text, place)
    expected = 'a string, or an object whose "text" is one'
    got = describe(entry)
    if isinstance(entry, Mapping):
        keys = [quote(str(key)) for key in entry][:_SHOWN_KEYS]
        got = "an object with " + (", ".join(keys) or "nothing in it") + (", ..." if len(entry) > len(keys) else "")
        if "text" in entry:
            got = f'an object whose "text" is {describe(text)}'
    message = f"{place.name} must be {expected}, got {got}"
    raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name, item_index=index)


# Labels


def parse_labels(fields: Mapping[str, object], *, is_sequence: bool) -> Labels:
    """Texts or token ids, and None for the other or for both. `is_sequence`: a label may have many tokens."""
    if "labels" in fields and "label_token_ids" in fields:
        message = "labels and label_token_ids exclude each other: expected one of them, got both"
        raise InvalidValueError(message, code="conflicting_parameters", param="labels")
    if "labels" in fields:
        return _parse_text_labels(_label_list(fields, "labels", "strings")), None
    if "label_token_ids" not in fields:
        return None, None
    values = _label_list(fields, "label_token_ids", "token ids")
    return None, _parse_id_labels(values, is_sequence)


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


def _parse_id_labels(values: Sequence[object], is_sequence: bool) -> tuple[tuple[int, ...], ...]:
    places = [Place(f"label_token_ids[{index}]", "label_token_ids") for index in range(len(values))]
    parse = _parse_label_sequence if is_sequence else _parse_single_label
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
