"""Filling steps from live requests, without a thread: who gets how much of the next one, and in which forwards."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.backends.fake import fake_logits
from prefixwise.engine.admission import Admission
from prefixwise.engine.health import EngineHealth
from prefixwise.engine.live_requests import LiveRequests
from prefixwise.engine.loras import LoadedLora
from prefixwise.engine.prefix_cache import Pins
from prefixwise.engine.request_state import RequestState, ScoringTask
from prefixwise.engine.stats import Counters
from prefixwise.engine.step_filler import MANY_LABELS, MAX_COMPARED, MAX_SKIPPED
from prefixwise.forward.batch import KV_BLOCK_SIZE, Layout
from tests.engine.step_runner import (
    SHARE,
    STEP,
    StepRunner,
    check,
    forward_of,
    kind_of,
    prefix_of,
    state_of,
    tokens_of,
    trunk_of,
)


def live_requests(runner: StepRunner, *states: RequestState) -> LiveRequests:
    """They are queued and received."""
    admission, health = Admission(1 << 20, STEP), EngineHealth()
    live = LiveRequests(runner.cache, Pins(runner.cache, 1), admission, health, Counters(), threading.Event(), 0)
    admission.admit(states)
    for state in states:
        live.add(state)
    return live


class TestShares:
    def test_a_request_alone_gets_all_of_the_step(self) -> None:
        big = state_of(0, [10] * 500)
        assert tokens_of(StepRunner().run(big), big) == STEP // 10 * 10

    def test_the_oldest_comes_first(self) -> None:
        states = [state_of(0, [10] * 3) for _ in range(4)]
        assert forward_of(StepRunner().run(*states), "extend").requests == states

    def test_a_large_request_leaves_room_for_a_small_one_in_the_very_next_step(self) -> None:
        runner, big, small = StepRunner(), state_of(100, [10] * 5000), state_of(100, [10] * 10)
        runner.run(big)
        step = runner.run(big, small)
        assert small.is_launched
        assert tokens_of(step, big) == (STEP - 200) // 10 * 10, "all that the small one leaves"

    @pytest.mark.parametrize(("num_skipped", "is_served"), [(MAX_SKIPPED - 1, True), (MAX_SKIPPED, False)])
    @pytest.mark.parametrize("item_lens", [[11], [10] * 3], ids=["small", "large"])
    def test_a_step_is_full_after_so_many_requests_that_do_not_fit(
        self, item_lens: list[int], num_skipped: int, is_served: bool
    ) -> None:
        """10 tokens are left for small requests, and none for large ones."""
        served, small = [state_of(0, [10]) for _ in range(10)], state_of(0, [3])
        skipped = [state_of(0, item_lens) for _ in range(num_skipped)]
        step = StepRunner(100, whole_tokens=110).run(*served, *skipped, small)
        assert step.requests == [*served, *[small] * is_served]

    def test_large_ones_divide_the_step(self) -> None:
        runner = StepRunner()
        states = [state_of(100, [10] * 500) for _ in range(3)]
        for _ in range(5):
            step = runner.run(*states)
            assert all(STEP // 3 - 11 < tokens_of(step, state) <= STEP // 3 for state in states)

    def test_a_large_one_fills_whole_waves_beside_small_ones(self) -> None:
        runner, big = StepRunner(wave_tokens=96), state_of(0, [1] * 5000)
        before, behind = state_of(0, [7] * 10), state_of(5, [7] * 10)
        assert tokens_of(runner.run(big), big) == STEP // 96 * 96
        step = runner.run(before, big, behind)
        assert step.num_tokens == STEP // 96 * 96
        assert before.is_launched
        assert behind.is_launched

    def test_a_turn_that_the_step_cuts_short_goes_on_in_the_next(self) -> None:
        """Else a small request at the end of a step would wait for all of the others once more."""
        runner, small = StepRunner(), [state_of(0, [10] * 10) for _ in range(40)]
        assert tokens_of(runner.run(*small), small[10]) == STEP - 10 * 100 - 4
        step = runner.run(*small)
        assert step.requests[0] is small[10]
        assert small[10].is_launched

    def test_a_turn_that_goes_on_is_no_second_turn(self) -> None:
        runner, small = StepRunner(), [state_of(0, [10] * 10) for _ in range(9)]
        first, second = state_of(0, [10] * 500), state_of(0, [10] * 500)
        assert tokens_of(runner.run(*small, first, second), first) == STEP - 9 * 100 - 4
        step = runner.run(first, second)
        half = STEP // 2
        assert (tokens_of(step, first), tokens_of(step, second)) == (half - 120 - 2, half - 2)

    def test_those_that_are_launched_take_no_share(self) -> None:
        """They are live until the step that runs has ended, and the next is filled before that."""
        runner, small, big = StepRunner(), state_of(0, [10] * 10), state_of(0, [10] * 500)
        live = live_requests(runner, small, big)
        runner.run(*live.unlaunched())
        small.num_in_flight = big.num_in_flight = 1
        assert live.unlaunched() == [big]
        assert tokens_of(runner.fill(*live.unlaunched()), big) == STEP // 10 * 10

    def test_who_ends_with_the_step_in_flight_gets_no_more_of_it(self) -> None:
        runner, (going, staying) = StepRunner(), [state_of(0, [10] * 500) for _ in range(2)]
        live = live_requests(runner, going, staying)
        runner.run(*live.unlaunched())
        going.num_in_flight = staying.num_in_flight = 1
        going.cancel()
        assert live.unlaunched() == [staying]

    def test_who_finds_the_step_full_is_first_in_the_next(self) -> None:
        """With more large requests than shares, a small one behind them waits for one step, not for the requests."""
        runner, small = StepRunner(), state_of(0, [10] * 10)
        big = [state_of(0, [8] * 5000) for _ in range(6)]
        step = runner.run(*big, small)
        assert [tokens_of(step, state) for state in big] == [SHARE] * 4 + [0] * 2
        step = runner.run(*big, small)
        assert [tokens_of(step, state) for state in big] == [SHARE, STEP - 3 * SHARE - 100 - 4, 0, 0, SHARE, SHARE]
        assert step.requests == [*big[4:], small, big[0], big[1]]
        assert small.is_launched

    def test_everybody_moves_on_in_turn(self) -> None:
        runner, states = StepRunner(), [state_of(0, [8] * 5000) for _ in range(7)]
        done = np.zeros(7, np.int64)
        for _ in range(14):
            step = runner.run(*states)
            done += [tokens_of(step, state) for state in states]
        assert set(done.tolist()) == {8 * SHARE}

    @pytest.mark.parametrize("num_small", [STEP // 100, 40])
    def test_a_large_one_goes_on_however_many_small_ones_keep_coming(self, num_small: int) -> None:
        """A step holds ten of them, so it is everybody's turn after about a tenth as many steps."""
        runner, big = StepRunner(), state_of(0, [8] * 320)
        live = [big, *(state_of(0, [10] * 10) for _ in range(num_small))]
        num_steps = 0
        while not big.is_launched:
            runner.run(*live)
            num_steps += 1
            assert num_steps <= 2 * 10 * (num_small // 10 + 1), "ten shares, or what is left of a step instead of one"
            live = [state for state in live if not state.is_launched]
            live += [state_of(0, [10] * 10) for _ in range(num_small + 1 - len(live))]

    @pytest.mark.parametrize("num_large", [4, 5, 9])
    @pytest.mark.parametrize("row_len", [STEP // 2, STEP, 2 * STEP])
    def test_a_small_one_waits_for_one_sequence_of_each_large_one(self, num_large: int, row_len: int) -> None:
        runner, small = StepRunner(), state_of(0, [10] * 10)
        large = [state_of(9, [row_len - 9] * 20, "packed", chunk_size=1) for _ in range(num_large)]
        runner.run(*large)
        num_steps = 0
        while not small.is_launched:
            runner.run(*large, small)
            num_steps += 1
            assert num_steps <= num_large + 1

    @pytest.mark.parametrize("num_blocks_before", [1, 40])
    def test_the_least_share_of_a_small_one_fits_beside_a_block_with_much_attention(
        self, num_blocks_before: int
    ) -> None:
        runner = StepRunner(2 * KV_BLOCK_SIZE, least_share=KV_BLOCK_SIZE, pairs_per_token=3000.0)
        large = state_of(60 * KV_BLOCK_SIZE, [1])
        while trunk_of(large).num_blocks_launched < num_blocks_before:
            runner.run(large)
        small = state_of(20, [10] * 10)
        step = runner.run(large, small)
        assert (tokens_of(step, large), tokens_of(step, small)) == (KV_BLOCK_SIZE, 120)
        assert small.is_launched


class TestLargeUnits:
    """What cannot be cut is not held to the share, and the largest not even to the step."""

    @pytest.mark.parametrize("algorithm", ["prefill_extend", "packed", "serial"])
    def test_one_larger_than_the_share_fits_beside_others(self, algorithm: str) -> None:
        runner, big, other = StepRunner(), state_of(0, [10] * 500), state_of(5, [400, 400], algorithm, chunk_size=1)
        tokens = [tokens_of(runner.run(big, other), other) for _ in range(3)]
        if algorithm == "prefill_extend":
            assert tokens == [405, 400, 0]
        else:
            assert tokens == [405, 405, 0]

    def test_a_turn_has_one_that_is_larger_than_the_share(self) -> None:
        states = [state_of(0, [SHARE + 44] * 3) for _ in range(1 + MAX_COMPARED)]
        step = StepRunner().run(*states)
        assert [tokens_of(step, state) for state in states[:4]] == [SHARE + 44] * 3 + [0]

    @pytest.mark.parametrize(("algorithm", "extra"), [("prefill_extend", 0), ("packed", 9), ("serial", 9)])
    def test_one_larger_than_the_step_gets_a_step_alone(self, algorithm: str, extra: int) -> None:
        runner = StepRunner()
        prefix = prefix_of(9)
        long = state_of(prefix, [3000, 5], algorithm, chunk_size=1)
        small = state_of(0, [10] * 10)
        warm = state_of(prefix, [1])  # so that the prefix of the first is there
        runner.run(warm)
        step = runner.run(long, small)
        assert [part.request for forward in step.forwards for part in forward.parts] == [long]
        assert step.num_tokens == 3000 + extra

    def test_the_others_are_served_before_its_next(self) -> None:
        """Long rows of the oldest request do not make a younger one wait for all of them."""
        runner = StepRunner()
        sequences, small = state_of(9, [3000] * 10, "serial"), state_of(0, [10] * 10)
        steps = [runner.run(sequences, small) for _ in range(3)]
        assert [tokens_of(step, sequences) for step in steps] == [3009, 0, 3009]
        assert [tokens_of(step, small) for step in steps] == [0, 100, 0]

    def test_it_need_not_wait_until_it_is_the_oldest(self) -> None:
        runner = StepRunner()
        items, sequences = state_of(0, [10] * 5000), state_of(9, [3000], "packed")
        assert tokens_of(runner.run(items, sequences), sequences) == 0
        assert tokens_of(runner.run(items, sequences), sequences) == 3009

    def test_a_block_larger_than_the_step_is_computed_all_the_same(self) -> None:
        runner, state = StepRunner(num_tokens=50), state_of(300, [10])
        steps = runner.finish(state)
        assert [step.num_tokens for step in steps] == [KV_BLOCK_SIZE, KV_BLOCK_SIZE, 44, 10]

    def test_a_block_larger_than_the_share_does_not_wait_for_the_older(self) -> None:
        runner, big, small = StepRunner(num_tokens=200), state_of(0, [10] * 5000), state_of(KV_BLOCK_SIZE, [10])
        assert tokens_of(runner.run(big, small), small) == KV_BLOCK_SIZE


class TestPrefixes:
    def test_the_prefix_and_the_items_of_a_request_run_in_one_step(self) -> None:
        state = state_of(300, [10] * 20)
        step = StepRunner().run(state)
        assert [kind_of(forward) for forward in step.forwards] == ["prefill", "extend"]
        assert (step.num_tokens, state.is_launched, state.tokens_left) == (500, True, 0)
        check(state)

    def test_two_requests_with_the_same_new_prefix_compute_it_once(self) -> None:
        runner = StepRunner(num_tokens=4096)
        first, second = state_of(prefix_of(300), [10] * 3), state_of(prefix_of(300), [11] * 3)
        step = runner.run(first, second)
        assert forward_of(step, "prefill").requests == [first]
        assert [branch.request for branch in forward_of(step, "extend").prefix_branches] == [first]
        assert first.is_launched
        assert second.is_launched
        check(second)
        assert (first.cached_tokens, second.cached_tokens) == (0, 300)

    def test_one_that_shares_a_beginning_waits_for_it_and_computes_the_rest(self) -> None:
        runner = StepRunner(num_tokens=4096)
        first, second = state_of(prefix_of(256), [10]), state_of(prefix_of(400), [10])
        assert tokens_of(runner.run(first, second), second) == 0
        assert tokens_of(runner.run(first, second), second) == 400 - 256 + 10
        assert second.cached_tokens == 256
        check(second)

    def test_a_later_request_computes_nothing_of_a_cached_prefix(self) -> None:
        runner = StepRunner()
        runner.finish(state_of(prefix_of(300), [10]))
        later = state_of(prefix_of(300), [12])
        (step,) = runner.finish(later)
        assert [kind_of(forward) for forward in step.forwards] == ["extend"]
        assert (later.cached_tokens, later.tokens_left) == (300, 300)

    def test_a_long_prefix_is_cut_where_the_step_ends(self) -> None:
        state = state_of(prefix_of(2500), [10])
        steps = StepRunner().finish(state)
        assert [step.num_tokens for step in steps] == [1024, 1024, 452 + 10]

    @pytest.mark.parametrize(
        ("most", "chunks"), [(300, [256, 256, 188]), (128, [128] * 5 + [60]), (1, [128] * 5 + [60])]
    )
    def test_a_chunk_of_a_prefix_is_bounded_but_never_below_a_block(self, most: int, chunks: list[int]) -> None:
        runner, state = StepRunner(max_prefill_tokens=most), state_of(700, [10])
        prefills = [forward_of(step, "prefill").num_tokens for step in runner.finish(state)]
        assert prefills == chunks

    def test_a_bounded_chunk_leaves_the_rest_of_the_step_to_others(self) -> None:
        runner, long, items = StepRunner(max_prefill_tokens=128), state_of(1000, [10]), state_of(0, [10] * 500)
        step = runner.run(long, items)
        assert (tokens_of(step, long), tokens_of(step, items)) == (128, STEP // 2 // 10 * 10)

    @pytest.mark.parametrize("num_waiting", [1, 3])
    def test_a_block_whose_owner_has_left_is_computed_by_one_that_waits_for_it(self, num_waiting: int) -> None:
        """And by one only, however many do."""
        runner = StepRunner(num_tokens=4 * KV_BLOCK_SIZE)
        prefix = prefix_of(3 * KV_BLOCK_SIZE)
        owner = state_of(prefix, [10])
        waiting = [state_of(prefix, [10]) for _ in range(num_waiting)]
        step = runner.run(owner, *waiting)
        num_computed = 2 if num_waiting == 1 else 1
        assert tokens_of(step, owner) == num_computed * KV_BLOCK_SIZE
        owner.release_prefix(runner.cache)
        prefills = [
            (part.request, part.first)
            for step in runner.finish(*waiting)
            for forward in step.forwards
            for part in forward.block_parts
        ]
        if num_waiting == 1:
            assert prefills == [(waiting[0], 2)]
        else:
            assert prefills == [(waiting[0], 1), (waiting[1], 2)], "block by block beside others, each in its turn"
        first = num_computed
        assert [state.cached_tokens for state in waiting] == [(first + n) * KV_BLOCK_SIZE for n in range(num_waiting)]

    @pytest.mark.parametrize("num_jobs", [2, 1 + 2 * MAX_SKIPPED, 5 * MAX_SKIPPED])
    def test_however_many_wait_for_one_prefix_it_is_computed_and_they_end(self, num_jobs: int) -> None:
        """Those that wait for it do not make a step full."""
        runner, prefix = StepRunner(), prefix_of(5 * SHARE)
        states = [state_of(prefix, [10, 11]) for _ in range(num_jobs)]
        steps = runner.finish(*states)
        assert sum(forward.num_tokens for step in steps for forward in step.forwards if forward.is_prefill) == 5 * SHARE
        assert len(steps) <= 5 + -(-num_jobs * 21 // STEP) + 1

    def test_a_prefix_alone_is_complete_when_it_is_computed(self) -> None:
        runner, alone = StepRunner(), RequestState(ScoringTask(prefix_of(300), None))
        assert not alone.is_launched
        assert tokens_of(runner.run(alone), alone) == 300
        assert alone.is_launched

    def test_a_prefix_alone_that_is_there_already_is_complete_without_a_step(self) -> None:
        runner = StepRunner()
        runner.finish(state_of(prefix_of(300), [10]))
        alone = RequestState(ScoringTask(prefix_of(300), None))
        assert runner.fill(alone) is None
        assert (alone.is_launched, alone.cached_tokens) == (True, 300)


class TestKVBlocks:
    """Where the cache has no room for the prefix of one."""

    def test_an_older_request_that_waits_for_kv_blocks_is_not_overtaken(self) -> None:
        runner = StepRunner(num_blocks=4)
        holder, waiting, behind = state_of(300, [10] * 300), state_of(300, [10]), state_of(50, [10])
        runner.run(holder)
        for _ in range(2):
            step = runner.run(holder, waiting, behind)
            assert step.requests == [holder], "there would be a place for the last one"
        while not holder.is_launched:
            runner.run(holder, waiting, behind)
        holder.release_prefix(runner.cache)
        assert runner.run(waiting, behind).requests == [waiting, behind]

    def test_more_prefixes_than_there_are_kv_blocks_for_all_end(self) -> None:
        runner = StepRunner(num_blocks=9)
        states = [state_of(4 * KV_BLOCK_SIZE, [10] * 30) for _ in range(3 * MAX_SKIPPED)]
        runner.finish(*states)
        assert runner.cache.num_used == 0

    def test_requests_that_need_no_kv_blocks_go_on(self) -> None:
        runner = StepRunner(num_blocks=4)
        holder, waiting = state_of(300, [10] * 300), state_of(300, [10])
        runner.run(holder)
        sequences, items = state_of(20, [10], "packed"), state_of(0, [10])
        runner.run(holder, waiting, sequences, items)
        assert sequences.is_launched
        assert items.is_launched

    def test_what_nobody_uses_makes_room(self) -> None:
        runner = StepRunner(num_blocks=3)
        for _ in range(4):
            runner.finish(state_of(300, [10]))
        assert runner.cache.num_blocks == 3


class TestForwards:
    def test_items_of_many_prefixes_share_a_forward(self) -> None:
        runner = StepRunner(num_tokens=4096)
        states = [state_of(200, [10, 5]) for _ in range(3)] + [state_of(0, [4])]
        forward = forward_of(runner.run(*states), "extend")
        assert forward.requests == states
        assert [branch.request for branch in forward.prefix_branches] == states[:3]
        for state in states:
            check(state)

    def test_a_forward_reads_no_more_blocks_than_it_may(self) -> None:
        runner = StepRunner(num_tokens=4096, max_kv_blocks_read=5)
        states = [state_of(2 * KV_BLOCK_SIZE, [10]) for _ in range(4)]
        steps = [runner.run(*states), runner.run(*states)]
        assert [forward_of(step, "extend").requests for step in steps] == [states[:2], states[2:]]
        assert [forward_of(step, "extend").num_blocks_read for step in steps] == [4, 4]

    def test_a_prefix_that_several_read_counts_once(self) -> None:
        runner = StepRunner(num_tokens=4096, max_kv_blocks_read=5)
        states = [state_of(prefix_of(4 * KV_BLOCK_SIZE), [10]) for _ in range(3)]
        assert forward_of(runner.run(*states), "extend").requests == states

    def test_one_that_reads_more_than_a_forward_may_is_alone_in_it(self) -> None:
        runner = StepRunner(num_tokens=4096, max_kv_blocks_read=5)
        long, short = state_of(7 * KV_BLOCK_SIZE, [10]), state_of(KV_BLOCK_SIZE, [10])
        assert forward_of(runner.run(long, short), "extend").requests == [long]
        assert forward_of(runner.run(long, short), "extend").requests == [short]

    def test_one_that_does_not_fit_the_blocks_read_is_first_in_the_next_step(self) -> None:
        runner = StepRunner(num_tokens=4096, max_kv_blocks_read=5)
        older, younger = state_of(4 * KV_BLOCK_SIZE, [10] * 1000), state_of(4 * KV_BLOCK_SIZE, [10])
        for served in (older, younger):
            step = runner.run(older, younger)
            assert [forward.requests for forward in step.forwards] == [[served], [served]]
        assert younger.is_launched

    def test_a_prefill_lists_no_more_blocks_than_it_may(self) -> None:
        """Those it computes, and those before them that it reads, for each of its prefixes."""
        runner = StepRunner(num_tokens=4096, max_kv_blocks_read=9)
        base = prefix_of(3 * KV_BLOCK_SIZE)
        runner.finish(state_of(base, [10]))
        states = [state_of(np.concatenate([base, prefix_of(50, n)]), [10]) for n in range(5)]
        steps = runner.finish(*states)
        assert [forward_of(step, "prefill").requests for step in steps] == [states[:2], states[2:4], states[4:]]
        assert [forward_of(step, "prefill").num_blocks_read for step in steps] == [8, 8, 4]

    def test_only_requests_with_the_same_many_labels_share_a_forward(self) -> None:
        few = [state_of(0, [10], labels=tuple((k,) for k in range(1, 1 + MANY_LABELS))) for _ in range(2)]
        many = [state_of(0, [10], labels=tuple((k,) for k in range(2 + MANY_LABELS))) for _ in range(2)]
        other = state_of(0, [10], labels=tuple((k,) for k in range(1, 3 + MANY_LABELS)))
        step = StepRunner().run(few[0], many[0], few[1], other, many[1])
        assert [forward.requests for forward in step.forwards] == [few, many, [other]]
        for state in (*few, *many, other):
            check(state)

    def test_requests_with_different_numbers_of_labels_share_a_forward(self) -> None:
        states = [state_of(0, [4, 5], labels=labels) for labels in [((3,),), ((3,), (5,), (7,)), ((9,), (1,))]]
        step = StepRunner().run(*states)
        (batch,) = [forward.batch for forward in step.forwards]
        assert batch is not None
        assert batch.label_ids.tolist() == [[3, 3, 3]] * 2 + [[3, 5, 7]] * 2 + [[9, 1, 1]] * 2
        for state in states:
            check(state)

    @pytest.mark.parametrize("is_first", [False, True])
    def test_normalizers_are_computed_where_one_needs_them_and_go_to_that_one(self, is_first: bool) -> None:
        plain, normalized = state_of(0, [4]), state_of(0, [5], need_logsumexp=True)
        (forward,) = StepRunner().run(*((normalized, plain) if is_first else (plain, normalized))).forwards
        assert forward.batch is not None
        assert forward.batch.need_logsumexp
        assert plain.logsumexp is None
        context = np.arange(5, dtype=np.int32)
        every = fake_logits(context, np.arange(512, dtype=np.int32)).astype(np.float64)
        assert normalized.logsumexp == pytest.approx([np.log(np.exp(every).sum())])

    @pytest.mark.parametrize("asked", [(1, 3), (3, 1)])
    @pytest.mark.parametrize("algorithm", ["packed", "prefill_extend"])
    def test_a_forward_reads_as_many_likely_tokens_as_one_asks_for(
        self, asked: tuple[int, int], algorithm: str
    ) -> None:
        states = [RequestState(replace(state_of(9, [5], algorithm).task, top_k=top_k)) for top_k in asked]
        batches = [forward.batch for forward in StepRunner().run(*states).forwards]
        scored = {len(batch.score_tokens): batch.top_k for batch in batches if batch is not None}
        assert scored == ({2: 3} if algorithm == "packed" else {0: 0, 2: 3}), "none of a prefill"
        assert [state.top_ids.shape for state in states] == [(1, top_k) for top_k in asked]

    @pytest.mark.parametrize("algorithm", ["serial", "prefill_extend"])
    def test_each_token_has_the_slot_of_its_request_s_adapter(self, algorithm: str) -> None:
        """Blocks come first, then items."""
        states = [state_of(9, [length], algorithm) for length in (1, 2, 3)]
        states[1].lora, states[2].lora = LoadedLora("a", 5, "", slot=2), LoadedLora("b", 6, "", slot=1)
        (forward,) = StepRunner(joins_prefill=True).run(*states).forwards
        assert forward.batch is not None
        slots = forward.batch.lora_slots
        assert slots is not None
        blocks_first = [*[0] * 9, *[2] * 9, *[1] * 9, 0, *[2] * 2, *[1] * 3]
        assert slots.tolist() == (blocks_first if algorithm != "serial" else [*[0] * 10, *[2] * 11, *[1] * 12])
        assert slots.dtype == np.int32
        (plain,) = StepRunner().run(state_of(9, [1], "serial")).forwards
        assert plain.batch is not None
        assert plain.batch.lora_slots is None

    def test_sequences_of_one_layout_share_a_forward_and_others_do_not(self) -> None:
        states = [state_of(9, [5], algorithm) for algorithm in ("serial", "packed", "serial", "packed")]
        dense = state_of(9, [5], "packed", mask="dense")
        step = StepRunner().run(*states, dense)
        assert [forward.requests for forward in step.forwards] == [states[::2], states[1::2], [dense]]
        layouts = [(forward.batch.layout, forward.batch.mask) for forward in step.forwards if forward.batch is not None]
        assert layouts == [(Layout.CAUSAL, "segment"), (Layout.PACKED, "segment"), (Layout.PACKED, "dense")]

    def test_the_sequences_of_a_dense_forward_together_keep_to_the_budget(self) -> None:
        """Each has a mask of its own; the budget is for all of them."""
        dense = [state_of(9, [91], "packed", mask="dense", token_budget=250) for _ in range(4)]
        step = StepRunner().run(*dense)
        assert [forward.num_tokens for forward in step.forwards] == [200]
        segment = [state_of(9, [91], "packed", token_budget=250) for _ in range(4)]
        assert [forward.num_tokens for forward in StepRunner().run(*segment).forwards] == [400]


class TestOneRequest:
    """500 items of 10 tokens behind a prefix of 100, alone: how they are cut into steps."""

    def sizes(self, algorithm: str, num_tokens: int = 2000, **options: Any) -> list[int]:
        steps = StepRunner(num_tokens).finish(state_of(100, [10] * 500, algorithm, **options))
        return [forward.num_tokens for step in steps for forward in step.forwards]

    def test_packed_chunks_run_as_sequences_of_one_forward(self) -> None:
        """Chunks of 32 make 16 rows of 420 tokens, the last of 300; four rows fit a step of 2,000."""
        assert self.sizes("packed", chunk_size=32) == [1680, 1680, 1680, 1260 + 300]

    def test_packed_in_one_forward_where_the_step_allows(self) -> None:
        assert self.sizes("packed", 10_000, chunk_size=32) == [15 * 420 + 300]

    def test_serial_copies_the_prefix_for_every_item(self) -> None:
        assert self.sizes("serial") == [18 * 110] * 27 + [14 * 110]

    def test_the_chunk_size_bounds_a_serial_forward(self) -> None:
        assert self.sizes("serial", 100_000, chunk_size=32) == [32 * 110] * 15 + [20 * 110]

    def test_prefill_extend_is_one_prefill_and_as_few_forwards_as_the_step_allows(self) -> None:
        assert self.sizes("prefill_extend") == [100, 1900, 2000, 1100]

    def test_the_chunk_size_bounds_the_items_of_a_forward(self) -> None:
        assert self.sizes("prefill_extend", 100_000, chunk_size=32) == [100] + [320] * 15 + [200]

    @pytest.mark.parametrize(
        ("algorithm", "sizes"),
        [
            ("prefill_extend", [100] + [900] * 5 + [500]),
            ("packed", [900] * 6 + [300]),
            ("serial", [880] * 62 + [440]),
        ],
    )
    def test_a_token_budget_below_the_step_bounds_every_forward(self, algorithm: str, sizes: list[int]) -> None:
        assert self.sizes(algorithm, 100_000, token_budget=900) == sizes


@settings(max_examples=30)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from(["serial", "packed", "prefill_extend"]),
            st.sampled_from([0, 5, 128, 200, 300]),
            st.lists(st.integers(1, 60), min_size=1, max_size=12),
            st.integers(0, 3),  # chunk size
            st.sampled_from([0, 0, 1, 2]),  # which prefix of this length
        ),
        min_size=1,
        max_size=20,
    ),
    num_tokens=st.sampled_from([16, 100, 600]),
    token_budget=st.sampled_from([40, 400]),
    max_kv_blocks_read=st.sampled_from([None, 1, 4]),
    joins_prefill=st.booleans(),
)
def test_any_requests_in_any_room_end_with_the_right_logits_and_within_their_bounds(
    requests: list[tuple[str, int, list[int], int, int]],
    num_tokens: int,
    token_budget: int,
    max_kv_blocks_read: int | None,
    joins_prefill: bool,
) -> None:
    runner = StepRunner(num_tokens, num_blocks=4, max_kv_blocks_read=max_kv_blocks_read, joins_prefill=joins_prefill)
    states = [
        state_of(prefix_of(prefix_len, start), item_lens, algorithm, chunk_size=chunk_size, token_budget=token_budget)
        for algorithm, prefix_len, item_lens, chunk_size, start in requests
    ]
    for step in runner.finish(*states):
        assert step.num_tokens == sum(forward.num_tokens for forward in step.forwards)
        num_units = sum(part.stop - part.first for forward in step.forwards for part in forward.parts)
        assert step.num_tokens <= num_tokens or num_units == 1
        for forward in step.forwards:
            for part in forward.scored_parts:
                if part.stop - part.first > 1:
                    assert part.num_tokens <= token_budget
            num_prefixes = len(forward.block_parts) + len(forward.prefix_branches)
            is_joined = kind_of(forward) == "joined"
            if max_kv_blocks_read is not None and (num_prefixes > 1 or is_joined):
                assert forward.num_blocks_read <= max_kv_blocks_read
    assert runner.cache.num_used == 0
    assert all(state.tokens_left == state.cached_tokens for state in states)
