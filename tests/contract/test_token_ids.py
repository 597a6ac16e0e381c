"""Token ids as callers send them, to int32."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.contract.errors import RequestError
from prefixwise.contract.token_ids import (
    MAX_TOKEN_ID,
    Place,
    ids_error,
    parse_ids,
    plain,
    try_id_rows,
    try_ids,
)

QUERY = Place("query", "query")

anything = st.one_of(
    st.integers(0, MAX_TOKEN_ID), st.integers(), st.booleans(), st.none(), st.floats(), st.text(max_size=2)
)


class Special(IntEnum):
    BOS = 1


@pytest.mark.parametrize(
    "values",
    [[], [0, 5, MAX_TOKEN_ID], (3, 4), [np.int64(7), np.uint8(2), 1], [Special.BOS]],
    ids=["none", "list", "tuple", "numpy scalars", "enum"],
)
def test_legal_ids_become_int32(values: list[object]) -> None:
    ids = try_ids(values)
    assert ids is not None
    assert ids.dtype == np.int32
    assert ids.tolist() == list(values)


@pytest.mark.parametrize("bad", [True, np.bool_(True), 1.0, "1", None, [1], -1, MAX_TOKEN_ID + 1, 2**64])
def test_anything_else_is_refused(bad: object) -> None:
    assert try_ids([1, bad]) is None


@given(st.lists(anything, max_size=5))
def test_ids_are_refused_exactly_when_an_error_is_found(values: list[object]) -> None:
    assert (try_ids(values) is None) == (ids_error(values, QUERY) is not None)


@given(st.lists(st.one_of(anything, st.lists(anything, max_size=4)), max_size=5))
def test_rows_are_refused_exactly_when_one_of_them_is(rows: list[object]) -> None:
    legal = all(isinstance(row, list) and try_ids(row) is not None for row in rows)
    packed = try_id_rows(rows)
    assert (packed is not None) == legal
    if packed is not None:
        assert [row.tolist() for row in packed] == rows


def test_the_error_names_the_first_culprit_and_the_item() -> None:
    with pytest.raises(RequestError) as caught:
        parse_ids([4, "x", -1], Place.of_item(3))
    assert caught.value.message == 'items[3][1] must be an integer token id, got "x" (str)'
    assert (caught.value.param, caught.value.item_index) == ("items", 3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([1, 2], np.uint16), [1, 2]),
        (np.array([[1], [2]]), [[1], [2]]),
        (np.array([True]), [True]),
        ((1, 2), (1, 2)),
        ("text", "text"),
    ],
)
def test_only_arrays_are_turned_into_lists(value: object, expected: object) -> None:
    assert plain(value) == expected
