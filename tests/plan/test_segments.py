"""Every item's split into what it shares with the prefix and what is its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.plan.segments import (
    LabelRows,
    SplitItems,
    common_prefix_len,
    lay_out_segments,
    plan_labels,
    split_items,
)
from prefixwise.prompts.template import Prompt

Rows = list[list[int]]

TOKENS = st.integers(0, 2)  # few, so that rows share beginnings by chance
ROWS = st.lists(st.lists(TOKENS, max_size=6), min_size=1, max_size=8)


def ids(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)


def split(prefix: Sequence[int], rows: Rows, *, joined: bool) -> SplitItems:
    return split_items(Prompt(ids(prefix), Ragged.from_sequences(rows), joined, ((1,),), 0))


def pairs(found: SplitItems) -> list[tuple[int, list[int]]]:
    """Per item: how much of the prefix it reads, and its tail."""
    item_tokens = [each.tolist() for each in found.item_tokens]
    return list(zip(found.prefix_lens.tolist(), item_tokens, strict=True))


def test_separate_splits_at_the_query() -> None:
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


# Where labels of one and of many tokens are read


A, X, Y, Z, Q = 11, 12, 13, 14, 15

Labels = tuple[tuple[int, ...], ...]
LABELS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5).map(tuple)


def split_of(*items: list[int]) -> SplitItems:
    prefix_lens = np.full(len(items), 4, np.int64)
    return SplitItems(np.ones(4, np.int32), prefix_lens, Ragged.from_sequences(items))


def test_the_example_of_the_module() -> None:
    labels = plan_labels(((A,), (X, Y, Z), (X, Q)))
    assert labels.stems == ((X, Y),)
    assert labels.targets.tolist() == [[A, X, X], [0, Y, Q], [0, Z, 0]]
    assert [rows.tolist() for rows in labels.readings] == [[0], [0, 1, 2], [0, 1]]
    assert labels.longest_stem == 2


def test_labels_of_one_token_need_no_stem() -> None:
    labels = plan_labels(((A,), (X,), (A,)))
    assert labels.stems == ((),)
    assert labels.targets.tolist() == [[A, X, A]]
    assert (labels.rows_per_item, labels.longest_stem) == (1, 0)


def test_labels_that_begin_otherwise_have_stems_of_their_own() -> None:
    labels = plan_labels(((X, Y, Z), (Q, A)))
    assert labels.stems == ((X, Y), (Q,))
    assert [rows.tolist() for rows in labels.readings] == [[0, 1, 2], [3, 4]]


def test_every_item_is_followed_by_every_stem() -> None:
    segments = lay_out_segments(split_of([5, 6], [7]), plan_labels(((X, Y, Z), (Q, A))))
    assert [each.tolist() for each in segments.tokens] == [[5, 6, X, Y], [5, 6, Q], [7, X, Y], [7, Q]]
    assert segments.prefix_lens.tolist() == [4] * 4
    assert segments.rows_of_segment.tolist() == [0, 3, 5, 8, 10]


def test_without_stems_the_segments_are_the_items() -> None:
    split = split_of([5, 6], [7])
    segments = lay_out_segments(split, plan_labels(((A,),)))
    assert segments.tokens is split.item_tokens
    assert segments.score_offsets.tolist() == [1, 2]


@settings(max_examples=200, deadline=None)
@given(labels=LABELS)
def test_every_token_of_a_label_is_read_after_the_item_and_the_tokens_before_it(labels: Labels) -> None:
    items = [[100, 101], [200]]
    rows = plan_labels(labels)
    segments = lay_out_segments(split_of(*items), rows)
    starts = segments.tokens.starts
    for number, item in enumerate(items):
        for column, label in enumerate(labels):
            for token, row in zip(label, rows.readings[column].tolist(), strict=True):
                row_of_all = number * rows.rows_per_item + row
                offset = int(segments.score_offsets[row_of_all])
                segment = int(np.searchsorted(starts, offset, side="right")) - 1
                seen = segments.tokens.flat[starts[segment] : offset + 1].tolist()
                place = len(seen) - len(item)
                assert seen == item + list(label[:place])
                assert label[place] == token == segments.label_ids[row, column]


@settings(max_examples=100, deadline=None)
@given(labels=LABELS)
def test_no_stem_is_the_beginning_of_another(labels: Labels) -> None:
    stems = plan_labels(labels).stems
    for stem in stems:
        assert sum(other[: len(stem)] == stem for other in stems) == 1


class TestLogprobs:
    def values(self, rows: LabelRows, num_items: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Numbers of every size, so that the order in which they are added shows in the last bits."""
        random = np.random.default_rng(0)
        shape = (num_items * rows.rows_per_item, rows.targets.shape[1])
        logits = random.normal(size=shape) * 10.0 ** random.integers(-12, 2, shape)
        return logits.astype(np.float32), random.normal(size=shape[0]).astype(np.float32)

    def test_a_label_is_the_sum_over_its_tokens(self) -> None:
        rows = plan_labels(((A,), (X, Y, Z), (X, Q)))
        logits, logsumexp = self.values(rows, 2)
        logprobs = logits.astype(float) - logsumexp[:, None]
        expected = [[logprobs[i, 0], logprobs[i : i + 3, 1].sum(), logprobs[i : i + 2, 2].sum()] for i in (0, 3)]
        assert np.allclose(rows.logprobs(logits, logsumexp), expected, rtol=1e-12)

    def test_an_item_alone_gets_the_same_bits(self) -> None:
        rows = plan_labels(tuple(tuple(range(1, 1 + length)) for length in (1, 8, 9, 40)))
        logits, logsumexp = self.values(rows, 20)
        together = rows.logprobs(logits, logsumexp)
        for item in range(20):
            own = slice(item * rows.rows_per_item, (item + 1) * rows.rows_per_item)
            assert np.array_equal(rows.logprobs(logits[own], logsumexp[own])[0], together[item])
