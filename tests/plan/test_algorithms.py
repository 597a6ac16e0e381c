"""Choosing the algorithm and the mask, and what a whole plan looks like."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.contract.errors import RequestError
from prefixwise.contract.ragged import Ragged
from prefixwise.forward.backend import BackendInfo
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.algorithms import (
    DENSE_MAX_SEQUENCE_LEN,
    PackedSequence,
    PlanOptions,
    ScorePlan,
    fill_sequences,
    max_dense_len,
)
from prefixwise.plan.branches import BranchPlans
from prefixwise.plan.cost_model import CostModel, MeasuredCosts, Sample, Work
from prefixwise.plan.segments import SplitItems, lay_out_segments, plan_labels
from tests.plan.planning import planner_of, segments_of

ALGORITHMS = ("serial", "packed", "prefill_extend")
MANY = [10] * 500
LONG = 4100  # a prefix whose packed sequences may be longer than a dense mask


def plan(prefix_len: int, segment_lens: list[int], algorithm: str = "auto", **options: Any) -> ScorePlan:
    return planner_of(**options).plan(segments_of(prefix_len, segment_lens), algorithm)


def segments_per_row(found: ScorePlan) -> list[int]:
    return [each.stop - each.first for each in found.sequences]


class TestLayouts:
    def test_packed_chunks_are_rows(self) -> None:
        """Rows of 100 + 32 * 10 tokens, the last of 100 + 20 * 10."""
        found = plan(100, MANY, "packed", chunk_size=32, token_budget=1000)
        assert segments_per_row(found) == [32] * 15 + [20]
        assert [each.num_tokens for each in found.sequences] == [420] * 15 + [300]
        assert found.max_segments == 0, "the chunk is the sequence: a forward has as many sequences as fit"

    def test_packed_without_a_chunk_size_fills_the_budget(self) -> None:
        found = plan(100, MANY, "packed", chunk_size=0, token_budget=1000)
        assert segments_per_row(found) == [90] * 5 + [50]

    def test_a_packed_row_is_no_longer_than_a_step_unless_its_prefix_is_long(self) -> None:
        """Others wait for it. A prefix is computed once for every sequence, so it may not be most of one."""
        for prefix_len, sequence_len in ((100, 2048), (500, 2048), (1000, 4000), (5000, 16_384)):
            found = plan(prefix_len, [1] * 30_000, "packed", mask="segment", token_budget=16_384)
            assert max(each.num_tokens for each in found.sequences) == sequence_len
        found = plan(100, MANY, "packed", chunk_size=400, token_budget=16_384)
        assert segments_per_row(found) == [194, 194, 112], "whatever the chunk size"

    def test_packed_has_a_row_for_each_copy_of_the_model(self) -> None:
        """Copies get whole sequences; a chunk size goes before that."""
        assert segments_per_row(plan(100, MANY, "packed", num_copies=4)) == [125] * 4
        assert segments_per_row(plan(100, MANY, "packed", num_copies=4, chunk_size=100)) == [100] * 5

    def test_serial_is_a_row_per_item_and_the_chunk_size_bounds_a_forward(self) -> None:
        found = plan(100, MANY, "serial", chunk_size=32, token_budget=1000)
        assert segments_per_row(found) == [1] * 500
        assert {each.num_tokens for each in found.sequences} == {110}
        assert (found.max_segments, found.token_budget) == (32, 1000)

    def test_prefill_extend_has_item_tokens_only(self) -> None:
        found = plan(100, MANY, "prefill_extend", token_budget=1000)
        assert (found.sequences, found.max_segments, found.token_budget) == ((), 0, 1000)
        assert found.needs_prefill
        assert plan(100, MANY, "prefill_extend", chunk_size=32).max_segments == 32

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_without_a_prefix_every_algorithm_has_item_tokens_only(self, algorithm: str) -> None:
        found = plan(0, [3, 3], algorithm, chunk_size=7)
        assert (found.algorithm, found.sequences, found.max_segments, found.needs_prefill) == (algorithm, (), 7, False)

    def test_rows_bring_their_prefix_along(self) -> None:
        assert not plan(5, [3, 3], "packed").needs_prefill

    @pytest.mark.parametrize(
        ("algorithm", "prefix_len", "num_tokens"),
        [
            ("serial", 100, 2 * 100 + 30),
            ("packed", 100, 130),
            ("prefill_extend", 100, 130),
            ("serial", 0, 30),
            ("prefill_extend", 0, 30),
        ],
    )
    def test_a_plan_knows_how_many_tokens_it_computes(self, algorithm: str, prefix_len: int, num_tokens: int) -> None:
        found = plan(prefix_len, [10, 20], algorithm)
        cached = found.segments.prefix_ids if found.needs_prefill else found.segments.prefix_ids[:0]
        assert BranchPlans(found, cached).num_tokens == num_tokens

    def test_the_chunk_size_counts_items_and_a_plan_counts_segments(self) -> None:
        labels = plan_labels(((1, 2), (3, 4), (5,)))  # two stems: an item is two segments
        split = SplitItems(np.ones(4, np.int32), np.full(6, 4), Ragged.from_sequences([[1]] * 6))
        planner = planner_of(chunk_size=2)
        packed = planner.plan(lay_out_segments(split, labels), "packed")
        assert segments_per_row(packed) == [4, 4, 4]
        assert planner.plan(lay_out_segments(split, labels), "prefill_extend").max_segments == 4

    @settings(max_examples=300, deadline=None)
    @given(
        algorithm=st.sampled_from(["serial", "packed"]),
        prefix_len=st.integers(1, 20),
        segment_lens=st.lists(st.integers(1, 20), min_size=1, max_size=30),
        chunk_size=st.none() | st.integers(0, 6),
        token_budget=st.integers(1, 90),
        num_copies=st.sampled_from([1, 3]),
    )
    def test_every_segment_once_in_order_within_budget_and_chunk(
        self,
        algorithm: str,
        prefix_len: int,
        segment_lens: list[int],
        chunk_size: int | None,
        token_budget: int,
        num_copies: int,
    ) -> None:
        found = plan(
            prefix_len,
            segment_lens,
            algorithm,
            chunk_size=chunk_size,
            token_budget=token_budget,
            num_copies=num_copies,
        )
        assert [i for each in found.sequences for i in range(each.first, each.stop)] == list(range(len(segment_lens)))
        assert found.num_unit_tokens == sum(each.num_tokens for each in found.sequences)
        for each in found.sequences:
            num_segments = each.stop - each.first
            assert each.num_tokens == prefix_len + sum(segment_lens[each.first : each.stop])
            assert each.num_tokens <= token_budget or num_segments == 1
            assert not chunk_size or num_segments <= chunk_size
            assert algorithm == "packed" or num_segments == 1


class TestAuto:
    def test_the_request_decides_then_the_engine(self) -> None:
        planner = planner_of(algorithm="packed")
        asked = planner.plan(segments_of(5, [3]), "serial")
        assert (asked.algorithm, asked.reason) == ("serial", "asked for by the request")
        left_open = planner.plan(segments_of(5, [3]))
        assert (left_open.algorithm, left_open.reason) == ("packed", "set for this engine")

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, True),  # on a CPU the items decide
            ({"algorithm": "prefill_extend"}, False),
            ({"algorithm": "packed"}, True),
            ({"kind": "gpu", "bit_equal": False, "joins_prefill": True, "multiple": 256}, False),
            ({"kind": "gpu", "bit_equal": False, "joins_prefill": True, "multiple": 256, "num_kv_blocks": 1}, True),
            ({"kind": "gpu", "bit_equal": False, "caches_prefixes": True, "algorithm": "serial"}, True),
        ],
    )
    def test_whether_a_request_that_names_none_may_have_sequences(self, options: Any, expected: bool) -> None:
        planner = planner_of(**options)
        assert planner.may_make_sequences == expected
        if not expected:
            plans = [planner.plan(segments_of(prefix_len, [10] * 40)) for prefix_len in range(1, 500, 7)]
            assert {each.algorithm for each in plans} == {"prefill_extend"}

    def test_without_a_prefix_there_is_nothing_to_choose(self) -> None:
        found = plan(0, [3, 3])
        assert found.algorithm == "prefill_extend"
        assert "share no prefix" in found.reason

    def test_the_reason_has_the_estimates(self) -> None:
        reason = plan(900, [100] * 50, token_budget=1000).reason
        assert reason.startswith("static estimate for 900 prefix tokens and 50 segments: prefill_extend ")
        assert ", packed " in reason
        assert ", serial " in reason

    def test_where_all_paths_are_bit_equal_it_may_look_at_the_items(self) -> None:
        """One forward beats two; fifty sequences of one prefix each do not."""
        assert plan(900, [100], token_budget=1000).algorithm == "packed"
        assert plan(900, [100] * 50, token_budget=1000).algorithm == "prefill_extend"

    def test_where_a_prefix_and_its_items_are_one_forward_packing_saves_none(self) -> None:
        assert plan(900, [100], token_budget=1000, joins_prefill=True).algorithm == "prefill_extend"
        assert plan(900, [100] * 50, token_budget=1000, joins_prefill=True).algorithm == "prefill_extend"

    @settings(max_examples=200, deadline=None)
    @given(
        prefix_len=st.integers(1, 40),
        segment_lens=st.lists(st.integers(1, 200), min_size=1, max_size=40),
        token_budget=st.integers(1, 400),
        data=st.data(),
    )
    def test_elsewhere_no_item_moves_the_choice(
        self, prefix_len: int, segment_lens: list[int], token_budget: int, data: st.DataObject
    ) -> None:
        """Neither the number nor the length of items, nor how much of the prefix they read."""
        planner = planner_of(bit_equal=False, kind="gpu", token_budget=token_budget)
        shared = st.lists(st.integers(0, prefix_len), min_size=len(segment_lens), max_size=len(segment_lens))
        found = planner.plan(segments_of(prefix_len, segment_lens, data.draw(shared)))
        base = planner.plan(segments_of(prefix_len, [1]))
        assert (found.algorithm, found.reason) == (base.algorithm, base.reason)
        assert "a nominal request of this query length" in found.reason

    def test_elsewhere_an_item_that_reads_nothing_does_not_move_it_either(self) -> None:
        """A query of one token and an empty item: the item computes that token again and reads no prefix."""
        planner = planner_of(bit_equal=False, kind="gpu")
        alone = planner.plan(segments_of(1, [1], prefix_lens=[0]))
        beside = planner.plan(segments_of(1, [1, 5], prefix_lens=[0, 1]))
        assert (alone.algorithm, alone.needs_prefill) == (beside.algorithm, beside.needs_prefill)

    @pytest.mark.parametrize("bit_equal", [True, False])
    def test_a_prefix_of_a_block_or_more_is_cached_if_prefixes_are(self, bit_equal: bool) -> None:
        """However few items there are now: a later request may have the same prefix."""
        options: dict[str, Any] = {"bit_equal": bit_equal, "token_budget": 1000}
        kept = plan(KV_BLOCK_SIZE, [100], caches_prefixes=True, **options)
        assert (kept.algorithm, kept.reason) == ("prefill_extend", "the prefix is cached for later requests")
        assert "static estimate" in plan(KV_BLOCK_SIZE - 1, [100], caches_prefixes=True, **options).reason
        assert "static estimate" in plan(KV_BLOCK_SIZE, [100], caches_prefixes=False, **options).reason

    def test_the_reason_says_that_a_short_prefix_is_cached_too_if_it_is(self) -> None:
        short = plan(3, [5, 5], caches_prefixes=True, joins_prefill=True)
        assert short.algorithm == "prefill_extend"
        assert short.reason.startswith("static estimate for 3 prefix tokens and 2 segments: prefill_extend ")
        assert short.reason.endswith("; the prefix is cached for later requests")
        assert "cached" not in plan(3, [5, 5], joins_prefill=True).reason

    def test_requests_that_come_again_count(self) -> None:
        """Packed saves a forward now, and prefill_extend most of the tokens of every request that comes again."""
        costs = MeasuredCosts(CostModel(seconds_per_forward=0.04, seconds_per_token=0.001, seconds_per_pair=1e-9))
        options: dict[str, Any] = {"measured": costs, "token_budget": 1000}
        assert plan(100, [10], **options).algorithm in ("packed", "serial")
        assert plan(100, [10], caches_prefixes=True, **options).algorithm == "prefill_extend"

    def test_where_all_paths_are_bit_equal_measured_costs_decide(self) -> None:
        """Two forwards and one copy of the prefix against one forward with a copy for every item."""
        cheap_tokens = MeasuredCosts(CostModel(1.0, 1e-6, 1e-9))
        cheap_forwards = MeasuredCosts(CostModel(1e-6, 1e-3, 1e-9))
        chosen = [
            plan(100, [10] * 3, chunk_size=1, measured=costs).algorithm for costs in (cheap_tokens, cheap_forwards)
        ]
        assert chosen == ["packed", "prefill_extend"]
        cheap_tokens.calibrate([Sample(Work(64, 0), 1.0)])
        assert plan(100, [10] * 3, measured=cheap_tokens).reason.startswith("calibrated estimate for 100 prefix tokens")

    def test_elsewhere_measured_costs_change_nothing(self) -> None:
        """Replicas measure other figures, and must give the same bits."""
        base = plan(100, [10] * 3, bit_equal=False, kind="gpu")
        for costs in (CostModel(1.0, 1e-6, 1e-9), CostModel(1e-6, 1e-3, 1e-9)):
            found = plan(100, [10] * 3, bit_equal=False, kind="gpu", measured=MeasuredCosts(costs))
            assert (found.algorithm, found.reason, found.sequences) == (base.algorithm, base.reason, base.sequences)

    def test_of_estimates_that_tie_the_one_with_fewer_forwards_is_taken(self) -> None:
        """Packed has three tokens more, and one forward instead of two."""
        costs = MeasuredCosts(CostModel(1e-6, 1e-3, 1e-9))
        assert plan(3, [50] * 4, chunk_size=2, measured=costs).algorithm == "packed"
        assert plan(9, [50] * 4, chunk_size=2, measured=costs).algorithm == "prefill_extend", "4 % are no tie"
        assert plan(3, [50] * 4, chunk_size=2, measured=costs, joins_prefill=True).algorithm == "prefill_extend"

    def test_packed_sequences_are_as_long_as_the_time_of_a_step_allows(self) -> None:
        slow = MeasuredCosts(CostModel(0.01, 1e-3, 1e-9))
        found = plan(10, [10] * 200, "packed", measured=slow, step_seconds=0.25)
        assert max(each.num_tokens for each in found.sequences) == 230
        assert max(each.num_tokens for each in plan(10, [10] * 200, "packed", measured=slow).sequences) == 2010

    def test_a_prefix_that_cannot_be_cached_is_estimated_like_any_other(self) -> None:
        found = plan(3 * KV_BLOCK_SIZE, [100], caches_prefixes=True, num_kv_blocks=2)
        assert found.algorithm == "packed"
        assert "static estimate" in found.reason

    def test_the_query_may_move_it(self) -> None:
        chosen = {
            plan(prefix_len, [1], bit_equal=False, kind="gpu", token_budget=1000).algorithm for prefix_len in (1, 900)
        }
        assert chosen == {"packed", "prefill_extend"}


class TestPrefixThatCannotBeCached:
    """A backend with little room for prefixes between forwards: a longer one goes with its items."""

    @pytest.mark.parametrize("algorithm", ["prefill_extend", "auto"])
    def test_packed_is_taken_and_the_reason_says_why(self, algorithm: str) -> None:
        found = plan(897, [100] * 50, algorithm, token_budget=1001, num_kv_blocks=7)
        assert (found.algorithm, found.is_fallback, found.needs_prefill) == ("packed", True, False)
        assert found.reason == "the backend caches prefixes of up to 896 tokens, and this one has 897"

    def test_also_where_the_engine_is_set_to_prefill_extend(self) -> None:
        planner = planner_of(algorithm="prefill_extend", num_kv_blocks=1)
        assert planner.plan(segments_of(129, [3])).algorithm == "packed"
        assert planner.plan(segments_of(128, [3])).algorithm == "prefill_extend"

    @pytest.mark.parametrize("num_kv_blocks", [7, None])
    def test_a_prefix_that_fits_is_cached(self, num_kv_blocks: int | None) -> None:
        found = plan(896, [100] * 50, token_budget=1000, num_kv_blocks=num_kv_blocks)
        assert (found.algorithm, found.is_fallback, found.needs_prefill) == ("prefill_extend", False, True)

    def test_a_dense_mask_is_not_for_rows_that_nobody_asked_for(self) -> None:
        prefix_len = DENSE_MAX_SEQUENCE_LEN
        found = plan(prefix_len, [5], "prefill_extend", mask="dense", token_budget=40_000, num_kv_blocks=7)
        assert (found.algorithm, found.mask, found.mask_note) == ("packed", "segment", None)

    @pytest.mark.parametrize("algorithm", ["serial", "packed"])
    def test_other_algorithms_cache_nothing(self, algorithm: str) -> None:
        found = plan(897, [100] * 50, algorithm, num_kv_blocks=7)
        assert (found.algorithm, found.reason) == (algorithm, "asked for by the request")


class TestMask:
    def test_auto_is_segment_up_to_the_threshold_and_dense_above(self) -> None:
        at = plan(10, [5, 5], "packed", segment_fallback_threshold=20)
        above = plan(10, [5, 5], "packed", segment_fallback_threshold=19)
        assert (at.mask, at.mask_note) == ("segment", None)
        assert above.mask == "dense"
        assert above.mask_note == "a sequence of 20 tokens is above the segment threshold of 19"

    def test_auto_is_segment_again_where_dense_has_its_bound(self) -> None:
        segment_lens = [DENSE_MAX_SEQUENCE_LEN - LONG, 1]
        found = plan(LONG, segment_lens, "packed", segment_fallback_threshold=20, token_budget=40_000)
        assert found.mask == "segment"
        assert found.mask_note is not None
        assert "above the segment threshold of 20, but too long for a dense mask (16384" in found.mask_note

    def test_the_longest_row_decides(self) -> None:
        found = plan(10, [5, 5, 1], "packed", chunk_size=2, segment_fallback_threshold=19)
        assert found.mask == "dense"

    def test_segment_is_segment_at_any_length(self) -> None:
        found = plan(10, [DENSE_MAX_SEQUENCE_LEN], "packed", mask="segment", segment_fallback_threshold=0)
        assert (found.mask, found.mask_note) == ("segment", None)

    def test_dense_up_to_its_bound(self) -> None:
        segment_lens = [DENSE_MAX_SEQUENCE_LEN - LONG - 1, 1]
        found = plan(LONG, segment_lens, "packed", mask="dense", chunk_size=0, token_budget=40_000)
        assert (found.mask, found.mask_note) == ("dense", None)

    @pytest.mark.parametrize("chunk_size", [0, 2, None])
    def test_dense_refuses_above_its_bound_and_says_why(self, chunk_size: int | None) -> None:
        segment_lens = (
            [DENSE_MAX_SEQUENCE_LEN - LONG, 1] if chunk_size is not None else [DENSE_MAX_SEQUENCE_LEN + 1 - LONG]
        )
        with pytest.raises(RequestError) as caught:
            plan(LONG, segment_lens, "packed", mask="dense", chunk_size=chunk_size, token_budget=40_000)
        error = caught.value
        assert (error.code, error.status, error.type) == ("dense_mask_too_large", 400, "invalid_value_error")
        assert error.message.startswith("a dense mask must cover at most 16384 packed tokens (256 MiB), ")
        assert "got a sequence of 16385; use a smaller chunk size, the segment mask or prefill_extend" in error.message

    @pytest.mark.parametrize(("prefix_len", "longest"), [(10, 2048), (3000, 6000), (9000, DENSE_MAX_SEQUENCE_LEN)])
    def test_dense_sequences_stay_short_where_no_chunk_size_is_given(self, prefix_len: int, longest: int) -> None:
        """And never so long that dense would refuse what it had been left to cut."""
        found = plan(prefix_len, [1] * 20_000, "packed", mask="dense", token_budget=65_536)
        assert max(each.num_tokens for each in found.sequences) == longest

    @pytest.mark.parametrize("chunk_size", [0, 100_000])
    def test_a_dense_row_keeps_to_the_token_budget(self, chunk_size: int) -> None:
        found = plan(LONG, [1] * 20_000, "packed", mask="dense", chunk_size=chunk_size, token_budget=16_384)
        assert max(each.num_tokens for each in found.sequences) == 16_384

    def test_the_masks_of_a_forward_together_are_no_larger_than_one_may_be(self) -> None:
        assert plan(10, [5], "packed", mask="dense", token_budget=40_000).token_budget == DENSE_MAX_SEQUENCE_LEN
        assert plan(10, [5], "packed", mask="segment", token_budget=40_000).token_budget == 40_000

    @pytest.mark.parametrize("algorithm", ["serial", "prefill_extend"])
    def test_elsewhere_it_has_no_effect_and_the_note_says_so(self, algorithm: str) -> None:
        assert plan(10, [5], algorithm).mask_note is None
        found = plan(10, [5], algorithm, mask="dense")
        assert (found.mask, found.mask_note) == (None, "the mask option dense has no effect here")

    @pytest.mark.parametrize(
        ("options", "longest"),
        [
            ({}, 0),
            ({"mask": "segment", "segment_fallback_threshold": 0}, 0),
            ({"mask": "dense"}, DENSE_MAX_SEQUENCE_LEN),
            ({"segment_fallback_threshold": DENSE_MAX_SEQUENCE_LEN}, 0),
            ({"segment_fallback_threshold": DENSE_MAX_SEQUENCE_LEN - 1}, DENSE_MAX_SEQUENCE_LEN),
        ],
    )
    def test_whether_any_row_can_be_dense_is_known_beforehand(self, options: dict[str, Any], longest: int) -> None:
        assert max_dense_len(PlanOptions(**options)) == longest

    def test_items_without_a_prefix_need_none(self) -> None:
        found = plan(0, [DENSE_MAX_SEQUENCE_LEN + 1], "packed", mask="dense")
        assert (found.mask, found.mask_note) == (None, "the mask option dense has no effect here")


# Filling sequences; `tests/engine/test_steps.py` has the forwards


TAIL_LENS = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def test_a_sequence_is_closed_by_the_chunk_size() -> None:
    sequences = fill_sequences([1, 2, 3, 4, 5], 10, chunk_size=2, max_len=100)
    assert sequences == [PackedSequence(0, 2, 13), PackedSequence(2, 4, 17), PackedSequence(4, 5, 15)]


def test_a_sequence_is_closed_by_its_length_prefix_included() -> None:
    assert fill_sequences([5, 5, 5], 10, chunk_size=0, max_len=20) == [
        PackedSequence(0, 2, 20),
        PackedSequence(2, 3, 15),
    ]
    assert fill_sequences([5, 5, 5], 10, chunk_size=0, max_len=19) == [
        PackedSequence(0, 1, 15),
        PackedSequence(1, 2, 15),
        PackedSequence(2, 3, 15),
    ]


def test_a_segment_longer_than_a_sequence_is_alone() -> None:
    assert fill_sequences([1, 50, 1], 0, chunk_size=0, max_len=10) == [
        PackedSequence(0, 1, 1),
        PackedSequence(1, 2, 50),
        PackedSequence(2, 3, 1),
    ]


@settings(max_examples=300, deadline=None)
@given(
    segment_lens=TAIL_LENS,
    prefix_len=st.integers(0, 20),
    chunk_size=st.integers(0, 8),
    max_len=st.integers(1, 60),
)
def test_sequences_hold_every_segment_once_in_order_within_bounds_and_no_fewer_than_fit(
    segment_lens: list[int], prefix_len: int, chunk_size: int, max_len: int
) -> None:
    sequences = fill_sequences(segment_lens, prefix_len, chunk_size=chunk_size, max_len=max_len)
    assert [i for sequence in sequences for i in range(sequence.first, sequence.stop)] == list(range(len(segment_lens)))
    for sequence in sequences:
        assert sequence.num_tokens == prefix_len + sum(segment_lens[sequence.first : sequence.stop])
        assert sequence.num_tokens <= max_len or sequence.stop - sequence.first == 1
        assert not chunk_size or sequence.stop - sequence.first <= chunk_size
    for sequence, after in pairwise(sequences):
        is_full = sequence.stop - sequence.first == chunk_size
        assert is_full or sequence.num_tokens + segment_lens[after.first] > max_len


# Options of the plan: what is legal, and what a device settles


def info(kind: Literal["cpu", "gpu", "tpu"]) -> BackendInfo:
    return BackendInfo("fake", kind, kind, "float32", True, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "fast"}, "algorithm must be auto, serial, packed or prefill_extend, got 'fast'"),
        ({"mask": "sparse"}, "mask must be auto, dense or segment, got 'sparse'"),
        ({"chunk_size": -1}, "chunk_size must be a whole number of 0 or more items, got -1"),
        ({"chunk_size": "3"}, "chunk_size must be a whole number of 0 or more items, got '3'"),
        ({"token_budget": 0}, "token_budget must be a whole number of at least 1 token, got 0"),
        ({"token_budget": 1.5}, "token_budget must be a whole number of at least 1 token, got 1.5"),
        (
            {"segment_fallback_threshold": -1},
            "segment_fallback_threshold must be a whole number of 0 or more tokens, got -1",
        ),
    ],
)
def test_an_illegal_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        PlanOptions(**options)
    name = next(iter(options))
    assert caught.value.message == message
    assert (caught.value.code, caught.value.param) == (f"invalid_{name}", name)


def test_the_smallest_legal_values() -> None:
    options = PlanOptions(chunk_size=0, token_budget=1, segment_fallback_threshold=0)
    assert options.resolve(info("cpu")) is options


@pytest.mark.parametrize("budget", [16_384, 65_536])
def test_the_budget_is_the_backends_unless_one_is_given(budget: int) -> None:
    backend = replace(info("gpu"), token_budget=budget)
    resolved = PlanOptions(chunk_size=3).resolve(backend)
    assert (resolved.token_budget, resolved.chunk_size) == (budget, 3)
    assert PlanOptions(token_budget=7).resolve(backend).token_budget == 7
