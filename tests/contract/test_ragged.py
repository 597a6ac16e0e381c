"""Rows of different lengths as one flat array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.contract.ragged import IdLists, Ragged, ranges, starts_from_lens

token_rows = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=8)


def as_lists(rows: Ragged) -> list[list[int]]:
    return [row.tolist() for row in rows]


def test_rows_lie_one_after_the_other() -> None:
    rows = Ragged.from_sequences([[5, 6], [], [7]])
    assert rows.flat.tolist() == [5, 6, 7]
    assert rows.starts.tolist() == [0, 2, 2, 3]
    assert rows.lens.tolist() == [2, 0, 1]
    assert rows.flat.dtype == np.int32
    assert rows.starts.dtype == np.int64


def test_rows_of_arrays_are_the_same_as_rows_of_lists() -> None:
    rows = Ragged.from_sequences([np.array([5, 6], np.int32), np.array([], np.int32)])
    assert as_lists(rows) == [[5, 6], []]


def test_no_rows_is_legal() -> None:
    rows = Ragged.from_sequences([])
    assert (len(rows), as_lists(rows), rows.flat.tolist()) == (0, [], [])


def test_a_row_past_the_end_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        Ragged.from_sequences([[1], [2]])[2]


@given(token_rows)
def test_what_goes_in_comes_out(rows: list[list[int]]) -> None:
    assert as_lists(Ragged.from_sequences(rows)) == rows


@given(token_rows.filter(bool), st.data())
def test_take_gives_the_rows_asked_for_in_that_order(rows: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    taken = Ragged.from_sequences(rows).take(np.array(wanted, np.int64))
    assert as_lists(taken) == [rows[row] for row in wanted]


@pytest.mark.parametrize(
    ("rows", "shown"), [([[1, 2], []], "[[1, 2], []]"), ([[1]] * 10_000, "[[1], [1], [1], [1], [1], [1], ...]")]
)
def test_lists_show_the_first_of_them(rows: list[list[int]], shown: str) -> None:
    assert repr(IdLists(Ragged.from_sequences(rows))) == shown


def test_starts_are_the_running_sum_of_lengths() -> None:
    assert starts_from_lens(np.array([3, 0, 2])).tolist() == [0, 3, 3, 5]


def test_ranges_counts_up_from_every_begin() -> None:
    assert ranges(np.array([10, 4, 7]), np.array([2, 0, 3])).tolist() == [10, 11, 7, 8, 9]
