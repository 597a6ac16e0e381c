"""The scheduler when something fails, when it ends, and as other threads see it."""

from __future__ import annotations

import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from prefixwise.contract.errors import BackendError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.request_state import RequestState, ScoringTask
from prefixwise.engine.step_filler import StepFiller
from prefixwise.forward.backend import PROBE
from prefixwise.forward.batch import KV_BLOCK_SIZE
from tests.engine.live import (
    ALGORITHMS,
    MARK,
    SECONDS,
    GatedBackend,
    Seen,
    Ticket,
    body_of,
    has,
    live_engine,
    num_prefills,
    query_of,
)

# Failures


class TestFailures:
    """One request has a row that is longer than a step, so it runs alone, and the device fails."""

    STEP = 100
    BAD = body_of([MARK], [[1] * 300], algorithm="serial")
    LONG = body_of(query_of(300), [[k % 40, 1, 2] for k in range(200)], algorithm="prefill_extend")

    @pytest.mark.parametrize("is_waited_for", [True, False])
    def test_others_compute_their_prefixes_again_and_end_right(
        self, is_waited_for: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = GatedBackend(step_tokens=self.STEP)
        if is_waited_for:
            backend.fails = has(MARK)
        else:
            backend.fails_to_start = has(MARK)
        with live_engine(backend) as engine, caplog.at_level(logging.ERROR, "prefixwise"):
            running = Ticket(engine, self.LONG)
            while running.state.num_items_done == 0:
                backend.next_forward()
                backend.let_pass()
            bad, waiting = Ticket(engine, self.BAD), Ticket(engine, body_of(query_of(300), [[7]]))
            backend.open()
            with pytest.raises(RuntimeError, match="the device"):
                bad.result()
            running.check()
            waiting.check()
            assert caplog.messages == ["a forward pass failed"] * 2, "it was run again"
            assert num_prefills(backend) == 2 * 3, "three blocks, one to a step, twice"
            assert Ticket(engine, body_of(query_of(300), [[8]])).check().usage.cached_tokens == 300
            stats = engine.scheduler.stats()
            assert stats.items_scored == 200 + 1 + 1

    def test_tokens_that_are_to_be_computed_again_are_counted_again(self) -> None:
        backend = GatedBackend(step_tokens=self.STEP)
        backend.fails_to_start = has(MARK)
        with live_engine(backend) as engine:
            running = Ticket(engine, self.LONG)
            while running.state.num_items_done == 0:
                backend.next_forward()
                backend.let_pass()
            bad = Ticket(engine, self.BAD)
            left = Seen(lambda batch: running.state.tokens_left)
            backend.fails = left
            backend.open()
            running.check()
            assert bad.state.error is not None
        assert left.what[-1] == backend.forwards[-1].num_tokens, "the last forward's are the last"

    def test_of_the_requests_in_a_step_only_the_one_that_fails_alone_gets_the_error(self) -> None:
        backend = GatedBackend()
        backend.fails = has(MARK)
        with live_engine(backend) as engine:
            first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
            backend.next_forward()
            bad, good = [Ticket(engine, body_of([n], [[2]], algorithm="packed")) for n in (MARK, 5)]
            backend.open()
            with pytest.raises(RuntimeError, match="the device has failed"):
                bad.result()
            good.check()
            first.check()
            stats = engine.scheduler.stats()
            assert (stats.failed_steps, stats.reruns) == (2, 2)

    def test_a_prefix_whose_forward_failed_is_not_cached(self) -> None:
        backend = GatedBackend()
        query = [*query_of(200), MARK]
        with live_engine(backend) as engine:
            failing = [True]
            backend.fails = lambda batch: failing[0] and bool(batch.cache_segments)
            first = Ticket(engine, body_of(query, [[1]]))
            backend.open()
            with pytest.raises(RuntimeError):
                first.result()
            failing[0] = False
            assert Ticket(engine, body_of(query, [[1]])).check().usage.cached_tokens == 0

    def test_one_that_waited_for_a_prefix_that_failed_computes_it_itself(self) -> None:
        backend = GatedBackend(step_tokens=512)
        query = query_of(4 * KV_BLOCK_SIZE)
        with live_engine(backend, scheduler={"chunked_prefill_size": KV_BLOCK_SIZE}) as engine:
            backend.fails = lambda batch: MARK in batch.token_ids or len(backend.forwards) == 1
            failing = Ticket(engine, body_of(query, [[MARK]]))
            backend.next_forward()
            waiting = Ticket(engine, body_of(query, [[2]]))
            backend.open()
            with pytest.raises(RuntimeError):
                failing.result()
            assert waiting.check().usage.cached_tokens == 0

    def test_a_fault_of_the_scheduler_itself_ends_what_is_live_and_no_more(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = GatedBackend(is_open=True)
        with live_engine(backend) as engine, caplog.at_level(logging.ERROR, "prefixwise"):
            with monkeypatch.context() as patch:
                patch.setattr(StepFiller, "fill", lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    Ticket(engine, body_of([1], [[2]])).result()
            assert caplog.messages == ["the scheduler failed"]
            Ticket(engine, body_of([1], [[2]])).check()

    def test_an_on_change_that_fails_hurts_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        backend = GatedBackend(step_tokens=64)
        with live_engine(backend) as engine, caplog.at_level(logging.ERROR, "prefixwise"):
            prepared = engine.prepare(parse_score_request(body_of([1], [[2, 3]] * 100, algorithm="prefill_extend")))
            states = [engine.submit(prepared, on_change=lambda: 1 // 0) for _ in range(3)]  # type: ignore[arg-type]
            backend.next_forward()
            beside = Ticket(engine, body_of([1], [[4, 5]] * 100, algorithm="prefill_extend"))
            backend.open()
            beside.check()
            Ticket(engine, body_of([1], [[2]])).check()
            expected = Ticket(engine, body_of([1], [[2, 3]] * 100, algorithm="prefill_extend")).check()
            while not all(state.is_done for state in states):
                Ticket(engine, body_of([1], [[2]])).check()
            assert [engine.finish(prepared, state).scores for state in states] == [expected.scores] * 3
        assert set(caplog.messages) == {"a request's on_change failed"}

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("joins", [False, True])
    @pytest.mark.parametrize("async_scheduling", [False, True])
    def test_failures_at_random_leave_nothing_wrong_behind(
        self, algorithm: str, joins: bool, async_scheduling: bool
    ) -> None:
        geometry = {"step_tokens": 150, "num_kv_blocks": 6, "max_context_len": 600}
        backend = GatedBackend(is_open=True, **geometry, joins_prefill=joins, async_scheduling=async_scheduling)
        chance = np.random.default_rng(0)
        backend.fails = lambda batch: batch is not PROBE and bool(chance.random() < 0.2)
        outcomes = []
        with live_engine(backend) as engine:
            for _ in range(2):
                bodies = [
                    body_of(query_of(150 + 50 * (n % 3)), [[n, k] for k in range(12)], algorithm=algorithm)
                    for n in range(8)
                ]
                for ticket in [Ticket(engine, body) for body in bodies]:
                    ticket.wait()
                    outcomes.append(ticket.state.error is None)
                    if outcomes[-1]:
                        ticket.check()
            assert engine.scheduler.stats().failed_steps
        assert any(outcomes)


# The end


class TestClose:
    def test_what_has_been_started_ends_and_what_waits_is_refused(self) -> None:
        backend = GatedBackend(step_tokens=64)
        with live_engine(backend) as engine:
            started = Ticket(engine, body_of([1], [[2, 3]] * 200))
            backend.next_forward()
            waiting = Ticket(engine, body_of([1], [[2]]))
            closing = threading.Thread(target=engine.close)
            closing.start()
            assert engine.scheduler._closing.wait(SECONDS)
            with pytest.raises(BackendError, match="this scorer is closed"):
                Ticket(engine, body_of([1], [[2]]))
            backend.open()
            closing.join(SECONDS)
            assert not closing.is_alive()
            started.check()
            with pytest.raises(BackendError, match="closed before the request's turn came"):
                waiting.result()

    def test_afterwards_nothing_is_taken_in(self) -> None:
        backend = GatedBackend(is_open=True)
        with live_engine(backend) as engine:
            prepared = engine.prepare(parse_score_request(body_of([1], [[2]])))
            engine.close()
            engine.close()
            with pytest.raises(BackendError, match="closed"):
                engine.submit(prepared)
            with pytest.raises(BackendError, match="closed"):
                engine.scheduler.call(lambda: None)
            assert not engine.release_prefix("unknown")

    def test_no_block_is_held_afterwards(self) -> None:
        """Not even by one who still holds the engine."""
        backend = GatedBackend(is_open=True)
        with live_engine(backend) as engine:
            Ticket(engine, body_of(query_of(1000), [[2]], algorithm="prefill_extend")).check()
            assert engine.scheduler.stats().cached_blocks == backend.num_blocks_held == 8
            engine.close()
            assert engine.scheduler.stats().cached_blocks == backend.num_blocks_held == 0

    def test_threads_that_come_while_it_closes_are_all_answered(self) -> None:
        backend = GatedBackend(is_open=True)
        with live_engine(backend) as engine, ThreadPoolExecutor(8) as pool:

            def score(number: int) -> bool:
                if number == 20:
                    engine.close()
                try:
                    Ticket(engine, body_of([number % 40], [[2]])).check()
                except BackendError:
                    return False
                return True

            answers = list(pool.map(score, range(60)))
        assert answers[0]
        assert not answers[20]

    def test_the_device_is_given_back_by_the_thread_that_owns_it(self) -> None:
        backend = GatedBackend(is_open=True)
        with live_engine(backend) as engine:
            Ticket(engine, body_of([1], [[2]])).check()
            closers = [threading.Thread(target=engine.close) for _ in range(3)]
            for thread in closers:
                thread.start()
            for thread in closers:
                thread.join(SECONDS)
        assert backend.num_closed == 1


# Other threads


class TestCall:
    def test_it_runs_between_steps_on_the_thread_that_owns_the_device(self) -> None:
        backend = GatedBackend(step_tokens=64)
        with live_engine(backend) as engine, ThreadPoolExecutor(1) as pool:
            ticket = Ticket(engine, body_of([1], [[2, 3]] * 200, algorithm="prefill_extend"))
            backend.next_forward()

            def look() -> tuple[str, int, bool]:
                return threading.current_thread().name, backend.num_running, ticket.state.is_done

            seen = pool.submit(engine.scheduler.call, look)
            while not engine.scheduler._calls:
                assert not seen.done()
            backend.open()
            assert seen.result(SECONDS) == ("prefixwise-device", 0, False)
            ticket.check()

    def test_what_it_raises_is_the_callers(self) -> None:
        with live_engine(GatedBackend(is_open=True)) as engine:
            with pytest.raises(ZeroDivisionError):
                engine.scheduler.call(lambda: 1 // 0)
            Ticket(engine, body_of([1], [[2]])).check()

    def test_a_call_within_a_call_runs_at_once(self) -> None:
        with live_engine(GatedBackend(is_open=True)) as engine:
            scheduler = engine.scheduler
            assert scheduler.call(lambda: scheduler.call(lambda: 5)) == 5


def test_a_request_that_is_done_holds_no_reference_to_waiters() -> None:
    class Waiter:
        state: RequestState | None = None

        def notify(self) -> None:
            assert self.state is not None and self.state.is_done

    waiter = Waiter()
    waiter.state = RequestState(ScoringTask(np.arange(3, dtype=np.int32), None), waiter.notify)
    waiter.state.finish()
    is_there = weakref.ref(waiter)
    del waiter
    assert is_there() is None, "only the garbage collector would find them"


class TestProgress:
    def test_it_is_reported_on_the_callers_thread(self) -> None:
        backend = GatedBackend(is_open=True)
        reported: list[tuple[int, int, bool]] = []
        body = body_of([1], [[2], [3], [4]], algorithm="prefill_extend")
        with live_engine(backend, chunk_size=1) as engine:
            here = threading.current_thread()
            engine.score(
                parse_score_request(body),
                lambda done, total: reported.append((done, total, threading.current_thread() is here)),
            )
        assert reported[-1] == (3, 3, True)
        assert all(reported[i] <= reported[i + 1] for i in range(len(reported) - 1))
        assert all(is_here for _, _, is_here in reported)

    def test_only_what_was_answered_counts(self) -> None:
        """The next step may be running when the caller looks."""
        backend = GatedBackend()
        with live_engine(backend, chunk_size=1) as engine:
            ticket = Ticket(engine, body_of([1], [[2], [3], [4]], algorithm="prefill_extend"))
            backend.let_pass(2)
            for _ in range(3):  # the prefill, and two items
                backend.next_forward()
            assert ticket.state.num_items_done == 1

    def test_an_interrupt_in_it_cancels_the_request(self) -> None:
        backend = GatedBackend(step_tokens=64)
        with live_engine(backend) as engine:

            def interrupt(done: int, total: int) -> None:
                raise KeyboardInterrupt

            backend.let_pass(2)  # the prefill, and the first items
            request = parse_score_request(body_of([1], [[2, 3]] * 2000, algorithm="prefill_extend"))
            with pytest.raises(KeyboardInterrupt):
                engine.score(request, interrupt)
            backend.open()
            Ticket(engine, body_of([1], [[2]])).check()
            assert engine.scheduler.stats().running_requests == 0
        assert len(backend.forwards) < 6


class TestStats:
    @pytest.mark.parametrize("joins", [False, True])
    def test_they_add_up(self, joins: bool) -> None:
        backend = GatedBackend(is_open=True, step_tokens=200, joins_prefill=joins)
        backend.info = replace(backend.info, token_multiple=64)
        with live_engine(backend) as engine:
            for algorithm in ALGORITHMS:
                for _ in range(2):
                    Ticket(engine, body_of(query_of(300), [[1, 2], [3], []], algorithm=algorithm)).check()
            stats = engine.scheduler.stats()
        tokens = [batch.num_tokens for batch in backend.forwards]
        assert (stats.forwards, stats.tokens_computed) == (len(tokens), sum(tokens))
        assert stats.tokens_padded == sum(-(-n // 64) * 64 for n in tokens)
        assert stats.fill_ratio == sum(tokens) / stats.tokens_padded
        assert stats.items_scored == 6 * 3
        assert 0 < stats.steps <= stats.forwards
        assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (600, 300)
        assert (stats.cached_blocks, stats.used_blocks, stats.pinned_blocks) == (3, 0, 0)
        assert stats.device_seconds > 0

    def test_running_and_waiting_requests_are_reported_separately(self) -> None:
        backend = GatedBackend()
        with live_engine(backend) as engine:
            idle = engine.scheduler.stats()
            assert (idle.running_requests, idle.waiting_requests, idle.waiting_tokens, idle.fill_ratio) == (
                0,
                0,
                0,
                1.0,
            )
            running = Ticket(engine, body_of([1] * 5, [[2]] * 10, algorithm="prefill_extend"))
            backend.next_forward()
            backend.next_forward()
            waiting = Ticket(engine, body_of([1] * 5, [[2]] * 20, algorithm="prefill_extend"))
            stats = engine.scheduler.stats()
            assert (stats.running_requests, stats.running_tokens) == (1, 15)
            assert (stats.waiting_requests, stats.waiting_tokens) == (1, 25)
            assert (stats.cached_blocks, stats.used_blocks) == (1, 1)
            backend.open()
            running.check()
            waiting.check()
