"""Query, suffix, items and labels of a request, as text and as token ids."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.contract import inputs
from prefixwise.contract.errors import RequestError
from prefixwise.contract.inputs import MAX_TOKEN_ID, Place, ids_error, parse_ids, plain, try_id_lists, try_ids
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.ragged import Ragged
from prefixwise.contract.request import ScoreRequest

INVALID_REQUEST = "invalid_request_error"
INVALID_VALUE = "invalid_value_error"
TOO_LARGE = 2**31


class Iterables:
    """Iterable, and nothing else."""

    def __init__(self, *values: object) -> None:
        self._values = values

    def __iter__(self) -> Iterator[object]:
        return iter(self._values)


def parse(query: object = "q", items: object = ("a",), **fields: object) -> ScoreRequest:
    labels = {} if "labels" in fields or "label_token_ids" in fields else {"label_token_ids": [1]}
    return parse_score_request({"query": query, "items": items, **labels, **fields})


def refusal(query: object = "q", items: object = ("a",), **fields: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(query, items, **fields)
    return caught.value


def id_lists(request: ScoreRequest) -> list[list[int]]:
    assert isinstance(request.items, Ragged)
    return [row.tolist() for row in request.items]


# Query and suffix


@pytest.mark.parametrize("query", [[3, 4], (3, 4), np.array([3, 4]), np.array([3, 4], np.uint8), [np.int64(3), 4]])
def test_ids_may_come_as_a_list_a_tuple_or_an_array(query: object) -> None:
    request = parse(query, [[1]])
    assert isinstance(request.query, np.ndarray)
    assert request.query.dtype == np.int32
    assert request.query.tolist() == [3, 4]
    assert not request.is_text


@pytest.mark.parametrize("query", [5, True, {"text": "q"}, b"q", 1.5, {1, 2}])
def test_a_query_is_a_string_or_a_list(query: object) -> None:
    error = refusal(query)
    assert (error.code, error.status, error.type) == ("invalid_query_type", 400, INVALID_REQUEST)
    assert "query must be a string or a list of token ids, got " in error.message
    assert f"({type(query).__name__})" in error.message
    assert error.param == "query"


@pytest.mark.parametrize("query", ["", [], np.array([], np.int64)])
def test_an_empty_query_is_refused(query: object) -> None:
    error = refusal(query, [[1]])
    assert (error.code, error.status, error.type) == ("empty_query", 400, INVALID_VALUE)
    assert "query must hold at least one character or token id, got " in error.message


@pytest.mark.parametrize("suffix", [5, True, {"text": "s"}])
def test_a_suffix_is_a_string_or_a_list(suffix: object) -> None:
    error = refusal(suffix=suffix)
    assert (error.code, error.status, error.type) == ("invalid_suffix_type", 400, INVALID_REQUEST)
    assert "suffix must be a string or a list of token ids, got " in error.message
    assert f"({type(suffix).__name__})" in error.message


@pytest.mark.parametrize(
    ("query", "items", "suffix", "expected"),
    [
        ("q", ["a"], [1], "a string like query, got [1]"),
        ([1], [[1]], "s", 'a list of token ids like query, got "s"'),
    ],
)
def test_a_suffix_is_of_the_same_kind_as_the_query(query: object, items: object, suffix: object, expected: str) -> None:
    error = refusal(query, items, suffix=suffix)
    assert (error.code, error.status, error.type) == ("mixed_input_types", 400, INVALID_REQUEST)
    assert f"suffix must be {expected}" in error.message


def test_a_suffix_of_ids_is_an_array_and_may_be_empty() -> None:
    suffix = parse([1], [[2]], suffix=[7, 8]).suffix
    assert isinstance(suffix, np.ndarray)
    assert suffix.tolist() == [7, 8]
    assert parse("q", ["a"], suffix="").suffix == ""


BAD_IDS = [
    (True, "invalid_token_id_type", 400, INVALID_REQUEST, "must be an integer token id, got True (bool)"),
    (1.0, "invalid_token_id_type", 400, INVALID_REQUEST, "must be an integer token id, got 1.0 (float)"),
    ("x", "invalid_token_id_type", 400, INVALID_REQUEST, 'must be an integer token id, got "x" (str)'),
    (None, "invalid_token_id_type", 400, INVALID_REQUEST, "must be an integer token id, got None"),
    (-5, "negative_token_id", 400, INVALID_VALUE, "must be a token id of 0 or more, got -5 (int)"),
    (TOO_LARGE, "token_id_exceeds_vocab", 422, INVALID_VALUE, "must be at most 2147483647"),
    (2**70, "token_id_exceeds_vocab", 422, INVALID_VALUE, f"got {2**70} (int)"),
]
bad_ids = pytest.mark.parametrize(("bad", "code", "status", "type_", "message"), BAD_IDS)


@bad_ids
@pytest.mark.parametrize("field", ["query", "suffix", "label_token_ids"])
def test_a_bad_id_is_named_with_its_place(
    field: str, bad: object, code: str, status: int, type_: str, message: str
) -> None:
    fields: dict[str, object] = {"query": [1], "items": [[2]], field: [4, bad]}
    error = refusal(**fields)
    assert (error.code, error.status, error.type, error.param) == (code, status, type_, field)
    assert error.message.startswith(f"{field}[1] must be ")
    assert message in error.message
    assert error.item_index is None


@pytest.mark.parametrize(
    ("fields", "name", "item_index"),
    [
        ({"query": "a\ud800"}, "query", None),
        ({"suffix": "\udfff"}, "suffix", None),
        ({"items": ["fine", "\ud800"]}, "items[1]", 1),
        ({"labels": ["fine", "\ud800"]}, "labels[1]", None),
    ],
)
def test_half_a_surrogate_pair_is_refused(fields: dict[str, object], name: str, item_index: int | None) -> None:
    error = refusal(**fields)
    assert (error.code, error.status, error.type) == ("invalid_unicode", 400, INVALID_VALUE)
    assert f"{name} must be valid Unicode, got a lone surrogate in " in error.message
    assert error.item_index == item_index
    assert error.message.encode()  # the message itself can be sent


# Items


@pytest.mark.parametrize("items", [["a", ""], ("a", ""), np.array(["a", ""])])
def test_text_items_may_come_as_a_list_a_tuple_or_an_array(items: object) -> None:
    assert parse("q", items).items == ("a", "")


@pytest.mark.parametrize(
    "items",
    [
        (text for text in ("a", "b")),
        {"a": 1, "b": 2}.keys(),
        {1: "a", 2: "b"}.values(),
        deque(["a", "b"]),
        pandas.Series(["a", "b"], index=[7, 3]),
        pyarrow.array(["a", "b"]),
        pyarrow.table({"text": ["a", "b"]})["text"],
        Iterables("a", "b"),
    ],
    ids=["generator", "keys", "values", "deque", "pandas", "arrow", "chunks", "iterable"],
)
def test_anything_in_an_order_is_a_list_of_items(items: object) -> None:
    assert parse(items=items).items == ("a", "b")


def test_a_missing_value_of_a_column_is_named() -> None:
    error = refusal(items=pandas.Series(["a", None]))
    assert (error.code, error.item_index) == ("invalid_items_type", 1)


@pytest.mark.parametrize(
    "items",
    [{"a", "b"}, pandas.DataFrame({"text": ["a", "b"]}), pyarrow.table({"text": ["a", "b"]}), UserDict(a=1), b"ab"],
    ids=type,
)
def test_what_has_no_order_and_a_whole_table_are_refused(items: object) -> None:
    error = refusal(items=items)
    assert error.code == "invalid_items_type"
    assert f"({type(items).__name__})" in error.message


def test_one_string_is_one_item() -> None:
    assert parse("q", "pizza").items == ("pizza",)


@pytest.mark.parametrize(
    "items",
    [
        [[1, 2], []],
        ([1, 2], ()),
        [np.array([1, 2]), np.array([], np.int64)],
        [np.array([1, 2], np.uint8), []],
        [[np.int32(1), 2], []],
        [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)],
        [range(1, 3), range(0)],
        pyarrow.chunked_array([[[1, 2]], [[]]]),
    ],
    ids=["lists", "tuples", "arrays", "mixed", "scalars", "tensors", "ranges", "chunks"],
)
def test_id_items_may_come_in_any_of_these_shapes(items: object) -> None:
    assert id_lists(parse([9], items)) == [[1, 2], []]


def test_a_matrix_is_one_item_per_row() -> None:
    assert id_lists(parse([9], np.array([[1, 2], [3, 4]]))) == [[1, 2], [3, 4]]


@given(st.lists(st.lists(st.integers(0, TOO_LARGE - 1), max_size=5), min_size=1, max_size=8))
def test_id_items_arrive_unchanged(items: list[list[int]]) -> None:
    assert id_lists(parse([9], items)) == items


def test_joining_ids_is_never_an_error() -> None:
    assert parse([9], [[1]], tokenization="joint").tokenization == "joint"


@pytest.mark.parametrize("items", [5, True, {"a": 1}, b"a"])
@pytest.mark.parametrize("on_item_error", ["fail", "report"])
def test_items_are_a_list(items: object, on_item_error: str) -> None:
    error = refusal("q", items, on_item_error=on_item_error)
    assert (error.code, error.status, error.type) == ("invalid_items_type", 400, INVALID_REQUEST)
    assert "items must be a list of strings or a list of lists of token ids, got " in error.message
    assert f"({type(items).__name__})" in error.message


@pytest.mark.parametrize("on_item_error", ["fail", "report"])
def test_no_items_is_refused(on_item_error: str) -> None:
    error = refusal("q", [], on_item_error=on_item_error)
    assert (error.code, error.status, error.type) == ("empty_items", 400, INVALID_VALUE)
    assert error.message == "items must hold at least one item, got [] (list)"


# query, a good item, a bad item, its code, its message
BAD_ITEMS: list[tuple[object, object, object, str, str]] = [
    ("q", "fine", 7, "invalid_items_type", "items[1] must be a string, got 7 (int)"),
    ("q", "fine", None, "invalid_items_type", "items[1] must be a string, got None"),
    ("q", "fine", [3], "mixed_input_types", "items[1] must be a string because query is one, got [3] (list)"),
    ([9], [4], 7, "invalid_items_type", "items[1] must be a list of token ids, got 7 (int)"),
    (
        [9],
        [4],
        "x",
        "mixed_input_types",
        'items[1] must be a list of token ids because query is one, got "x" (str)',
    ),
]
BAD_ITEMS += [([9], [4], [4, bad], code, f"items[1][1] {message}") for bad, code, _, _, message in BAD_IDS[:5]]
BAD_ITEMS += [([9], [4], [TOO_LARGE], "token_id_exceeds_vocab", "items[1][0] must be at most 2147483647")]
BAD_ITEMS += [("q", "fine", "\ud800", "invalid_unicode", "items[1] must be valid Unicode")]
bad_items = pytest.mark.parametrize(("query", "good", "bad", "code", "message"), BAD_ITEMS)


@bad_items
def test_a_bad_item_fails_the_request(query: object, good: object, bad: object, code: str, message: str) -> None:
    error = refusal(query, [good, bad, good])
    assert (error.code, error.param, error.item_index) == (code, "items", 1)
    assert error.message.startswith(message)


@bad_items
def test_a_bad_item_is_reported_and_emptied_where_that_was_asked_for(
    query: object, good: object, bad: object, code: str, message: str
) -> None:
    request = parse(query, [good, bad, good], on_item_error="report")
    assert list(request.item_errors) == [1]
    error = request.item_errors[1]
    assert (error.code, error.item_index) == (code, 1)
    assert error.message.startswith(message)
    kept = list(request.items) if request.is_text else id_lists(request)
    assert kept == [good, "" if request.is_text else [], good]


def test_the_first_bad_item_is_the_one_that_fails() -> None:
    assert refusal([9], [[1], [2, -1], ["x"]]).item_index == 1


def test_every_bad_item_is_reported() -> None:
    request = parse([9], [[-1], [1], "x", [True], 5], on_item_error="report")
    assert {index: error.code for index, error in request.item_errors.items()} == {
        0: "negative_token_id",
        2: "mixed_input_types",
        3: "invalid_token_id_type",
        4: "invalid_items_type",
    }
    assert id_lists(request) == [[], [1], [], [], []]


def test_the_list_that_the_caller_sent_is_left_alone() -> None:
    items: list[object] = [[1], "x"]
    parse([9], items, on_item_error="report")
    assert items == [[1], "x"]


def test_legal_ids_are_never_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_look(value: object) -> bool:
        raise AssertionError(f"looked at {value}")

    monkeypatch.setattr(inputs, "_is_id", refuse_to_look)
    assert parse([9], [[1, 2, 3]] * 1000).num_items == 1000
    with pytest.raises(AssertionError, match="looked at 1"):  # the patch is where a bad item would lead
        parse([9], [[1, -1]])


# Labels


@pytest.mark.parametrize("labels", [[5, 6], (5, 6), np.array([5, 6]), [np.int64(5), 6]])
def test_label_ids_become_one_tuple_each(labels: object) -> None:
    request = parse(label_token_ids=labels)
    assert request.label_token_ids == ((5,), (6,))
    assert request.labels is None
    assert {type(token) for label in request.label_token_ids for token in label} == {int}


@pytest.mark.parametrize("labels", [[[5, 6], 7], ((5, 6), (7,)), [np.array([5, 6]), np.array([7])]])
def test_a_label_sequence_may_have_many_ids(labels: object) -> None:
    request = parse(label_token_ids=labels, label_scoring="sequence")
    assert request.label_token_ids == ((5, 6), (7,))


@bad_ids
def test_a_bad_id_in_a_label_sequence_is_named(bad: object, code: str, status: int, type_: str, message: str) -> None:
    error = refusal(label_token_ids=[1, [4, bad]], label_scoring="sequence")
    assert (error.code, error.status, error.type) == (code, status, type_)
    assert error.message.startswith("label_token_ids[1][1] must be ")
    assert message in error.message


def test_a_list_as_label_points_to_label_scoring() -> None:
    error = refusal(label_token_ids=[1, [2, 3]])
    assert (error.code, error.status, error.type) == ("invalid_token_id_type", 400, INVALID_REQUEST)
    assert "label_token_ids[1] must be an integer token id, got [2, 3] (list)" in error.message
    assert 'label_scoring "sequence"' in error.message


@pytest.mark.parametrize("labels", ["yes", 5, {"a": 1}])
@pytest.mark.parametrize(("field", "of_what"), [("labels", "strings"), ("label_token_ids", "token ids")])
def test_labels_are_a_list(field: str, of_what: str, labels: object) -> None:
    error = refusal(**{field: labels})
    assert (error.code, error.status, error.type) == (f"invalid_{field}_type", 400, INVALID_REQUEST)
    assert f"{field} must be a list of {of_what}, got " in error.message
    assert f"({type(labels).__name__})" in error.message
    assert error.param == field


def test_a_label_that_is_no_string_is_named() -> None:
    error = refusal(labels=["yes", 5])
    assert (error.code, error.status, error.type) == ("invalid_labels_type", 400, INVALID_REQUEST)
    assert error.message == "labels[1] must be a string, got 5 (int)"


@pytest.mark.parametrize(
    ("field", "labels", "message"),
    [
        ("labels", [], "labels must hold at least one label, got [] (list)"),
        ("label_token_ids", [], "label_token_ids must hold at least one label, got [] (list)"),
        ("labels", ["yes", ""], 'labels[1] must hold at least one character, got "" (str)'),
        ("label_token_ids", [1, []], "label_token_ids[1] must hold at least one token id, got [] (list)"),
    ],
)
def test_no_label_and_an_empty_label_are_refused(field: str, labels: Sequence[object], message: str) -> None:
    error = refusal(**{field: labels}, label_scoring="sequence")
    assert (error.code, error.status, error.type) == ("empty_label_token_ids", 400, INVALID_VALUE)
    assert error.message == message


def test_labels_and_label_token_ids_exclude_each_other() -> None:
    error = refusal(labels=["yes"], label_token_ids=[1])
    assert (error.code, error.status, error.type) == ("conflicting_parameters", 400, INVALID_VALUE)
    assert "expected one of them, got both" in error.message


# Token ids as callers send them, to int32


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
    packed = try_id_lists(rows)
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
