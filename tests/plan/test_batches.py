"""Filling rows and forwards."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from itemwise.plan.batches import PlannedBatch, Row, fill_rows, group_rows, one_row_each
from itemwise.plan.buckets import Buckets

BUCKETS = Buckets.multiples(8, 64)
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


def test_rows_share_a_forward_up_to_the_budget() -> None:
    rows = [Row(0, 2, 10), Row(2, 3, 10), Row(3, 6, 11)]
    assert group_rows(rows, token_budget=20, buckets=BUCKETS) == (
        PlannedBatch((0, 2, 3), 20, 24),
        PlannedBatch((3, 6), 11, 16),
    )


def test_rows_share_a_forward_up_to_a_number_of_segments() -> None:
    rows = [Row(0, 1, 1), Row(1, 2, 1), Row(2, 3, 1)]
    batches = group_rows(rows, token_budget=100, max_segments=2, buckets=BUCKETS)
    assert [batch.row_starts for batch in batches] == [(0, 1, 2), (2, 3)]
    assert [(batch.first, batch.stop) for batch in batches] == [(0, 2), (2, 3)]


def test_one_row_each() -> None:
    batches = one_row_each([Row(0, 2, 10), Row(2, 3, 1)], BUCKETS)
    assert batches == (PlannedBatch((0, 2), 10, 16), PlannedBatch((2, 3), 1, 8))


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


@settings(max_examples=300, deadline=None)
@given(
    row_lens=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20)), min_size=1, max_size=20),
    token_budget=st.integers(1, 60),
    max_segments=st.integers(0, 8),
)
def test_forwards_hold_every_row_once_in_order_within_bounds_and_no_fewer_than_fit(
    row_lens: list[tuple[int, int]], token_budget: int, max_segments: int
) -> None:
    edges = [0]
    for num_segments, _ in row_lens:
        edges.append(edges[-1] + num_segments)
    rows = [Row(first, stop, length) for (first, stop), (_, length) in zip(pairwise(edges), row_lens, strict=True)]
    batches = group_rows(rows, token_budget=token_budget, max_segments=max_segments, buckets=BUCKETS)
    found = [row for batch in batches for row in pairwise(batch.row_starts)]
    assert found == [(row.first, row.stop) for row in rows]
    tokens_of = {row.first: row.num_tokens for row in rows}
    for batch in batches:
        num_rows = len(batch.row_starts) - 1
        assert batch.num_tokens == sum(tokens_of[first] for first in batch.row_starts[:-1])
        assert num_rows == 1 or batch.num_tokens <= token_budget
        assert num_rows == 1 or not max_segments or batch.stop - batch.first <= max_segments
        assert 0 <= batch.bucket - batch.num_tokens < 8
        assert batch.bucket % 8 == 0
    for batch, after in pairwise(batches):
        is_full = 0 < max_segments < after.row_starts[1] - batch.first
        assert is_full or batch.num_tokens + tokens_of[after.first] > token_budget
