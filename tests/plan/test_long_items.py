"""Long items: where they are cut, and that a request's branches compute each of its contexts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.algorithms import ScorePlan
from prefixwise.plan.branches import BranchPlan, BranchPlans
from prefixwise.plan.long_items import ItemCut
from prefixwise.plan.segments import SplitItems, lay_out_segments, plan_labels
from tests.plan.planning import planner_of

B = KV_BLOCK_SIZE
LABELS = (((1,),), ((1,), (2, 3)), ((4, 5), (6, 7, 8), (9,)))


def split_of(prefix_len: int, shared: list[int], item_lens: list[int]) -> SplitItems:
    """No token occurs twice, so that one in a wrong place shows."""
    prefix = np.arange(prefix_len, dtype=np.int32)
    starts = np.cumsum([prefix_len, *item_lens])
    items = [list(range(begin, end)) for begin, end in pairwise(starts.tolist())]
    return SplitItems(prefix, np.array(shared, np.int64), Ragged.from_sequences(items))


def plan_of(split: SplitItems, labels: tuple[tuple[int, ...], ...] = LABELS[0], **options: Any) -> ScorePlan:
    algorithm = options.pop("algorithm", "prefill_extend")
    return planner_of(**options).plan(lay_out_segments(split, plan_labels(labels)), algorithm)


def branches_of(plan: ScorePlan) -> BranchPlans:
    cached = plan.segments.prefix_ids if plan.needs_prefill else plan.segments.prefix_ids[:0]
    return BranchPlans(plan, cached)


def contexts(plan: ScorePlan) -> dict[int, Int32Array]:
    """The tokens before each row of logits, the row's own last."""
    segments = plan.segments
    found = {}
    for number, tokens in enumerate(segments.tokens):
        whole = np.concatenate([segments.prefix_ids[: segments.prefix_lens[number]], tokens])
        rows = range(*segments.rows_of_segment[number : number + 2].tolist())
        for row in rows:
            after = int(segments.score_offsets[row] - segments.tokens.starts[number])
            found[row] = whole[: int(segments.prefix_lens[number]) + after + 1]
    return found


def contexts_of_branch(branch: BranchPlan) -> dict[int, Int32Array]:
    if branch.scoring is None:
        return {}
    found = contexts(branch.scoring)
    return found if branch.rows is None else {int(branch.rows[row]): context for row, context in found.items()}


requests = st.integers(0, 400).flatmap(
    lambda prefix_len: st.tuples(
        st.just(prefix_len),
        st.lists(
            st.tuples(st.one_of(st.just(prefix_len), st.integers(0, prefix_len)), st.integers(1, 700)),
            min_size=1,
            max_size=8,
        ),
        st.sampled_from(LABELS),
    )
)


@settings(max_examples=150, deadline=None)
@given(
    request=requests,
    algorithm=st.sampled_from(["serial", "packed", "prefill_extend"]),
    max_whole_item=st.sampled_from([B, 200, 256, 512]),
    is_ragged=st.booleans(),
    num_kv_blocks=st.sampled_from([2, 6, 1000]),
)
def test_the_branches_have_every_row_once_with_its_context(
    request: tuple[int, list[tuple[int, int]], tuple[tuple[int, ...], ...]],
    algorithm: str,
    max_whole_item: int,
    is_ragged: bool,
    num_kv_blocks: int,
) -> None:
    prefix_len, items, labels = request
    split = split_of(prefix_len, [shared for shared, _ in items], [length for _, length in items])
    options = {"max_whole_item": max_whole_item, "reads_short_blocks": is_ragged, "num_kv_blocks": num_kv_blocks}
    plan = plan_of(split, labels, algorithm=algorithm, **options)
    branches = branches_of(plan)
    made = [branches[index] for index in range(len(branches))]
    found: dict[int, Int32Array] = {}
    for branch in made:
        of_branch = contexts_of_branch(branch)
        assert not found.keys() & of_branch.keys()
        found |= of_branch
    expected = contexts(plan)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[row], expected[row]) for row in expected)
    num_query_tokens = sum(branch.block_starts[branch.num_query_blocks] for branch in made[1:])
    assert branches.num_tokens == sum(branch.num_tokens for branch in made) - num_query_tokens
    assert branches.max_unit_tokens == max(branch.max_unit_tokens for branch in made)
    for branch in made:
        lens = np.diff(branch.block_starts)
        assert len(lens) <= num_kv_blocks
        assert ((lens > 0) & (lens <= B)).all() or not branch.num_blocks
        assert is_ragged or (lens[:-1] == B).all()
        assert branch.block_starts[-1] == len(branch.prefix_ids)
        if branch.num_query_blocks:
            shared = branch.block_starts[branch.num_query_blocks]
            assert np.array_equal(branch.prefix_ids[:shared], split.prefix_ids[:shared])
            assert list(branch.block_starts[: branch.num_query_blocks]) == list(range(0, shared, B))


