"""From whatever a caller sent as token ids to int32 arrays: the innermost part of parsing a request.

Two speeds. The good path looks at the set of types and at the smallest and largest id, so that 200,000 ids
cost a few milliseconds. Only after that has failed does `ids_error` walk the ids to name the culprit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import error as StructError  # noqa: N812  # a class, whatever its name
from struct import pack
from typing import NamedTuple

import numpy as np

from prefixwise.contract.describe import describe
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, RequestError, VocabularyError
from prefixwise.contract.ragged import Int32Array, Ragged, starts_from_lens

MAX_TOKEN_ID = 2**31 - 1  # ids travel as int32


class Place(NamedTuple):
    """Where in the request something stands, so that an error can name it."""

    name: str  # as a person would write it: "query", "items[3]"
    param: str  # the request field
    item_index: int | None = None

    @classmethod
    def of_item(cls, index: int) -> Place:
        return cls(f"items[{index}]", "items", index)


def plain(value: object) -> object:
    """NumPy arrays and scalars as Python values, so that everything after this knows one kind of list and of bool."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def plain_list(values: Sequence[object]) -> list[object]:
    """The same of every value in a list, where most have nothing of NumPy's."""
    if any(issubclass(kind, np.ndarray | np.generic) for kind in set(map(type, values))):
        return [plain(value) for value in values]
    return list(values)


def try_ids(values: Sequence[object]) -> Int32Array | None:
    """The values as ids, or None when any of them is not a token id."""
    try:
        numbers = pack(f"{len(values)}i", *values)  # it refuses what is no integer of 32 bits
    except (StructError, TypeError, OverflowError):
        return None
    ids = np.frombuffer(numbers, np.int32)
    # It takes true and false for integers, too: what looks like 1 or 0 may be one of them.
    doubtful = np.flatnonzero(ids <= 1)
    if len(doubtful) and (ids.min() < 0 or bool in {type(values[place]) for place in doubtful.tolist()}):
        return None
    return ids


def try_id_rows(rows: Sequence[object]) -> Ragged | None:
    """All rows as one ragged array, or None when any row is not a list of token ids."""
    if not all(issubclass(kind, (list, tuple)) for kind in set(map(type, rows))):
        return None
    lists: Sequence[Sequence[object]] = rows  # type: ignore[assignment]  # the line above has checked it
    flat = try_ids(list(chain.from_iterable(lists)))
    if flat is None:
        return None
    lens = np.fromiter(map(len, lists), np.int64, count=len(lists))
    return Ragged(flat, starts_from_lens(lens))


def parse_ids(values: Sequence[object], place: Place) -> Int32Array:
    """The values as ids. Raises what `ids_error` says about them."""
    ids = try_ids(values)
    if ids is not None:
        return ids
    error = ids_error(values, place)
    assert error is not None, f"{place.name} was refused, and yet every id in it is legal"
    raise error


def ids_error(values: Sequence[object], place: Place) -> RequestError | None:
    """What is wrong with the first value that is not a token id, or None when all of them are."""
    bad = next((position for position, value in enumerate(values) if not _is_id(value)), None)
    if bad is None:
        return None
    return id_error(values[bad], place._replace(name=f"{place.name}[{bad}]"))


def id_error(value: object, place: Place) -> RequestError | None:
    """What is wrong with this one id, or None. `place` names the id itself."""
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
