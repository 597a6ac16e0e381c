"""The arrays of a forward, done by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.backends.fake import FakeBlock
from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.engine.forward_batches import (
    BlockRun,
    ItemRun,
    SequenceRun,
    joined_batch,
    sequences_batch,
)
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, Layout, Prefix
from prefixwise.plan.algorithms import ScorePlan
from prefixwise.plan.segments import SplitItems, lay_out_segments, plan_labels
from tests.plan.planning import planner_of

PREFIX = np.array([7, 8, 9], np.int32)
ITEMS = [[10, 11], [9], [30, 31, 32]]  # the second is empty: it takes the last prefix token back
SHARED = [3, 2, 3]
ONE_LABEL = ((50,),)


def plan_of(
    algorithm: str, labels: tuple[tuple[int, ...], ...] = ONE_LABEL, *, prefix_ids: Int32Array = PREFIX, **options: Any
) -> ScorePlan:
    shared = np.array(SHARED, np.int64) + len(prefix_ids) - 3 if len(prefix_ids) else np.zeros(3, np.int64)
    split = SplitItems(prefix_ids, shared, Ragged.from_sequences(ITEMS))
    return planner_of(**options).plan(lay_out_segments(split, plan_labels(labels)), algorithm)


def all_rows(plan: ScorePlan) -> SequenceRun:
    return SequenceRun(plan, 0, len(plan.sequences))


def prefill_batch(runs: Sequence[BlockRun]) -> ForwardBatch:
    return joined_batch(runs, (), need_logsumexp=False)


def extend_batch(runs: Sequence[ItemRun], *, need_logsumexp: bool) -> ForwardBatch:
    return joined_batch((), runs, need_logsumexp=need_logsumexp)


def listed(batch: ForwardBatch, *names: str) -> list[list[int]]:
    return [getattr(batch, name).tolist() for name in names]


def cached(num_blocks: int, first_token: int = 0) -> tuple[FakeBlock, ...]:
    """Whole blocks of ascending tokens."""
    ids = np.arange(first_token, first_token + num_blocks * KV_BLOCK_SIZE, dtype=np.int32)
    return tuple(FakeBlock(KV_BLOCK_SIZE, ids[i * KV_BLOCK_SIZE : (i + 1) * KV_BLOCK_SIZE]) for i in range(num_blocks))


class TestPrefill:
    def test_a_short_prefix_is_one_block_that_is_cached_and_not_scored(self) -> None:
        batch = prefill_batch([BlockRun(PREFIX, 0, 1)])
        assert batch.layout is Layout.EXTEND
        assert listed(batch, "token_ids", "positions", "segment_starts", "sequence_starts") == [
            [7, 8, 9],
            [0, 1, 2],
            [0, 3],
            [0, 3],
        ]
        assert listed(batch, "prefix_index", "prefix_lens", "score_tokens") == [[-1], [0], []]
        assert (batch.cache_segments, batch.need_logsumexp, batch.num_tokens) == ((0,), False, 3)

    def test_a_long_one_is_blocks_of_which_each_reads_those_before_it(self) -> None:
        ids = np.arange(300, dtype=np.int32)
        batch = prefill_batch([BlockRun(ids, 0, 3)])
        assert batch.token_ids.tolist() == batch.positions.tolist() == list(range(300))
        assert listed(batch, "segment_starts", "prefix_index", "prefix_lens") == [
            [0, 128, 256, 300],
            [-1, 0, 0],
            [0, 128, 256],
        ]
        assert batch.prefixes == (Prefix(segment=0),)
        assert batch.cache_segments == (0, 1, 2)

    def test_it_goes_on_behind_cached_blocks_and_may_stop_before_the_end(self) -> None:
        batch = prefill_batch([BlockRun(np.arange(600, dtype=np.int32), 2, 4)])
        assert batch.token_ids.tolist() == batch.positions.tolist() == list(range(256, 512))
        assert listed(batch, "segment_starts", "prefix_index", "prefix_lens") == [[0, 128, 256], [0, 0], [256, 384]]
        assert batch.prefixes == (Prefix(segment=0),), "the blocks before come when it starts"

    def test_several_prefixes_are_computed_side_by_side(self) -> None:
        batch = prefill_batch([BlockRun(np.arange(200, dtype=np.int32), 0, 2), BlockRun(PREFIX, 0, 1)])
        assert batch.prefixes == (Prefix(segment=0), Prefix(segment=2))
        assert listed(batch, "segment_starts", "prefix_index", "prefix_lens") == [
            [0, 128, 200, 203],
            [-1, 0, -1],
            [0, 128, 0],
        ]
        batch = prefill_batch([BlockRun(PREFIX, 0, 1), BlockRun(np.arange(150, dtype=np.int32), 1, 2)])
        assert batch.prefixes == (Prefix(segment=0), Prefix(segment=1))
        assert listed(batch, "token_ids", "prefix_index", "prefix_lens") == [
            [7, 8, 9, *range(128, 150)],
            [-1, 1],
            [0, 128],
        ]


class TestRows:
    def test_packed_is_a_prefix_and_its_items_sequence_after_sequence(self) -> None:
        batch = sequences_batch([all_rows(plan_of("packed", chunk_size=2))], need_logsumexp=True)
        assert (batch.layout, batch.mask, batch.need_logsumexp) == (Layout.PACKED, "segment", True)
        assert batch.token_ids.tolist() == [7, 8, 9, 10, 11, 9, 7, 8, 9, 30, 31, 32]
        assert batch.positions.tolist() == [0, 1, 2, 3, 4, 2, 0, 1, 2, 3, 4, 5]
        assert listed(batch, "segment_starts", "sequence_starts") == [[0, 3, 5, 6, 9, 12], [0, 6, 12]]
        assert listed(batch, "prefix_index", "prefix_lens") == [[-1, 0, 0, -1, 1], [0, 3, 2, 0, 3]]
        assert batch.prefixes == (Prefix(segment=0), Prefix(segment=3))
        assert listed(batch, "score_tokens", "label_ids") == [[4, 5, 11], [[50]] * 3]
        assert batch.cache_segments == ()

    def test_serial_is_a_copy_of_the_prefix_for_every_item(self) -> None:
        batch = sequences_batch([all_rows(plan_of("serial"))], need_logsumexp=False)
        assert batch.layout is Layout.CAUSAL
        assert batch.token_ids.tolist() == [7, 8, 9, 10, 11, 7, 8, 9, 9, 7, 8, 9, 30, 31, 32]
        assert listed(batch, "sequence_starts", "score_tokens") == [[0, 5, 9, 15], [4, 8, 14]]
        assert batch.prefixes == (Prefix(segment=0), Prefix(segment=2), Prefix(segment=4))

    def test_the_prefix_of_a_sequence_is_cut_into_blocks_as_everywhere(self) -> None:
        """So that its numbers are those of a prefix that is cached."""
        plan = plan_of("packed", prefix_ids=np.arange(300, dtype=np.int32))
        batch = sequences_batch([all_rows(plan)], need_logsumexp=False)
        assert listed(batch, "segment_starts", "prefix_index", "prefix_lens") == [
            [0, 128, 256, 300, 302, 303, 306],
            [-1, 0, 0, 0, 0, 0],
            [0, 128, 256, 300, 299, 300],
        ]
        assert batch.prefixes == (Prefix(segment=0),)

    def test_some_sequences_of_a_request_stand_beside_those_of_another(self) -> None:
        first, second = plan_of("serial"), plan_of("serial", ((60,), (61,)), prefix_ids=PREFIX[1:])
        batch = sequences_batch([SequenceRun(first, 1, 3), SequenceRun(second, 0, 1)], need_logsumexp=False)
        assert batch.token_ids.tolist() == [7, 8, 9, 9, 7, 8, 9, 30, 31, 32, 8, 9, 10, 11]
        assert listed(batch, "sequence_starts", "score_tokens") == [[0, 4, 10, 14], [3, 9, 13]]
        assert batch.label_ids.tolist() == [[50, 50], [50, 50], [60, 61]]
        assert batch.prefixes == (Prefix(segment=0), Prefix(segment=2), Prefix(segment=4))
        assert listed(batch, "prefix_index", "prefix_lens") == [[-1, 0, -1, 1, -1, 2], [0, 2, 0, 3, 0, 2]]

    def test_the_mask_of_the_plan_is_handed_on(self) -> None:
        assert sequences_batch([all_rows(plan_of("packed", mask="dense"))], need_logsumexp=False).mask == "dense"

    def test_labels_of_many_tokens_are_read_along_their_stems(self) -> None:
        """Stems 51 and 52: a row may end between the stems of one item, and the pattern of labels goes on."""
        plan = plan_of("packed", ((50,), (51, 60), (52, 61)), chunk_size=3, token_budget=12)
        batches = [
            sequences_batch([SequenceRun(plan, row, row + 1)], need_logsumexp=True)
            for row in range(len(plan.sequences))
        ]
        assert [batch.token_ids.tolist() for batch in batches] == [
            [7, 8, 9, 10, 11, 51, 10, 11, 52, 9, 51],
            [7, 8, 9, 9, 52, 30, 31, 32, 51],
            [7, 8, 9, 30, 31, 32, 52],
        ]
        assert [batch.score_tokens.tolist() for batch in batches] == [[4, 5, 7, 8, 9, 10], [3, 4, 7, 8], [5, 6]]
        after_51, after_52 = [[50, 51, 0], [0, 60, 0]], [[0, 0, 52], [0, 0, 61]]
        assert [batch.label_ids.tolist() for batch in batches] == [
            [*after_51, *after_52, *after_51],
            [*after_52, *after_51],
            after_52,
        ]


class TestExtend:
    def test_items_read_a_cached_prefix(self) -> None:
        segments = plan_of("prefill_extend").segments
        batch = extend_batch([ItemRun(segments, 2, 3, 0)], need_logsumexp=False)
        assert batch.layout is Layout.EXTEND
        assert listed(batch, "token_ids", "positions", "segment_starts") == [[30, 31, 32], [3, 4, 5], [0, 3]]
        assert listed(batch, "prefix_index", "prefix_lens", "score_tokens") == [[0], [3], [2]]
        assert (batch.prefixes, batch.cache_segments) == ((), ())
        assert extend_batch([ItemRun(segments, 0, 2, 0)], need_logsumexp=False).positions.tolist() == [3, 4, 2]

    def test_items_of_several_requests_read_each_their_own(self) -> None:
        first, second = plan_of("prefill_extend").segments, plan_of("prefill_extend", ((60,), (61,))).segments
        without = plan_of("prefill_extend", prefix_ids=PREFIX[:0]).segments
        runs = [ItemRun(second, 1, 3, 1), ItemRun(first, 0, 1, 0), ItemRun(without, 1, 2, -1)]
        batch = extend_batch(runs, need_logsumexp=True)
        assert batch.token_ids.tolist() == [9, 30, 31, 32, 10, 11, 9]
        assert batch.positions.tolist() == [2, 3, 4, 5, 3, 4, 0]
        assert listed(batch, "prefix_index", "prefix_lens") == [[1, 1, 0, -1], [2, 3, 3, 0]]
        assert listed(batch, "segment_starts", "score_tokens") == [[0, 1, 4, 6, 7], [0, 3, 5, 6]]
        assert batch.label_ids.tolist() == [[60, 61], [60, 61], [50, 50], [50, 50]]

    @pytest.mark.parametrize("algorithm", ["serial", "packed", "prefill_extend"])
    def test_without_a_prefix_every_algorithm_has_items_alone(self, algorithm: str) -> None:
        plan = plan_of(algorithm, prefix_ids=PREFIX[:0])
        assert plan.sequences == ()
        batch = extend_batch([ItemRun(plan.segments, 0, 3, -1)], need_logsumexp=False)
        assert listed(batch, "token_ids", "positions") == [[10, 11, 9, 30, 31, 32], [0, 1, 0, 0, 1, 2]]
        assert listed(batch, "prefix_index", "prefix_lens") == [[-1] * 3, [0] * 3]

    def test_an_item_that_reads_nothing_of_its_prefix_has_none(self) -> None:
        """A query of one token and an empty item, which computes that token again."""
        split = SplitItems(PREFIX[:1], np.array([1, 0]), Ragged.from_sequences([[4], [7]]))
        segments = lay_out_segments(split, plan_labels(ONE_LABEL))
        assert extend_batch([ItemRun(segments, 0, 2, 0)], need_logsumexp=False).prefix_index.tolist() == [0, -1]

    @settings(max_examples=100, deadline=None)
    @given(
        cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4),
        labels=st.sampled_from([ONE_LABEL, ((50,), (51, 60), (52, 61)), ((1, 2, 3),)]),
    )
    def test_a_forward_of_many_runs_is_their_own_forwards_one_after_the_other(
        self, cuts: list[tuple[int, int]], labels: tuple[tuple[int, ...], ...]
    ) -> None:
        segments = plan_of("prefill_extend", labels).segments
        runs = [ItemRun(segments, min(cut), max(cut) + 1, 0) for cut in cuts]
        together = extend_batch(runs, need_logsumexp=False)
        alone = [extend_batch([run], need_logsumexp=False) for run in runs]
        for name in ("token_ids", "positions", "prefix_index", "prefix_lens", "label_ids"):
            assert np.array_equal(getattr(together, name), np.concatenate([getattr(each, name) for each in alone]))
        offsets = np.cumsum([0] + [each.num_tokens for each in alone])
        scored = [each.score_tokens + offset for each, offset in zip(alone, offsets, strict=False)]
        assert np.array_equal(together.score_tokens, np.concatenate(scored))


class TestJoined:
    def test_blocks_come_first_and_items_read_them_or_others(self) -> None:
        """Two prefixes being computed, the second one after cached blocks, and one that was cached before."""
        segments = plan_of("prefill_extend").segments
        blocks = [BlockRun(PREFIX, 0, 1), BlockRun(np.arange(150, dtype=np.int32), 1, 2)]
        items = [ItemRun(segments, 0, 2, 0), ItemRun(segments, 2, 3, 2)]
        batch = joined_batch(blocks, items, need_logsumexp=True)
        assert (batch.layout, batch.need_logsumexp) == (Layout.EXTEND, True)
        assert batch.token_ids.tolist() == [7, 8, 9, *range(128, 150), 10, 11, 9, 30, 31, 32]
        assert batch.positions.tolist() == [0, 1, 2, *range(128, 150), 3, 4, 2, 3, 4, 5]
        assert listed(batch, "segment_starts", "sequence_starts") == [[0, 3, 25, 27, 28, 31], [0, 31]]
        assert listed(batch, "prefix_index", "prefix_lens") == [[-1, 1, 0, 0, 2], [0, 128, 3, 2, 3]]
        assert batch.prefixes == (Prefix(segment=0), Prefix(segment=1)), "the third comes when it starts"
        assert batch.cache_segments == (0, 1)
        assert listed(batch, "score_tokens", "label_ids") == [[26, 27, 30], [[50]] * 3]

    @settings(max_examples=50)
    @given(
        lens=st.lists(st.integers(1, 400), min_size=1, max_size=4),
        reads=st.lists(st.integers(-1, 5), min_size=1, max_size=4),
        labels=st.sampled_from([ONE_LABEL, ((50,), (51, 60), (52, 61))]),
    )
    def test_it_is_the_two_forwards_one_behind_the_other(
        self, lens: list[int], reads: list[int], labels: tuple[tuple[int, ...], ...]
    ) -> None:
        blocks = [BlockRun(np.arange(length, dtype=np.int32), 0, -(-length // KV_BLOCK_SIZE)) for length in lens]
        items = [ItemRun(plan_of("prefill_extend", labels).segments, 0, 3, number) for number in reads]
        joined = joined_batch(blocks, items, need_logsumexp=False)
        first, second = prefill_batch(blocks), extend_batch(items, need_logsumexp=False)
        for name in ("token_ids", "positions", "prefix_index", "prefix_lens"):
            assert np.array_equal(getattr(joined, name), np.concatenate([getattr(first, name), getattr(second, name)]))
        assert np.array_equal(
            np.diff(joined.segment_starts), [*np.diff(first.segment_starts), *np.diff(second.segment_starts)]
        )
        assert np.array_equal(joined.token_ids[joined.score_tokens], second.token_ids[second.score_tokens])
        assert np.array_equal(joined.label_ids, second.label_ids)
        assert (joined.prefixes, joined.cache_segments) == (first.prefixes, first.cache_segments)


def test_arrays_have_the_same_dtypes_whatever_is_in_a_forward() -> None:
    blocks, segments = [BlockRun(np.arange(150, dtype=np.int32), 0, 2)], plan_of("prefill_extend").segments
    whole, piece = ItemRun(segments, 0, 3, 0), ItemRun(segments, 1, 2, 0)
    batches = [joined_batch(blocks, items, need_logsumexp=False) for items in ((), [whole], [piece, whole])]
    batches += [extend_batch(items, need_logsumexp=False) for items in ([whole], [piece], [whole, piece])]
    batches += [sequences_batch([all_rows(plan_of("packed"))], need_logsumexp=False)]
    int32 = {"token_ids", "positions", "label_ids"}
    int64 = {"segment_starts", "prefix_index", "prefix_lens", "sequence_starts", "score_tokens"}
    for batch in batches:
        found = {name: value.dtype for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
        assert found == {**dict.fromkeys(int32, np.dtype(np.int32)), **dict.fromkeys(int64, np.dtype(np.int64))}
