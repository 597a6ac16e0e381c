"""Every item's split into what it shares with the prefix and what is its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.plan.shared_prefix import SplitItems, common_prefix_len, split_items
from prefixwise.prompts.template import Prompt

Rows = list[list[int]]

TOKENS = st.integers(0, 2)  # few, so that rows share beginnings by chance
ROWS = st.lists(st.lists(TOKENS, max_size=6), min_size=1, max_size=8)


def ids(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)


def split(prefix: Sequence[int], rows: Rows, *, joined: bool) -> SplitItems:
    return split_items(Prompt(ids(prefix), Ragged.from_rows(rows), joined, ((1,),), 0))


def pairs(found: SplitItems) -> list[tuple[int, list[int]]]:
    """Per item: how much of the prefix it reads, and its tail."""
    tails = [tail.tolist() for tail in found.tails]
    return list(zip(found.prefix_lens.tolist(), tails, strict=True))


def test_apart_splits_at_the_query() -> None:
    assert pairs(split([7, 8], [[1, 2], [7]], joined=False)) == [(2, [1, 2]), (2, [7])]


def test_joint_splits_where_the_tokens_part() -> None:
    found = split([7, 8, 9], [[7, 8, 9, 1], [7, 8, 5], [4, 8, 9]], joined=True)
    assert pairs(found) == [(3, [1]), (2, [5]), (0, [4, 8, 9])]


def test_an_empty_item_computes_the_last_prefix_token_again() -> None:
    assert pairs(split([7, 8], [[], [1], []], joined=False)) == [(1, [8]), (2, [1]), (1, [8])]
    assert pairs(split([7, 8], [[7, 8], [7]], joined=True)) == [(1, [8]), (0, [7])]


def test_item_first_shares_nothing() -> None:
    assert pairs(split([], [[1, 7], [7]], joined=True)) == [(0, [1, 7]), (0, [7])]


def test_common_prefix() -> None:
    prefix = ids([1, 2, 3])
    lens = [common_prefix_len(prefix, ids(row)) for row in ([1, 2, 3, 4], [1, 2], [1, 9, 3], [], [9])]
    assert lens == [3, 2, 1, 0, 0]
    assert common_prefix_len(ids([]), prefix) == 0


class TestProperties:
    @settings(max_examples=200, deadline=None)
    @given(prefix=st.lists(TOKENS, min_size=1, max_size=5), rows=ROWS, joined=st.booleans())
    def test_every_item_once_in_order_and_whole(self, prefix: list[int], rows: Rows, joined: bool) -> None:
        rows = [row or [0] for row in rows] if joined else rows  # a whole sequence is never empty
        found = pairs(split(prefix, rows, joined=joined))
        whole = [row if joined else prefix + row for row in rows]
        assert [prefix[:shared] + tail for shared, tail in found] == whole
        assert all(tail for _, tail in found)

    @settings(max_examples=200, deadline=None)
    @given(prefix=st.lists(TOKENS, max_size=5), rows=ROWS)
    def test_as_much_as_possible_is_shared(self, prefix: list[int], rows: Rows) -> None:
        rows = [row or [0] for row in rows]
        for (shared, tail), row in zip(pairs(split(prefix, rows, joined=True)), rows, strict=True):
            is_at_an_end = shared in (len(prefix), len(row) - 1)
            assert is_at_an_end or tail[0] != prefix[shared]

    @settings(max_examples=200, deadline=None)
    @given(prefix=st.lists(TOKENS, min_size=1, max_size=5), rows=ROWS, joined=st.booleans())
    def test_a_split_does_not_depend_on_the_other_items(self, prefix: list[int], rows: Rows, joined: bool) -> None:
        rows = [row or [0] for row in rows] if joined else rows
        together = pairs(split(prefix, rows, joined=joined))
        assert [pairs(split(prefix, [row], joined=joined))[0] for row in rows] == together
