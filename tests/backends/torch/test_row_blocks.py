"""Blocks of rows: all rows, once, in sizes that are allowed, and as much work for each thread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.backends.torch.row_blocks import cut_rows

SIZES = st.sampled_from([(1,), (7,), (128,), (256, 128), (128, 64), (256, 128, 64)])


@given(num_rows=st.integers(0, 5000), sizes=SIZES, threads=st.integers(1, 70))
def test_every_row_is_in_one_block(num_rows: int, sizes: tuple[int, ...], threads: int) -> None:
    blocks = cut_rows(num_rows, sizes, threads)
    edges = [0, *(stop for _, stop in blocks)]
    assert [start for start, _ in blocks] == edges[:-1]
    assert edges[-1] == -(-num_rows // sizes[-1]) * sizes[-1]
    assert {stop - start for start, stop in blocks} <= set(sizes)


@pytest.mark.parametrize(
    ("num_units", "threads", "expected"),
    [
        (19, 2, [4, 4, 4, 4, 2, 1]),
        (10, 2, [4, 4, 1, 1]),
        (7, 2, [4, 2, 1]),
        (3, 2, [2, 1]),
        (2, 2, [1, 1]),
        (1, 2, [1]),
        (19, 16, [2] * 9 + [1]),
        (11, 1, [4, 4, 2, 1]),
    ],
)
def test_threads_get_as_much_to_do(num_units: int, threads: int, expected: list[int]) -> None:
    blocks = cut_rows(64 * num_units - 5, (256, 128, 64), threads)
    assert [(stop - start) // 64 for start, stop in blocks] == expected
