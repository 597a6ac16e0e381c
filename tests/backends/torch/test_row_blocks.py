"""Blocks of rows: all rows, once, in sizes that are allowed, and as many for each thread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from itemwise.backends.torch.row_blocks import cut_rows


@given(
    num_rows=st.integers(0, 5000), size=st.sampled_from([1, 7, 128]), threads=st.one_of(st.none(), st.integers(1, 70))
)
def test_every_row_is_in_one_block(num_rows: int, size: int, threads: int | None) -> None:
    blocks = cut_rows(num_rows, size, threads)
    edges = [0, *(stop for _, stop in blocks)]
    assert [start for start, _ in blocks] == edges[:-1]
    assert edges[-1] == -(-num_rows // size) * size
    allowed = {size} if threads is None else {size, 2 * size}
    assert {stop - start for start, stop in blocks} <= allowed


@pytest.mark.parametrize(
    ("num_blocks", "threads", "sizes"),
    [(10, 2, [2, 2, 2, 2, 1, 1]), (3, 2, [1, 1, 1]), (4, 2, [2, 2]), (5, 1, [2, 2, 1]), (7, 4, [1] * 7)],
)
def test_threads_get_as_many_pairs(num_blocks: int, threads: int, sizes: list[int]) -> None:
    assert [(stop - start) // 128 for start, stop in cut_rows(128 * num_blocks - 5, 128, threads)] == sizes
