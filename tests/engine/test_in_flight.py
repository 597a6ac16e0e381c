"""In-flight steps: with async scheduling the device has the next step before it is done. No request suffers from it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import CancelledError, DeadlineExceededError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.in_flight import (
    EARLY,
    FASTER_WEIGHT,
    LAUNCH_MARGIN,
    MAX_LAUNCH_AHEAD_SECONDS,
    DeviceThread,
    InFlightSteps,
)
from prefixwise.engine.step import Step
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch
from prefixwise.plan.cost_model import CostModel, MeasuredCosts, Sample, Work
from tests.engine.live import SECONDS, VOCAB_SIZE, GatedBackend, Ticket, body_of, live_engine, pin

MARK = VOCAB_SIZE - 1
ROWS = {"algorithm": "serial"}


def has(token: int) -> Callable[[ForwardBatch], bool]:
    return lambda batch: token in batch.token_ids


@contextmanager
def engine_of(**options: Any) -> Iterator[tuple[GatedBackend, ScoringEngine]]:
    backend = GatedBackend(**{"step_tokens": 100, "async_scheduling": True, **options})
    with live_engine(backend) as engine:
        yield backend, engine


def assert_no_forward_starts(backend: GatedBackend) -> None:
    with pytest.raises(Empty):
        backend.started.get(timeout=0.05)


def until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + SECONDS
    while not condition():
        assert monotonic() < deadline, "it does not come true"
        sleep(0.001)


class TestLaunch:
    def test_the_next_step_starts_before_this_one_is_done_and_no_third(self) -> None:
        with engine_of() as (backend, engine):
            ticket = Ticket(engine, body_of([1], [[2, 3, 4, 5]] * 200, **ROWS))
            first, second = backend.next_forward(), backend.next_forward()
            assert first.num_tokens == second.num_tokens == 100
            assert_no_forward_starts(backend)
            backend.let_pass()
            backend.next_forward()
            assert_no_forward_starts(backend)
            backend.open()
            ticket.check()

    def test_one_at_a_time_where_the_device_does_not_run_ahead(self) -> None:
        with engine_of(async_scheduling=False) as (backend, engine):
            ticket = Ticket(engine, body_of([1], [[2, 3, 4, 5]] * 200, **ROWS))
            backend.next_forward()
            assert_no_forward_starts(backend)
            backend.open()
            ticket.check()

    def test_one_that_comes_while_a_step_runs_starts_beside_it(self) -> None:
        with engine_of() as (backend, engine):
            first = Ticket(engine, body_of([1], [[2]], **ROWS))
            backend.next_forward()
            second = Ticket(engine, body_of([MARK], [[2]], **ROWS))
            assert MARK in backend.next_forward().token_ids
            backend.open()
            first.check()
            second.check()

    def test_a_prefill_whose_seconds_are_asked_for_runs_by_itself(self) -> None:
        with engine_of() as (backend, engine):
            first = Ticket(engine, body_of([1], [[2]], **ROWS))
            backend.next_forward()
            is_timed = Ticket(engine, body_of([MARK], [[2]], algorithm="prefill_extend", return_debug=True))
            later = Ticket(engine, body_of([3], [[2]], **ROWS))
            assert_no_forward_starts(backend)
            backend.let_pass()
            assert MARK in backend.next_forward().token_ids
            backend.open()
            for ticket in (first, is_timed, later):
                ticket.check()

    def test_a_call_waits_for_all_that_is_in_flight(self) -> None:
        with engine_of() as (backend, engine), ThreadPoolExecutor(1) as pool:
            ticket = Ticket(engine, body_of([1], [[2, 3, 4, 5]] * 200, **ROWS))
            for _ in range(2):
                backend.next_forward()
            seen = pool.submit(engine.scheduler.call, lambda: (threading.current_thread().name, backend.num_running))
            until(lambda: bool(engine.scheduler._calls))
            backend.let_pass()
            assert_no_forward_starts(backend)
            assert not seen.done()
            backend.open()
            assert seen.result(SECONDS) == ("prefixwise-device", 0)
            assert not ticket.state.error
            ticket.check()

    def test_close_waits_for_what_is_in_flight(self) -> None:
        with engine_of() as (backend, engine), ThreadPoolExecutor(1) as pool:
            ticket = Ticket(engine, body_of([1], [[2, 3, 4, 5]] * 100, **ROWS))
            for _ in range(2):
                backend.next_forward()
            closed = pool.submit(engine.close)
            backend.open()
            closed.result(SECONDS)
            ticket.check()


class TestEnds:
    @pytest.mark.parametrize("algorithm", ["serial", "prefill_extend"])
    def test_one_that_is_cancelled_in_flight_ends_when_it_comes_back(self, algorithm: str) -> None:
        with engine_of() as (backend, engine):
            cancelled = Ticket(engine, body_of([MARK], [[2, 3, 4, 5]] * 200, algorithm=algorithm))
            for _ in range(2):
                backend.next_forward()
            other = Ticket(engine, body_of([1], [[2]], algorithm=algorithm))
            cancelled.state.cancel()
            sleep(0.02)
            assert not cancelled.state.is_done
            backend.open()
            with pytest.raises(CancelledError):
                cancelled.result()
            other.check()
            marked = sum(map(has(MARK), backend.forwards))
        assert marked <= 3, "what was in flight, and no more"

    def test_a_deadline_that_passes_in_flight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        passed = [0.0]
        for module in ("request_state", "live_requests", "scheduler"):
            monkeypatch.setattr(f"prefixwise.engine.{module}.monotonic", lambda: monotonic() + passed[0])
        with engine_of() as (backend, engine):
            late = Ticket(engine, body_of([MARK], [[2, 3, 4, 5]] * 200, **ROWS), deadline=monotonic() + 1000)
            for _ in range(2):
                backend.next_forward()
            passed[0] = 2000.0
            backend.let_pass()
            sleep(0.02)
            assert not late.state.is_done, "a part of it is on the device"
            backend.open()
            with pytest.raises(DeadlineExceededError):
                late.result()
            Ticket(engine, body_of([1], [[2]], **ROWS)).check()

    def test_a_prefix_that_another_computes_is_not_pinned_before_it_is_there(self) -> None:
        query = [k % 40 for k in range(KV_BLOCK_SIZE)]
        with engine_of(step_tokens=1000, joins_prefill=True) as (backend, engine), ThreadPoolExecutor(1) as pool:
            first = Ticket(engine, body_of(query, [[MARK]], algorithm="prefill_extend"))
            backend.next_forward()
            pinned = pool.submit(pin, engine, query)
            until(lambda: len(engine.scheduler._live) == 2)
            sleep(0.02)
            assert not pinned.done()
            backend.open()
            assert pinned.result(SECONDS).cached_tokens == KV_BLOCK_SIZE
            first.check()


class TestFailures:
    """Each step has requests of its own, as a row of each fills it."""

    @staticmethod
    def two_in_flight(backend: GatedBackend, engine: ScoringEngine) -> list[Ticket]:
        def submit() -> list[Ticket]:
            return [Ticket(engine, body_of([token], [[1] * 98] * rows, **ROWS)) for token, rows in ((MARK, 1), (3, 2))]

        tickets = engine.scheduler.call(submit)  # both before the next step
        for _ in range(2):
            backend.next_forward()
        return tickets

    def test_what_was_behind_a_failure_is_computed_again(self) -> None:
        with engine_of() as (backend, engine):
            backend.fails = has(MARK)
            bad, good = self.two_in_flight(backend, engine)
            backend.open()
            with pytest.raises(RuntimeError, match="the device has failed"):
                bad.result()
            result = good.check()
            assert [batch.segments for batch in good.state.batches] == [1, 1], "the lost one does not count"
            assert result.usage.cached_tokens == 0
            assert engine.scheduler.stats().items_scored == 2
            assert sum(map(has(3), backend.forwards)) > 2, "the one behind the failure twice"

    def test_what_was_before_a_failure_is_answered(self) -> None:
        with engine_of() as (backend, engine):
            backend.fails = has(3)
            good, bad = self.two_in_flight(backend, engine)
            backend.open()
            with pytest.raises(RuntimeError, match="the device has failed"):
                bad.result()
            good.check()

    def test_one_that_does_not_start_leaves_the_one_before_it_alone(self) -> None:
        with engine_of() as (backend, engine):
            backend.fails_to_start = has(3)
            good = Ticket(engine, body_of([MARK], [[1] * 98], **ROWS))
            backend.next_forward()
            bad = Ticket(engine, body_of([3], [[1] * 98], **ROWS))
            backend.open()
            with pytest.raises(RuntimeError, match="the device does not start"):
                bad.result()
            good.check()

    def test_items_go_back_and_compute_their_prefix_again(self) -> None:
        query = [k % 40 for k in range(2 * KV_BLOCK_SIZE)]
        body = body_of(query, [[k % 40, 1, 2, 3] for k in range(150)], algorithm="prefill_extend")
        with engine_of(step_tokens=400, joins_prefill=True) as (backend, engine):
            backend.fails = has(MARK)
            cached = Ticket(engine, body)
            backend.let_pass(3)
            cached.check()
            while not backend.started.empty():
                backend.next_forward()
            bad = Ticket(engine, body_of([MARK], [[1] * 398], **ROWS))
            backend.next_forward()
            good = Ticket(engine, body)
            assert backend.next_forward().prefixes[0].blocks, "it reads what is cached"
            backend.open()
            with pytest.raises(RuntimeError):
                bad.result()
            assert good.check().usage.cached_tokens == 0
            assert sum(batch.segments for batch in good.state.batches) == 150


class TestTimes:
    def test_seconds_are_counted_once_and_begin_behind_the_step_before(self) -> None:
        with engine_of() as (backend, engine):
            begin = monotonic()
            tickets = [Ticket(engine, body_of([token], [[1] * 98], **ROWS)) for token in (MARK, 3)]
            for _ in range(2):
                backend.next_forward()
            for ticket in tickets:
                sleep(0.05)
                backend.let_pass()
                ticket.wait()
            lasted = monotonic() - begin
            first, second = (ticket.state for ticket in tickets)
            assert first.device_seconds >= 0.05 <= second.device_seconds
            assert first.device_seconds + second.device_seconds <= lasted
            assert engine.scheduler.stats().device_seconds <= lasted
            assert second.queue_seconds >= 0.05


class TestWhenToStart:
    @pytest.fixture
    def steps(self) -> Iterator[InFlightSteps]:
        costs = MeasuredCosts(CostModel(0.0, 0.0, 0.001))  # a second for 1,000 query-key pairs
        steps = InFlightSteps(FakeBackend(async_scheduling=True), wake=lambda: None, costs=costs)
        yield steps
        steps.close()

    @staticmethod
    def measure(steps: InFlightSteps) -> None:
        """A step that took as long as expected."""
        assert steps._costs is not None
        steps._costs.record(Sample(Work(0, 1000), 1.0))

    def test_a_little_before_the_device_is_done(self, steps: InFlightSteps) -> None:
        self.measure(steps)
        assert steps.seconds_until_launch(0.0) == 0.0
        steps.launch(Step([], 10, num_pairs=3000), 20.0)
        until(lambda: steps._steps[0].outputs.done())
        steps._launch_seconds = 0.004
        assert steps.seconds_until_launch(21.0) == pytest.approx(20.0 + 3 * EARLY - LAUNCH_MARGIN * 0.004 - 21.0)
        assert steps.seconds_until_launch(22.999) == 0.0
        steps.launch(Step([], 10), 22.999)
        assert steps.seconds_until_launch(22.999) is None

    def test_at_once_where_nothing_is_known_yet(self, steps: InFlightSteps) -> None:
        steps.launch(Step([], 10_000, num_pairs=3000), 20.0)
        assert steps.seconds_until_launch(20.0) == 0.0

    def test_a_slow_launch_is_believed_and_forgotten_slowly(self, steps: InFlightSteps) -> None:
        steps._learn(0.01)
        assert steps._launch_seconds == 0.01
        steps._learn(0.005)
        assert steps._launch_seconds == pytest.approx(0.01 - 0.005 * FASTER_WEIGHT)

    def test_a_launch_that_waited_for_a_compiler_counts_as_a_slow_one(self, steps: InFlightSteps) -> None:
        steps._learn(60.0)
        assert steps._launch_seconds == MAX_LAUNCH_AHEAD_SECONDS

    def test_the_host_seconds_of_a_launch_are_learnt(self, steps: InFlightSteps) -> None:
        steps.launch(Step([], 10), monotonic() - 0.005)
        until(lambda: steps._steps[0].outputs.done())
        assert steps._launch_seconds >= 0.005

    def test_a_step_begins_when_the_one_before_it_has_ended(self, steps: InFlightSteps) -> None:
        steps.launch(Step([], 1000), 10.0)
        steps.launch(Step([], 1000), 10.5)
        begins = []
        for end in (11.0, 12.5):
            until(lambda: steps._steps[0].outputs.done())
            done = steps.pop_done()
            assert done is not None
            begins.append(steps.record_end(done, end))
        assert np.array_equal(begins, [10.0, 11.0])


@contextmanager
def device_thread() -> Iterator[DeviceThread]:
    device = DeviceThread()
    try:
        yield device
    finally:
        device.stop()


class TestDeviceThread:
    def test_all_runs_in_order_on_one_thread_of_its_own(self) -> None:
        ran: list[tuple[int, str]] = []
        with device_thread() as device:
            for number in range(100):
                device.submit(lambda number: ran.append((number, threading.current_thread().name)), number)
        assert ran == [(number, "prefixwise-device") for number in range(100)]

    def test_arguments_go_in_and_the_answer_comes_back(self) -> None:
        with device_thread() as device:
            assert device.submit(divmod, 17, 5).result(SECONDS) == (3, 2)
            assert device.submit(int, "ff", base=16).result(SECONDS) == 255

    def test_it_knows_itself(self) -> None:
        with device_thread() as device:
            assert not device.is_current
            assert device.submit(lambda: device.is_current).result(SECONDS)

    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
    def test_what_fails_is_the_callers_and_the_next_runs(self, kind: type[BaseException]) -> None:
        def fail() -> None:
            raise kind("no")

        with device_thread() as device:
            failing, next_one = device.submit(fail), device.submit(abs, -3)
            assert isinstance(failing.exception(SECONDS), kind)
            assert next_one.result(SECONDS) == 3

    def test_it_ends_after_all_that_was_given_before(self) -> None:
        before = set(threading.enumerate())
        device, begin = DeviceThread(), threading.Event()
        ran: list[int] = []
        device.submit(begin.wait, SECONDS)
        for number in range(5):
            device.submit(ran.append, number)
        begin.set()
        device.stop()
        assert ran == [0, 1, 2, 3, 4]
        assert set(threading.enumerate()) <= before

    def test_it_holds_no_reference_while_it_waits_for_work(self) -> None:
        """An answer may hold much memory."""

        class Large:
            pass

        with device_thread() as device:
            gone = weakref.ref(device.submit(Large).result(SECONDS))
            device.submit(int).result(SECONDS)
            gc.collect()
            assert gone() is None
