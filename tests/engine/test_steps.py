"""Filling steps from live jobs, without a thread: who gets how much of the next one, and in which forwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.backends.fake import fake_logits
from prefixwise.engine.job import Job
from prefixwise.engine.steps import MANY_LABELS, MAX_LEFT_OUT
from prefixwise.forward.batch import KV_BLOCK_SIZE, Layout
from tests.engine.room import SHARE, STEP, Room, check, forward_of, job_of, kind_of, prefix_of, tokens_of


class TestShares:
    def test_a_job_alone_gets_all_of_the_step(self) -> None:
        big = job_of(0, [10] * 500)
        assert tokens_of(Room().run(big), big) == STEP // 10 * 10

    def test_the_oldest_comes_first(self) -> None:
        jobs = [job_of(0, [10] * 3) for _ in range(4)]
        assert forward_of(Room().run(*jobs), "extend").jobs == jobs

    def test_a_large_job_leaves_room_for_a_small_one_in_the_very_next_step(self) -> None:
        room, big, small = Room(), job_of(100, [10] * 5000), job_of(100, [10] * 10)
        room.run(big)
        step = room.run(big, small)
        assert small.is_complete
        assert 0 < tokens_of(step, big) <= SHARE

    def test_while_there_are_others_nobody_gets_more_than_a_share(self) -> None:
        room = Room()
        jobs = [job_of(100, [10] * 500) for _ in range(3)]
        for _ in range(5):
            step = room.run(*jobs)
            assert all(SHARE - 10 < tokens_of(step, job) <= SHARE for job in jobs)

    def test_those_that_are_done_take_no_share(self) -> None:
        """They are live until the step that runs has ended, and the next is filled before that."""
        room, small, big = Room(), job_of(0, [10] * 10), job_of(0, [10] * 500)
        room.run(small, big)
        assert small.is_complete
        assert tokens_of(room.fill(small, big), big) == STEP // 10 * 10

    def test_many_that_are_done_do_not_hide_one_that_is_not(self) -> None:
        room = Room()
        done = [job_of(0, [1]) for _ in range(2 * MAX_LEFT_OUT)]
        room.run(*done)
        waiting = job_of(0, [10])
        assert tokens_of(room.fill(*done, waiting), waiting) == 10

    def test_who_finds_the_step_full_is_first_in_the_next(self) -> None:
        """With more large jobs than shares, a small one behind them waits for one step, not for the jobs."""
        room, small = Room(), job_of(0, [10] * 10)
        big = [job_of(0, [8] * 5000) for _ in range(6)]
        step = room.run(*big, small)
        assert [tokens_of(step, job) for job in big] == [SHARE] * 4 + [0] * 2
        step = room.run(*big, small)
        assert [tokens_of(step, job) for job in big] == [SHARE, STEP - 3 * SHARE - 100 - 4, 0, 0, SHARE, SHARE]
        assert step.jobs == [*big[4:], small, big[0], big[1]]
        assert small.is_complete

    def test_everybody_moves_on_in_turn(self) -> None:
        room, jobs = Room(), [job_of(0, [8] * 5000) for _ in range(7)]
        done = np.zeros(7, np.int64)
        for _ in range(14):
            step = room.run(*jobs)
            done += [tokens_of(step, job) for job in jobs]
        assert set(done.tolist()) == {8 * SHARE}

    @pytest.mark.parametrize("num_small", [STEP // 100, 40])
    def test_a_large_one_goes_on_however_many_small_ones_keep_coming(self, num_small: int) -> None:
        """A step holds ten of them, so it is everybody's turn after about a tenth as many steps."""
        room, big = Room(), job_of(0, [8] * 320)
        live = [big, *(job_of(0, [10] * 10) for _ in range(num_small))]
        num_steps = 0
        while not big.is_complete:
            room.run(*live)
            num_steps += 1
            assert num_steps <= 2 * 10 * (num_small // 10 + 1), "ten shares, or what is left of a step instead of one"
            live = [job for job in live if not job.is_complete]
            live += [job_of(0, [10] * 10) for _ in range(num_small + 1 - len(live))]

    @pytest.mark.parametrize("num_large", [4, 5, 9])
    @pytest.mark.parametrize("row_len", [STEP // 2, STEP, 2 * STEP])
    def test_a_small_one_waits_for_one_row_of_each_large_one(self, num_large: int, row_len: int) -> None:
        room, small = Room(), job_of(0, [10] * 10)
        large = [job_of(9, [row_len - 9] * 20, "packed", chunk_size=1) for _ in range(num_large)]
        room.run(*large)
        num_steps = 0
        while not small.is_complete:
            room.run(*large, small)
            num_steps += 1
            assert num_steps <= num_large + 1


class TestLargeUnits:
    """What cannot be cut is not held to the share, and the largest not even to the step."""

    @pytest.mark.parametrize("algorithm", ["prefill_extend", "packed", "serial"])
    def test_one_larger_than_the_share_fits_beside_others(self, algorithm: str) -> None:
        room, big, other = Room(), job_of(0, [10] * 500), job_of(5, [400, 400], algorithm, chunk_size=1)
        tokens = [tokens_of(room.run(big, other), other) for _ in range(3)]
        if algorithm == "prefill_extend":
            assert tokens == [5, 400, 400]  # its prefix goes first, and then there is no room in that share
        else:
            assert tokens == [405, 405, 0]

    @pytest.mark.parametrize(("algorithm", "extra"), [("prefill_extend", 0), ("packed", 9), ("serial", 9)])
    def test_one_larger_than_the_step_gets_a_step_alone(self, algorithm: str, extra: int) -> None:
        room = Room()
        prefix = prefix_of(9)
        long = job_of(prefix, [3000, 5], algorithm, chunk_size=1)
        small = job_of(0, [10] * 10)
        warm = job_of(prefix, [1])  # so that the prefix of the first is there
        room.run(warm)
        step = room.run(long, small)
        assert [part.job for forward in step.forwards for part in forward.parts] == [long]
        assert step.num_tokens == 3000 + extra

    def test_the_others_are_served_before_its_next(self) -> None:
        """Long rows of the oldest request do not make a younger one wait for all of them."""
        room = Room()
        rows, small = job_of(9, [3000] * 10, "serial"), job_of(0, [10] * 10)
        steps = [room.run(rows, small) for _ in range(3)]
        assert [tokens_of(step, rows) for step in steps] == [3009, 0, 3009]
        assert [tokens_of(step, small) for step in steps] == [0, 100, 0]

    def test_it_need_not_wait_until_it_is_the_oldest(self) -> None:
        room = Room()
        tails, rows = job_of(0, [10] * 5000), job_of(9, [3000], "packed")
        assert tokens_of(room.run(tails, rows), rows) == 0
        assert tokens_of(room.run(tails, rows), rows) == 3009

    def test_a_block_larger_than_the_step_is_computed_all_the_same(self) -> None:
        room, job = Room(num_tokens=50), job_of(300, [10])
        steps = room.finish(job)
        assert [step.num_tokens for step in steps] == [KV_BLOCK_SIZE, KV_BLOCK_SIZE, 44, 10]

    def test_a_block_larger_than_the_share_does_not_wait_for_the_older(self) -> None:
        room, big, small = Room(num_tokens=200), job_of(0, [10] * 5000), job_of(KV_BLOCK_SIZE, [10])
        assert tokens_of(room.run(big, small), small) == KV_BLOCK_SIZE


class TestPrefixes:
    def test_the_prefix_and_the_tails_of_a_request_run_in_one_step(self) -> None:
        job = job_of(300, [10] * 20)
        step = Room().run(job)
        assert [kind_of(forward) for forward in step.forwards] == ["prefill", "extend"]
        assert (step.num_tokens, job.is_complete, job.tokens_left) == (500, True, 0)
        check(job)

    def test_two_requests_with_the_same_new_prefix_compute_it_once(self) -> None:
        room = Room(num_tokens=4096)
        first, second = job_of(prefix_of(300), [10] * 3), job_of(prefix_of(300), [11] * 3)
        step = room.run(first, second)
        assert forward_of(step, "prefill").jobs == [first]
        assert forward_of(step, "extend").prefix_jobs == [first]
        assert first.is_complete
        assert second.is_complete
        check(second)
        assert (first.cached_tokens, second.cached_tokens) == (0, 300)

    def test_one_that_shares_a_beginning_waits_for_it_and_computes_the_rest(self) -> None:
        room = Room(num_tokens=4096)
        first, second = job_of(prefix_of(256), [10]), job_of(prefix_of(400), [10])
        assert tokens_of(room.run(first, second), second) == 0
        assert tokens_of(room.run(first, second), second) == 400 - 256 + 10
        assert second.cached_tokens == 256
        check(second)

    def test_a_later_request_computes_nothing_of_a_kept_prefix(self) -> None:
        room = Room()
        room.finish(job_of(prefix_of(300), [10]))
        later = job_of(prefix_of(300), [12])
        (step,) = room.finish(later)
        assert [kind_of(forward) for forward in step.forwards] == ["extend"]
        assert (later.cached_tokens, later.tokens_left) == (300, 300)

    def test_a_long_prefix_is_cut_where_the_step_ends(self) -> None:
        job = job_of(prefix_of(2500), [10])
        steps = Room().finish(job)
        assert [step.num_tokens for step in steps] == [1024, 1024, 452 + 10]

    @pytest.mark.parametrize(
        ("most", "chunks"), [(300, [256, 256, 188]), (128, [128] * 5 + [60]), (1, [128] * 5 + [60])]
    )
    def test_a_chunk_of_a_prefix_is_bounded_but_never_below_a_block(self, most: int, chunks: list[int]) -> None:
        room, job = Room(max_prefill_tokens=most), job_of(700, [10])
        prefills = [forward_of(step, "prefill").num_tokens for step in room.finish(job)]
        assert prefills == chunks

    def test_a_bounded_chunk_leaves_the_rest_of_the_step_to_others(self) -> None:
        room, long, tails = Room(max_prefill_tokens=128), job_of(1000, [10]), job_of(0, [10] * 500)
        step = room.run(long, tails)
        assert (tokens_of(step, long), tokens_of(step, tails)) == (128, SHARE // 10 * 10)

    @pytest.mark.parametrize("num_waiting", [1, 3])
    def test_a_block_whose_owner_has_left_is_computed_by_one_that_waits_for_it(self, num_waiting: int) -> None:
        """And by one only, however many do."""
        room = Room(num_tokens=4 * KV_BLOCK_SIZE)
        prefix = prefix_of(3 * KV_BLOCK_SIZE)
        owner = job_of(prefix, [10])
        waiting = [job_of(prefix, [10]) for _ in range(num_waiting)]
        step = room.run(owner, *waiting)
        assert tokens_of(step, owner) == KV_BLOCK_SIZE
        owner.drop_prefix(room.cache)
        prefills = [
            (part.job, part.first)
            for step in room.finish(*waiting)
            for forward in step.forwards
            for part in forward.block_parts
        ]
        if num_waiting == 1:
            assert prefills == [(waiting[0], 1)]
        else:
            assert prefills == [(waiting[0], 1), (waiting[1], 2)], "block by block beside others, each in its turn"
        assert [job.cached_tokens for job in waiting] == [n * KV_BLOCK_SIZE for n in range(1, 1 + num_waiting)]

    @pytest.mark.parametrize("num_jobs", [2, 1 + 2 * MAX_LEFT_OUT, 5 * MAX_LEFT_OUT])
    def test_however_many_wait_for_one_prefix_it_is_computed_and_they_end(self, num_jobs: int) -> None:
        """Those that wait for it do not make a step full."""
        room, prefix = Room(), prefix_of(5 * SHARE)
        jobs = [job_of(prefix, [10, 11]) for _ in range(num_jobs)]
        steps = room.finish(*jobs)
        assert sum(forward.num_tokens for step in steps for forward in step.forwards if forward.is_prefill) == 5 * SHARE
        assert len(steps) <= 5 + -(-num_jobs * 21 // STEP) + 1

    def test_a_prefix_alone_is_complete_when_it_is_computed(self) -> None:
        room, alone = Room(), Job(prefix_of(300), None)
        assert not alone.is_complete
        assert tokens_of(room.run(alone), alone) == 300
        assert alone.is_complete

    def test_a_prefix_alone_that_is_there_already_is_complete_without_a_step(self) -> None:
        room = Room()
        room.finish(job_of(prefix_of(300), [10]))
        alone = Job(prefix_of(300), None)
        assert room.fill(alone) is None
        assert (alone.is_complete, alone.cached_tokens) == (True, 300)


class TestPlaces:
    """Where the cache has no room for the prefix of one."""

    def test_an_older_job_that_waits_for_places_is_not_overtaken(self) -> None:
        room = Room(num_blocks=4)
        holder, waiting, behind = job_of(300, [10] * 300), job_of(300, [10]), job_of(50, [10])
        room.run(holder)
        for _ in range(2):
            step = room.run(holder, waiting, behind)
            assert step.jobs == [holder], "there would be a place for the last one"
        while not holder.is_complete:
            room.run(holder, waiting, behind)
        holder.drop_prefix(room.cache)
        assert room.run(waiting, behind).jobs == [waiting, behind]

    def test_more_prefixes_than_there_are_places_for_all_end(self) -> None:
        room = Room(num_blocks=9)
        jobs = [job_of(4 * KV_BLOCK_SIZE, [10] * 30) for _ in range(3 * MAX_LEFT_OUT)]
        room.finish(*jobs)
        assert room.cache.num_used == 0

    def test_jobs_that_need_no_places_go_on(self) -> None:
        room = Room(num_blocks=4)
        holder, waiting = job_of(300, [10] * 300), job_of(300, [10])
        room.run(holder)
        rows, tails = job_of(20, [10], "packed"), job_of(0, [10])
        room.run(holder, waiting, rows, tails)
        assert rows.is_complete
        assert tails.is_complete

    def test_what_nobody_uses_makes_room(self) -> None:
        room = Room(num_blocks=3)
        for _ in range(4):
            room.finish(job_of(300, [10]))
        assert room.cache.num_blocks == 3


class TestForwards:
    def test_tails_of_many_prefixes_share_a_forward(self) -> None:
        room = Room(num_tokens=4096)
        jobs = [job_of(200, [10, 5]) for _ in range(3)] + [job_of(0, [4])]
        forward = forward_of(room.run(*jobs), "extend")
        assert forward.jobs == jobs
        assert forward.prefix_jobs == jobs[:3]
        for job in jobs:
            check(job)

    def test_a_forward_reads_no_more_blocks_than_it_may(self) -> None:
        room = Room(num_tokens=4096, max_kv_blocks_read=5)
        jobs = [job_of(2 * KV_BLOCK_SIZE, [10]) for _ in range(4)]
        steps = [room.run(*jobs), room.run(*jobs)]
        assert [forward_of(step, "extend").jobs for step in steps] == [jobs[:2], jobs[2:]]
        assert [forward_of(step, "extend").num_blocks_read for step in steps] == [4, 4]

    def test_a_prefix_that_several_read_counts_once(self) -> None:
        room = Room(num_tokens=4096, max_kv_blocks_read=5)
        jobs = [job_of(prefix_of(4 * KV_BLOCK_SIZE), [10]) for _ in range(3)]
        assert forward_of(room.run(*jobs), "extend").jobs == jobs

    def test_one_that_reads_more_than_a_forward_may_is_alone_in_it(self) -> None:
        room = Room(num_tokens=4096, max_kv_blocks_read=5)
        long, short = job_of(7 * KV_BLOCK_SIZE, [10]), job_of(KV_BLOCK_SIZE, [10])
        assert forward_of(room.run(long, short), "extend").jobs == [long]
        assert forward_of(room.run(long, short), "extend").jobs == [short]

    def test_one_that_does_not_fit_the_blocks_read_is_first_in_the_next_step(self) -> None:
        room = Room(num_tokens=4096, max_kv_blocks_read=5)
        older, younger = job_of(4 * KV_BLOCK_SIZE, [10] * 1000), job_of(4 * KV_BLOCK_SIZE, [10])
        for served in (older, younger):
            step = room.run(older, younger)
            assert [forward.jobs for forward in step.forwards] == [[served], [served]]
        assert younger.is_complete

    def test_a_prefill_lists_no_more_blocks_than_it_may(self) -> None:
        """Those it computes, and those before them that it reads, for each of its prefixes."""
        room = Room(num_tokens=4096, max_kv_blocks_read=9)
        base = prefix_of(3 * KV_BLOCK_SIZE)
        room.finish(job_of(base, [10]))
        jobs = [job_of(np.concatenate([base, prefix_of(50, n)]), [10]) for n in range(5)]
        steps = room.finish(*jobs)
        assert [forward_of(step, "prefill").jobs for step in steps] == [jobs[:2], jobs[2:4], jobs[4:]]
        assert [forward_of(step, "prefill").num_blocks_read for step in steps] == [8, 8, 4]

    def test_a_request_with_many_labels_has_a_forward_of_its_own(self) -> None:
        few = [job_of(0, [10], labels=tuple((k,) for k in range(1, 1 + MANY_LABELS))) for _ in range(2)]
        many = [job_of(0, [10], labels=tuple((k,) for k in range(2 + MANY_LABELS))) for _ in range(2)]
        step = Room().run(few[0], many[0], few[1], many[1])
        assert [forward.jobs for forward in step.forwards] == [few, [many[0]], [many[1]]]
        for job in (*few, *many):
            check(job)

    def test_requests_with_different_numbers_of_labels_share_a_forward(self) -> None:
        jobs = [job_of(0, [4, 5], labels=labels) for labels in [((3,),), ((3,), (5,), (7,)), ((9,), (1,))]]
        step = Room().run(*jobs)
        (batch,) = [forward.batch for forward in step.forwards]
        assert batch is not None
        assert batch.label_ids.tolist() == [[3, 3, 3]] * 2 + [[3, 5, 7]] * 2 + [[9, 1, 1]] * 2
        for job in jobs:
            check(job)

    def test_normalizers_are_computed_where_one_needs_them_and_go_to_that_one(self) -> None:
        plain, normalized = job_of(0, [4]), job_of(0, [5], normalize=True)
        (forward,) = Room().run(plain, normalized).forwards
        assert forward.batch is not None
        assert forward.batch.need_logsumexp
        assert plain.logsumexp is None
        context = np.arange(5, dtype=np.int32)
        every = fake_logits(context, np.arange(512, dtype=np.int32)).astype(np.float64)
        assert normalized.logsumexp == pytest.approx([np.log(np.exp(every).sum())])

    def test_rows_of_one_layout_share_a_forward_and_others_do_not(self) -> None:
        jobs = [job_of(9, [5], algorithm) for algorithm in ("serial", "packed", "serial", "packed")]
        dense = job_of(9, [5], "packed", mask="dense")
        step = Room().run(*jobs, dense)
        assert [forward.jobs for forward in step.forwards] == [jobs[::2], jobs[1::2], [dense]]
        layouts = [(forward.batch.layout, forward.batch.mask) for forward in step.forwards if forward.batch is not None]
        assert layouts == [(Layout.CAUSAL, "segment"), (Layout.PACKED, "segment"), (Layout.PACKED, "dense")]

    def test_the_rows_of_a_dense_forward_together_keep_to_the_budget(self) -> None:
        """Each has a mask of its own; the budget is for all of them."""
        dense = [job_of(9, [91], "packed", mask="dense", token_budget=250) for _ in range(4)]
        step = Room().run(*dense)
        assert [forward.num_tokens for forward in step.forwards] == [200]
        segment = [job_of(9, [91], "packed", token_budget=250) for _ in range(4)]
        assert [forward.num_tokens for forward in Room().run(*segment).forwards] == [400]


class TestOneRequest:
    """500 items of 10 tokens behind a prefix of 100, alone: how they are cut into steps."""

    def sizes(self, algorithm: str, num_tokens: int = 2000, **options: Any) -> list[int]:
        steps = Room(num_tokens).finish(job_of(100, [10] * 500, algorithm, **options))
        return [forward.num_tokens for step in steps for forward in step.forwards]

    def test_packed_chunks_run_as_rows_of_one_forward(self) -> None:
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

    def test_the_chunk_size_bounds_the_tails_of_a_forward(self) -> None:
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
def test_any_jobs_in_any_room_end_with_the_right_logits_and_within_their_bounds(
    requests: list[tuple[str, int, list[int], int, int]],
    num_tokens: int,
    token_budget: int,
    max_kv_blocks_read: int | None,
    joins_prefill: bool,
) -> None:
    room = Room(num_tokens, num_blocks=4, max_kv_blocks_read=max_kv_blocks_read, joins_prefill=joins_prefill)
    jobs = [
        job_of(prefix_of(prefix_len, start), tail_lens, algorithm, chunk_size=chunk_size, token_budget=token_budget)
        for algorithm, prefix_len, tail_lens, chunk_size, start in requests
    ]
    for step in room.finish(*jobs):
        assert step.num_tokens == sum(forward.num_tokens for forward in step.forwards)
        num_units = sum(part.stop - part.first for forward in step.forwards for part in forward.parts)
        assert step.num_tokens <= num_tokens or num_units == 1
        for forward in step.forwards:
            for part in forward.scored_parts:
                if part.stop - part.first > 1:
                    assert part.job.unit_tokens(part.first, part.stop) <= token_budget
            num_prefixes = len(forward.block_parts) + len(forward.prefix_jobs)
            is_joined = kind_of(forward) == "joined"
            if max_kv_blocks_read is not None and (num_prefixes > 1 or is_joined):
                assert forward.num_blocks_read <= max_kv_blocks_read
    assert room.cache.num_used == 0
    assert all(job.tokens_left == job.cached_tokens for job in jobs)
