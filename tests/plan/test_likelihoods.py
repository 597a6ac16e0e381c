"""Log-likelihoods as segments: every asked-for token is read once after its own context, and prefixes are shared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.likelihoods import SHORT_BLOCK_SIZE, LikelihoodPlan, TokenSequence, plan_likelihoods
from prefixwise.plan.long_items import prefix_block_starts

RNG = np.random.default_rng(0)
REST_SIZES = (KV_BLOCK_SIZE, SHORT_BLOCK_SIZE)


def sequence(num_tokens: int, first: int = 1, *, begin: Sequence[int] = (), reads_next: bool = False) -> TokenSequence:
    tokens = [*begin, *RNG.integers(0, 1000, num_tokens - len(begin))]
    return TokenSequence(np.array(tokens, np.int32), first, reads_next)


def readings(plan: LikelihoodPlan) -> list[tuple[tuple[int, ...], int]]:
    """Of every row: the whole context that it follows, and the token that it reads."""
    found = []
    for group in plan.groups:
        for row, offset in enumerate(group.score_offsets.tolist()):
            segment = int(np.searchsorted(group.rows_of_segment, row, side="right")) - 1
            start = int(group.tokens.starts[segment])
            before = group.prefix_ids[: group.prefix_lens[segment]]
            context = (*before.tolist(), *group.tokens.flat[start : offset + 1].tolist())
            found.append((context, int(group.label_ids[row, 0])))
    return found


@pytest.mark.parametrize("first", [1, 5, 130, 250])
@pytest.mark.parametrize("num_tokens", [256, 257, 258, 300, 600])
@pytest.mark.parametrize("reads_next", [False, True])
@pytest.mark.parametrize("rest_size", REST_SIZES)
def test_every_token_is_read_after_those_before_it(
    num_tokens: int, first: int, reads_next: bool, rest_size: int
) -> None:
    asked = sequence(num_tokens, first, reads_next=reads_next)
    plan = plan_likelihoods([asked], rest_size=rest_size)
    rows, ids = readings(plan), asked.token_ids.tolist()
    expected = [(tuple(ids[:place]), ids[place]) for place in range(first, num_tokens)]
    expected += [(tuple(ids), 0)] if reads_next else []
    assert [rows[row] for row in plan.rows[0].tolist()] == expected
    assert all(group.tokens.lens.max() <= KV_BLOCK_SIZE for group in plan.groups)
    assert [group.block_starts for group in plan.groups] == [
        tuple(prefix_block_starts(len(group.prefix_ids), rest_size)) for group in plan.groups
    ]


def test_continuations_of_one_context_share_it() -> None:
    context = sequence(300).token_ids.tolist()
    plan = plan_likelihoods([sequence(300 + size, 300, begin=context) for size in (1, 3, 3)])
    (group,) = plan.groups
    assert group.prefix_ids.tolist() == context[:-1]
    assert group.tokens.lens.tolist() == [1, 3, 3]


def test_prompts_share_whole_blocks() -> None:
    shared = sequence(2 * KV_BLOCK_SIZE).token_ids.tolist()
    prompts = [sequence(300, begin=shared), sequence(290, begin=shared)]
    plan = plan_likelihoods(prompts)
    assert sum(len(group.tokens.flat) for group in plan.groups) == 2 * KV_BLOCK_SIZE + 43 + 33
    rows = readings(plan)
    for prompt, found in zip(prompts, plan.rows, strict=True):
        ids = prompt.token_ids.tolist()
        expected = [(tuple(ids[:place]), ids[place]) for place in range(1, len(ids))]
        assert [rows[row] for row in found.tolist()] == expected


@pytest.mark.parametrize(
    ("num_kv_blocks", "num_shared"), [(100, 2 * KV_BLOCK_SIZE + SHORT_BLOCK_SIZE), (4, 2 * KV_BLOCK_SIZE)]
)
def test_short_blocks_share_more_where_the_cache_has_room_for_them(num_kv_blocks: int, num_shared: int) -> None:
    shared = sequence(2 * KV_BLOCK_SIZE + 40).token_ids.tolist()
    prompts = [sequence(341, begin=shared), sequence(330, begin=shared)]
    plan = plan_likelihoods(prompts, rest_size=SHORT_BLOCK_SIZE, num_kv_blocks=num_kv_blocks)
    computed = sum(len(group.tokens.flat) for group in plan.groups)
    assert computed == num_shared + (340 - num_shared) + (329 - num_shared)
    rows = readings(plan)
    for prompt, found in zip(prompts, plan.rows, strict=True):
        assert [rows[row][1] for row in found.tolist()] == prompt.token_ids.tolist()[1:]


def test_the_first_group_with_a_block_reads_its_rows() -> None:
    """Groups run in this order: so a block and its rows are computed together, whichever prompt came first."""
    shared = [7] * 2 * KV_BLOCK_SIZE
    prompts = [sequence(300, begin=[*shared, 900]), sequence(300, begin=[*shared, 1])]
    plan = plan_likelihoods(prompts)
    assert [group.prefix_lens.tolist() for group in plan.groups] == [[0, KV_BLOCK_SIZE, *[2 * KV_BLOCK_SIZE] * 2]]
    short = plan_likelihoods(prompts, rest_size=SHORT_BLOCK_SIZE)
    first, second = short.groups
    assert first.segment_of_block is not None
    assert first.segment_of_block.tolist() == [0, 1, 2]
    assert second.segment_of_block is not None
    assert second.segment_of_block.tolist() == [-1, -1, 0]
    assert second.prefix_ids[2 * KV_BLOCK_SIZE] == 900


def test_equal_sequences_are_computed_once() -> None:
    one = sequence(20)
    plan = plan_likelihoods([one, TokenSequence(one.token_ids.copy(), 1), one])
    assert plan.num_rows == 19
    assert len({tuple(rows.tolist()) for rows in plan.rows}) == 1


@pytest.mark.parametrize("rest_size", REST_SIZES)
@pytest.mark.parametrize("size", [KV_BLOCK_SIZE + 1, KV_BLOCK_SIZE, 100, 2 * KV_BLOCK_SIZE + 17])
@pytest.mark.parametrize("first", [1, 5])
def test_a_neighbour_never_changes_the_segments_of_a_sequence(first: int, size: int, rest_size: int) -> None:
    """The same first blocks: one sequence ends, the other goes on."""
    ids = sequence(300).token_ids
    short, long = TokenSequence(ids[:size], first), TokenSequence(ids, 5)
    alone = plan_likelihoods([short], rest_size=rest_size)
    together = plan_likelihoods([long, short, TokenSequence(ids[:-1], 1)], rest_size=rest_size)

    def described(plan: LikelihoodPlan, rows: Sequence[int]) -> list[tuple[object, ...]]:
        places: list[tuple[object, ...]] = []
        bounds = np.cumsum([0, *(len(group.score_offsets) for group in plan.groups)])
        for row in rows:
            number = int(np.searchsorted(bounds, row, side="right")) - 1
            group = plan.groups[number]
            segment = int(np.searchsorted(group.rows_of_segment, row - bounds[number], side="right")) - 1
            read = int(group.prefix_lens[segment])
            # The block in which the segment begins may be longer in another prefix: its bits could differ.
            starts = group.block_starts or (0,)
            blocks = tuple(block for block in pairwise(starts) if block[0] < read)
            places.append((read, blocks, tuple(group.tokens[segment].tolist())))
        return places

    assert described(together, together.rows[1].tolist()) == described(alone, alone.rows[0].tolist())


def test_nothing_is_read_of_a_lone_token() -> None:
    plan = plan_likelihoods([sequence(1), sequence(4, 4)])
    assert plan.groups == ()
    assert [rows.tolist() for rows in plan.rows] == [[], []]
