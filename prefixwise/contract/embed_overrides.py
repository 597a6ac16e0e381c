"""Embedding overrides: vectors that take the place of a token's row of the embedding table, as float32 arrays.

    [[0.1, -0.2, ...], ...]                         a list of vectors; in Python also a NumPy array [vectors, D]
    {"base64": "zczMPc3MTL4=", "dtype": "float32"}  the same numbers, vector after vector, as little-endian bytes

From the prompt to the forward, a token id below 0 stands for an overridden token: `~id` is the row of its vector in
the request's own table. So vectors stay with their tokens however tokens are split, cut and packed.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, RequestError, describe
from prefixwise.contract.fields import Body, missing
from prefixwise.contract.inputs import Place

# [vectors, D]. Bytes do not say where a vector ends: until `checks.py` knows the model, theirs are [vectors * D].
Vectors = NDArray[np.float32]
ItemVectors = tuple[Vectors | None, ...]  # one per item; None: the item has no overrides
VectorsInput = Sequence[Sequence[float]] | Sequence[NDArray[Any]] | NDArray[Any] | Mapping[str, str]  # as in a request

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")}  # of bytes
_LIST = "a list of vectors, each a list of numbers"
EXPECTED = f'{_LIST}, or an object like {{"base64": "...", "dtype": "float32"}}'


def parse_overrides(
    fields: Body, num_items: int, *, report: bool
) -> tuple[Vectors | None, ItemVectors | None, dict[int, RequestError]]:
    """The vectors of the query and of the items, and with `report` the errors of items. Else raises the first error."""
    query, items = fields.get("query_embed_overrides"), fields.get("item_embed_overrides")
    if query is None and items is None:
        return None, None, {}
    if "embed_override_token_id" not in fields:
        raise missing("embed_override_token_id", "the id of the token whose embeddings are overridden")
    of_query = None
    if query is not None:
        of_query = _read(query, Place("query_embed_overrides", "query_embed_overrides"))
    if items is None:
        return of_query, None, {}
    return of_query, *_read_items(items, num_items, report=report)


def _read_items(value: object, num_items: int, *, report: bool) -> tuple[ItemVectors, dict[int, RequestError]]:
    name = "item_embed_overrides"
    if not isinstance(value, (list, tuple, np.ndarray)):
        message = f"{name} must be a list with null or the vectors of each item, got {describe(value)}"
        raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)
    if len(value) != num_items:
        message = f"{name} must have an entry for each of the {num_items} items, null for none, got {len(value)}"
        raise InvalidValueError(message, code="embed_overrides_mismatch", param=name)
    found: list[Vectors | None] = []
    errors: dict[int, RequestError] = {}
    for index, entry in enumerate(value):
        try:
            found.append(None if entry is None else _read(entry, Place(f"{name}[{index}]", name, index)))
        except RequestError as error:
            if not report:
                raise
            found.append(None)
            errors[index] = error
    return tuple(found), errors


def _read(value: object, place: Place) -> Vectors:
    """[vectors, D], or [vectors * D] of bytes. Raises RequestError."""
    if isinstance(value, Mapping):
        return _finite(_from_base64(value, place), place)
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return _finite(_as_float32(_real(value, place)), place)
    if not isinstance(value, (list, tuple)):
        raise _type_error(place, EXPECTED, value)
    vectors = [_numbers(each, place._replace(name=f"{place.name}[{row}]")) for row, each in enumerate(value)]
    width = len(vectors[0]) if vectors else 0
    for row, vector in enumerate(vectors):
        if len(vector) != width:
            lens = f"{width} numbers in [0] and {len(vector)} in [{row}]"
            raise _value_error(f"{place.name} must hold vectors of one length, got {lens}", place)
    return _finite(_as_float32(vectors) if width else np.zeros((len(vectors), 0), np.float32), place)


def _numbers(value: object, place: Place) -> Sequence[float] | NDArray[Any]:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return _real(value, place)
    if not isinstance(value, (list, tuple)):
        raise _type_error(place, "a list of numbers", value)
    if not all(map(_is_number, set(map(type, value)))):
        wrong = next(i for i, number in enumerate(value) if not _is_number(type(number)))
        raise _type_error(place._replace(name=f"{place.name}[{wrong}]"), "a number", value[wrong])
    return value


def _is_number(kind: type) -> bool:
    return issubclass(kind, (int, float, np.integer, np.floating)) and kind is not bool


def _real(array: NDArray[Any], place: Place) -> NDArray[Any]:
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise _type_error(place, f"of real numbers, not {array.dtype}", array)
    return array


def _as_float32(values: object) -> Vectors:
    """Rounded to float32; numbers beyond it become infinite."""
    with np.errstate(over="ignore"):
        try:
            return np.ascontiguousarray(values, np.float32)
        except OverflowError:  # an integer beyond float64
            return np.full((1, 1), np.inf, np.float32)


def _finite(vectors: Vectors, place: Place) -> Vectors:
    if not np.isfinite(vectors).all():
        row = "" if vectors.ndim == 1 else f"[{int(np.flatnonzero(~np.isfinite(vectors).all(1))[0])}]"
        message = f"{place.name}{row} must hold finite numbers of float32, got {vectors[~np.isfinite(vectors)][0]}"
        raise _value_error(message, place)
    return vectors


def _from_base64(value: Mapping[object, object], place: Place) -> Vectors:
    text, dtype = value.get("base64"), value.get("dtype")
    if value.keys() != {"base64", "dtype"} or not isinstance(text, str):
        raise _type_error(place, 'an object of "base64" and "dtype"', value)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        message = f'"dtype" of {place.name} must be one of {", ".join(DTYPES)}, got {describe(dtype)}'
        raise _value_error(message, place)
    try:
        data = b64decode(text, validate=True)
    except ValueError as error:
        raise _value_error(
            f'"base64" of {place.name} must be base64 text, got {describe(text)}: {error}', place
        ) from None
    size = DTYPES[dtype].itemsize
    if len(data) % size:
        message = f'"base64" of {place.name} must hold numbers of {size} bytes ({dtype}), got {len(data)} bytes'
        raise _value_error(message, place)
    numbers = np.frombuffer(data, DTYPES[dtype])
    if dtype == "bfloat16":  # the upper half of a float32
        numbers = (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(numbers, np.float32)


def _type_error(place: Place, expected: str, value: object) -> InvalidRequestError:
    message = f"{place.name} must be {expected}, got {describe(value)}"
    return InvalidRequestError(
        message, code=f"invalid_{place.param}_type", param=place.param, item_index=place.item_index
    )


def _value_error(message: str, place: Place) -> InvalidValueError:
    return InvalidValueError(message, code="invalid_embed_overrides", param=place.param, item_index=place.item_index)
