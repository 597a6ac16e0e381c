"""Filling rows; `tests/engine/test_steps.py` has the forwards."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.plan.batches import Row, fill_rows

TAIL_LENS = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def test_a_row_is_closed_by_the_chunk_size() -> None:
    rows = fill_rows([1, 2, 3, 4, 5], 10, chunk_size=2, max_row_len=100)
    assert rows == [Row(0, 2, 13), Row(2, 4, 17), Row(4, 5, 15)]


def test_a_row_is_closed_by_its_length_prefix_included() -> None:
    assert fill_rows([5, 5, 5], 10, chunk_size=0, max_row_len=20) == [Row(0, 2, 20), Row(2, 3, 15)]
    assert fill_rows([5, 5, 5], 10, chunk_size=0, max_row_len=19) == [
        Row(0, 1, 15),
        Row(1, 2, 15),
        Row(2, 3, 15),
    ]


def test_a_segment_longer_than_a_row_is_alone() -> None:
    assert fill_rows([1, 50, 1], 0, chunk_size=0, max_row_len=10) == [
        Row(0, 1, 1),
        Row(1, 2, 50),
        Row(2, 3, 1),
    ]


@settings(max_examples=300, deadline=None)
@given(
    tail_lens=TAIL_LENS,
    prefix_len=st.integers(0, 20),
    chunk_size=st.integers(0, 8),
    max_row_len=st.integers(1, 60),
)
def test_rows_hold_every_segment_once_in_order_within_bounds_and_no_fewer_than_fit(
    tail_lens: list[int], prefix_len: int, chunk_size: int, max_row_len: int
) -> None:
    rows = fill_rows(tail_lens, prefix_len, chunk_size=chunk_size, max_row_len=max_row_len)
    assert [i for row in rows for i in range(row.first, row.stop)] == list(range(len(tail_lens)))
    for row in rows:
        assert row.num_tokens == prefix_len + sum(tail_lens[row.first : row.stop])
        assert row.num_tokens <= max_row_len or row.stop - row.first == 1
        assert not chunk_size or row.stop - row.first <= chunk_size
    for row, after in pairwise(rows):
        is_full = row.stop - row.first == chunk_size
        assert is_full or row.num_tokens + tail_lens[after.first] > max_row_len