@settings(max_examples=100, deadline=None)
@given(
    shared=st.integers(0, 5000), item_len=st.integers(B, 9000), query_len=st.integers(0, 5000), is_ragged=st.booleans()
)
def test_a_tail_has_up_to_a_block_and_nothing_is_cut_inside_of_a_query_block(
    shared: int, item_len: int, query_len: int, is_ragged: bool
) -> None:
    cut = ItemCut(B, is_ragged)
    head = int(cut.head_lens(np.array([shared]), np.array([item_len]))[0])
    assert 1 <= shared + item_len - head <= B
    starts = cut.block_starts(shared, head)
    assert len(starts) - 1 == int(cut.num_blocks(np.array([shared]), np.array([head]))[0])
    assert int(cut.query_tokens(np.array([shared]), max(shared, query_len))[0]) in starts


class TestLongItems:
    def test_aligned_blocks_compute_the_end_of_the_query_again(self) -> None:
        plan = plan_of(split_of(200, [200, 200], [10, 700]), max_whole_item=512)
        trunk, item = (branches_of(plan)[index] for index in range(2))
        assert (plan.long_items, trunk.block_starts, trunk.num_units) == ((1,), [0, 128, 200], 1)
        assert item.block_starts == [0, 128, 256, 384, 512, 640, 768, 896]
        assert (item.num_query_blocks, item.num_units, item.max_unit_tokens) == (1, 1, 4)

    def test_ragged_blocks_begin_behind_the_query(self) -> None:
        plan = plan_of(split_of(200, [200, 200], [10, 700]), max_whole_item=512, reads_short_blocks=True)
        item = branches_of(plan)[1]
        assert item.block_starts == [0, 128, 200, 328, 456, 584, 712, 840]
        assert (item.num_query_blocks, item.max_unit_tokens) == (2, 60)

    def test_an_item_that_reads_less_of_the_query_shares_its_full_blocks(self) -> None:
        plan = plan_of(split_of(300, [290], [700]), max_whole_item=512, reads_short_blocks=True)
        trunk, item = (branches_of(plan)[index] for index in range(2))
        assert (list(trunk.block_starts), trunk.num_units) == ([0, 128, 256], 0), "what the long item shares of it"
        assert (list(item.block_starts[:4]), item.num_query_blocks) == ([0, 128, 256, 290], 2)

    @pytest.mark.parametrize("algorithm", ["serial", "packed"])
    def test_serial_and_packed_compute_all_of_a_long_item_by_itself(self, algorithm: str) -> None:
        plan = plan_of(split_of(200, [200] * 3, [10, 700, 20]), max_whole_item=512, algorithm=algorithm)
        branches = branches_of(plan)
        assert len(branches) == 2
        assert (branches[0].num_blocks, branches[0].rows is not None) == (0, True)
        assert (branches[1].num_blocks, branches[1].num_query_blocks) == (7, 0)
        assert branches.num_tokens == 900 + sum(each.num_tokens for each in plan.sequences)

    def test_one_that_does_not_fit_in_the_kv_cache_is_computed_in_one_piece(self) -> None:
        split = split_of(200, [200, 200], [700, 3000])
        assert plan_of(split, max_whole_item=512, num_kv_blocks=20).long_items == (0,)

    def test_stems_share_the_head(self) -> None:
        plan = plan_of(split_of(100, [100], [600]), LABELS[2], max_whole_item=512)
        (item,) = (branches_of(plan)[index] for index in range(len(branches_of(plan))))
        assert item.scoring is not None
        assert item.scoring.segments.tokens.lens.tolist() == [600 + 100 - 640 + stem for stem in (1, 2)]


class TestLongPrefixes:
    def in_pieces(self, prefix_len: int, algorithm: str = "packed", **options: Any) -> bool:
        split = split_of(prefix_len, [prefix_len] * 4, [10] * 4)
        return plan_of(split, algorithm=algorithm, max_whole_item=512, **options).splits_sequences

    @pytest.mark.parametrize("algorithm", ["serial", "packed"])
    def test_their_sequences_have_kv_blocks_of_their_own(self, algorithm: str) -> None:
        plan = plan_of(split_of(600, [600] * 4, [10] * 4), algorithm=algorithm, max_whole_item=512, chunk_size=2)
        branches = branches_of(plan)
        assert len(branches) == {"serial": 4, "packed": 2}[algorithm]
        for index in range(len(branches)):
            assert (branches[index].num_blocks, branches[index].num_query_blocks) == (5, 0)

    def test_the_query_decides(self) -> None:
        assert [self.in_pieces(length) for length in (512, 513)] == [False, True]
        assert not self.in_pieces(513, "prefill_extend")

    def test_where_bits_differ_prefixes_are_whole_up_to_four_times_the_length_of_an_item(self) -> None:
        assert [self.in_pieces(length, bit_equal=False) for length in (2048, 2049)] == [False, True]

    def test_not_behind_a_dense_mask_nor_beyond_the_kv_cache(self) -> None:
        assert not self.in_pieces(600, mask="dense")
        assert not self.in_pieces(600, num_kv_blocks=4)
