"""Choosing the algorithm and the mask, and what a whole plan looks like."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from itemwise.contract.errors import RequestError
from itemwise.plan.algorithms import ScorePlan
from itemwise.plan.options import DENSE_MAX_ROW_LEN
from tests.plan.planning import planner_of, segments_of

ALGORITHMS = ("serial", "packed", "prefill_extend")
MANY = [10] * 500


def plan(prefix_len: int, tail_lens: list[int], algorithm: str = "auto", **options: Any) -> ScorePlan:
    return planner_of(**options).plan(segments_of(prefix_len, tail_lens), algorithm)


def rows_of(found: ScorePlan) -> list[int]:
    return [len(batch.row_starts) - 1 for batch in found.batches]


class TestLayouts:
    def test_packed_chunks_are_rows_side_by_side(self) -> None:
        """Rows of 100 + 32 * 10 tokens, the last of 100 + 20 * 10: two fit a budget of 1,000."""
        found = plan(100, MANY, "packed", chunk_size=32, token_budget=1000)
        assert rows_of(found) == [2] * 8
        assert [batch.num_tokens for batch in found.batches] == [840] * 7 + [420 + 300]

    def test_packed_without_a_chunk_size_fills_the_budget(self) -> None:
        found = plan(100, MANY, "packed", chunk_size=0, token_budget=1000)
        assert rows_of(found) == [1] * 6
        assert [batch.stop - batch.first for batch in found.batches] == [90] * 5 + [50]

    def test_packed_has_a_row_for_each_copy_of_the_model(self) -> None:
        """Copies share out whole rows; a chunk size goes before that."""
        found = plan(100, MANY, "packed", num_copies=4)
        assert [stop - first for batch in found.batches for first, stop in pairwise(batch.row_starts)] == [125] * 4
        chunked = plan(100, MANY, "packed", num_copies=4, chunk_size=100)
        assert sum(rows_of(chunked)) == 5

    def test_serial_is_a_row_per_item(self) -> None:
        found = plan(100, MANY, "serial", chunk_size=32, token_budget=1000)
        assert rows_of(found) == [9] * 55 + [5]

    def test_the_chunk_size_bounds_a_serial_forward_too(self) -> None:
        assert rows_of(plan(100, MANY, "serial", chunk_size=32)) == [32] * 15 + [20]

    def test_prefill_extend_has_tails_only(self) -> None:
        found = plan(100, MANY, "prefill_extend", token_budget=1000)
        assert [batch.num_tokens for batch in found.batches] == [1000] * 5
        assert found.needs_prefill
        chunked = plan(100, MANY, "prefill_extend", chunk_size=32, token_budget=1000)
        assert [batch.stop - batch.first for batch in chunked.batches] == [32] * 15 + [20]

    def test_without_a_prefix_nothing_is_prefilled(self) -> None:
        assert not plan(0, [3, 3], "prefill_extend").needs_prefill
        assert not plan(5, [3, 3], "packed").needs_prefill

    def test_forwards_are_padded_to_the_multiple_of_the_device(self) -> None:
        (batch,) = plan(100, [10, 20], "packed", multiple=256).batches
        assert (batch.num_tokens, batch.bucket) == (130, 256)

    def test_or_to_one_of_the_sizes_that_a_backend_has_programs_for(self) -> None:
        found = plan(100, [10] * 80, "packed", chunk_size=40, token_budget=600, buckets=(256, 512, 1024))
        assert [(batch.num_tokens, batch.bucket) for batch in found.batches] == [(500, 512), (500, 512)]
        (batch,) = plan(100, [500], "packed", buckets=(256, 512, 1024)).batches
        assert (batch.num_tokens, batch.bucket) == (600, 1024)

    @settings(max_examples=300, deadline=None)
    @given(
        algorithm=st.sampled_from(ALGORITHMS),
        prefix_len=st.integers(0, 20),
        tail_lens=st.lists(st.integers(1, 20), min_size=1, max_size=30),
        chunk_size=st.none() | st.integers(0, 6),
        token_budget=st.integers(1, 90),
        multiple=st.sampled_from([1, 8]),
    )
    def test_every_segment_once_in_order_within_budget_chunk_and_bucket(
        self,
        algorithm: str,
        prefix_len: int,
        tail_lens: list[int],
        chunk_size: int | None,
        token_budget: int,
        multiple: int,
    ) -> None:
        found = plan(
            prefix_len,
            tail_lens,
            algorithm,
            chunk_size=chunk_size,
            token_budget=token_budget,
            multiple=multiple,
        )
        segments = [i for batch in found.batches for i in range(batch.first, batch.stop)]
        assert segments == list(range(len(tail_lens)))
        row_prefix = 0 if algorithm == "prefill_extend" else prefix_len
        for batch in found.batches:
            num_rows = len(batch.row_starts) - 1
            num_segments = batch.stop - batch.first
            assert batch.num_tokens == num_rows * row_prefix + sum(tail_lens[batch.first : batch.stop])
            assert batch.num_tokens <= token_budget or num_segments == 1
            assert 0 <= batch.bucket - batch.num_tokens < multiple
            assert batch.bucket % multiple == 0
            if algorithm == "serial":
                assert num_rows == num_segments
            bounded = [stop - first for first, stop in pairwise(batch.row_starts)]
            bounded = bounded if algorithm == "packed" else [num_segments]
            assert not chunk_size or max(bounded) <= chunk_size


class TestAuto:
    def test_the_request_decides_then_the_engine(self) -> None:
        planner = planner_of(algorithm="packed")
        asked = planner.plan(segments_of(5, [3]), "serial")
        assert (asked.algorithm, asked.reason) == ("serial", "asked for by the request")
        left_open = planner.plan(segments_of(5, [3]))
        assert (left_open.algorithm, left_open.reason) == ("packed", "set for this engine")

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
        """One forward beats two; fifty rows of one prefix each do not."""
        assert plan(900, [100], token_budget=1000).algorithm == "packed"
        assert plan(900, [100] * 50, token_budget=1000).algorithm == "prefill_extend"

    @settings(max_examples=200, deadline=None)
    @given(
        prefix_len=st.integers(1, 40),
        tail_lens=st.lists(st.integers(1, 200), min_size=1, max_size=40),
        token_budget=st.integers(1, 400),
        data=st.data(),
    )
    def test_elsewhere_no_item_moves_the_choice(
        self, prefix_len: int, tail_lens: list[int], token_budget: int, data: st.DataObject
    ) -> None:
        """Neither the number nor the length of items, nor how much of the prefix they read."""
        planner = planner_of(bit_equal=False, kind="gpu", token_budget=token_budget)
        shared = st.lists(st.integers(0, prefix_len), min_size=len(tail_lens), max_size=len(tail_lens))
        found = planner.plan(segments_of(prefix_len, tail_lens, data.draw(shared)))
        base = planner.plan(segments_of(prefix_len, [1]))
        assert (found.algorithm, found.reason) == (base.algorithm, base.reason)
        assert "a nominal request of this query length" in found.reason

    def test_elsewhere_an_item_that_reads_nothing_does_not_move_it_either(self) -> None:
        """A query of one token and an empty item: the item computes that token again and reads no prefix."""
        planner = planner_of(bit_equal=False, kind="gpu")
        alone = planner.plan(segments_of(1, [1], prefix_lens=[0]))
        beside = planner.plan(segments_of(1, [1, 5], prefix_lens=[0, 1]))
        assert (alone.algorithm, alone.needs_prefill) == (beside.algorithm, beside.needs_prefill)

    def test_the_query_may_move_it(self) -> None:
        chosen = {
            plan(prefix_len, [1], bit_equal=False, kind="gpu", token_budget=1000).algorithm for prefix_len in (1, 900)
        }
        assert chosen == {"packed", "prefill_extend"}


class TestPrefixThatCannotBeKept:
    """A backend with little room for prefixes between forwards: a longer one goes with its items."""

    @pytest.mark.parametrize("algorithm", ["prefill_extend", "auto"])
    def test_packed_is_taken_and_the_reason_says_why(self, algorithm: str) -> None:
        found = plan(901, [100] * 50, algorithm, token_budget=1001, max_prefix_len=900)
        assert (found.algorithm, found.is_fallback, found.needs_prefill) == ("packed", True, False)
        assert found.reason == "the backend keeps prefixes of up to 900 tokens, and this one has 901"

    def test_also_where_the_engine_is_set_to_prefill_extend(self) -> None:
        planner = planner_of(algorithm="prefill_extend", max_prefix_len=4)
        assert planner.plan(segments_of(5, [3])).algorithm == "packed"
        assert planner.plan(segments_of(4, [3])).algorithm == "prefill_extend"

    @pytest.mark.parametrize("max_prefix_len", [900, None])
    def test_a_prefix_that_fits_is_kept(self, max_prefix_len: int | None) -> None:
        found = plan(900, [100] * 50, token_budget=1000, max_prefix_len=max_prefix_len)
        assert (found.algorithm, found.is_fallback, found.needs_prefill) == ("prefill_extend", False, True)

    def test_a_dense_mask_is_not_for_rows_that_nobody_asked_for(self) -> None:
        prefix_len = DENSE_MAX_ROW_LEN
        found = plan(prefix_len, [5], "prefill_extend", mask="dense", token_budget=40_000, max_prefix_len=900)
        assert (found.algorithm, found.mask, found.mask_note) == ("packed", "segment", None)

    @pytest.mark.parametrize("algorithm", ["serial", "packed"])
    def test_other_algorithms_keep_nothing(self, algorithm: str) -> None:
        found = plan(901, [100] * 50, algorithm, max_prefix_len=900)
        assert (found.algorithm, found.reason) == (algorithm, "asked for by the request")


class TestMask:
    def test_auto_is_segment_up_to_the_threshold_and_dense_above(self) -> None:
        at = plan(10, [5, 5], "packed", segment_fallback_threshold=20)
        above = plan(10, [5, 5], "packed", segment_fallback_threshold=19)
        assert (at.mask, at.mask_note) == ("segment", None)
        assert above.mask == "dense"
        assert above.mask_note == "a row of 20 tokens is above the segment threshold of 19"

    def test_auto_is_segment_again_where_dense_has_its_bound(self) -> None:
        tail_lens = [DENSE_MAX_ROW_LEN - 10, 1]
        found = plan(10, tail_lens, "packed", segment_fallback_threshold=20, token_budget=40_000)
        assert found.mask == "segment"
        assert found.mask_note is not None
        assert "above the segment threshold of 20, but too long for a dense mask (16384" in found.mask_note

    def test_the_longest_row_decides(self) -> None:
        found = plan(10, [5, 5, 1], "packed", chunk_size=2, segment_fallback_threshold=19)
        assert found.mask == "dense"

    def test_segment_is_segment_at_any_length(self) -> None:
        found = plan(10, [DENSE_MAX_ROW_LEN], "packed", mask="segment", segment_fallback_threshold=0)
        assert (found.mask, found.mask_note) == ("segment", None)

    def test_dense_up_to_its_bound(self) -> None:
        tail_lens = [DENSE_MAX_ROW_LEN - 11, 1]
        found = plan(10, tail_lens, "packed", mask="dense", chunk_size=0, token_budget=40_000)
        assert (found.mask, found.mask_note) == ("dense", None)

    @pytest.mark.parametrize("chunk_size", [0, 2, None])
    def test_dense_refuses_above_its_bound_and_says_why(self, chunk_size: int | None) -> None:
        tail_lens = [DENSE_MAX_ROW_LEN - 10, 1] if chunk_size is not None else [DENSE_MAX_ROW_LEN - 9]
        with pytest.raises(RequestError) as caught:
            plan(10, tail_lens, "packed", mask="dense", chunk_size=chunk_size, token_budget=40_000)
        error = caught.value
        assert (error.code, error.status, error.type) == ("dense_mask_too_large", 400, "invalid_value_error")
        assert error.message.startswith("a dense mask must cover at most 16384 packed tokens (256 MiB), ")
        assert "got a row of 16385; use a smaller chunk size, the segment mask or prefill_extend" in error.message

    @pytest.mark.parametrize(("prefix_len", "longest"), [(10, 2048), (3000, 6000), (9000, DENSE_MAX_ROW_LEN)])
    def test_dense_rows_are_kept_short_where_no_chunk_size_is_given(self, prefix_len: int, longest: int) -> None:
        """And never so long that dense would refuse what it had been left to cut."""
        found = plan(prefix_len, [1] * 20_000, "packed", mask="dense", token_budget=65_536)
        row_lens = [prefix_len + stop - first for batch in found.batches for first, stop in pairwise(batch.row_starts)]
        assert max(row_lens) == longest

    @pytest.mark.parametrize("chunk_size", [0, 100_000])
    def test_a_dense_row_keeps_to_the_token_budget(self, chunk_size: int) -> None:
        found = plan(10, [1] * 20_000, "packed", mask="dense", chunk_size=chunk_size, token_budget=16_384)
        assert max(batch.num_tokens for batch in found.batches) == 16_384

    @pytest.mark.parametrize("algorithm", ["serial", "prefill_extend"])
    def test_elsewhere_it_has_no_effect_and_the_note_says_so(self, algorithm: str) -> None:
        assert plan(10, [5], algorithm).mask_note is None
        found = plan(10, [5], algorithm, mask="dense")
        assert (found.mask, found.mask_note) == (None, "the mask option dense has no effect here")

    def test_items_without_a_prefix_need_none(self) -> None:
        found = plan(0, [DENSE_MAX_ROW_LEN + 1], "packed", mask="dense")
        assert (found.mask, found.mask_note) == (None, "the mask option dense has no effect here")
