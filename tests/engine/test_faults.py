"""A device that fails, hangs or lies: what each request gets, and what the engine's health, metrics and log say."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixwise.backends.load import load_backend
from prefixwise.contract.errors import BackendError, InternalError, UnavailableError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.health import STALL_FACTOR, STALL_SECONDS, EngineHealth, EngineState, StepTimes, Watchdog
from prefixwise.engine.step_limits import LEAST_TOKENS_IN_MEMORY, STEPS_UNTIL_GROWTH, StepBudget, StepLimits
from prefixwise.forward.backend import BackendOptions
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.models.sources import open_checkpoint
from tests.engine.live import MARK, SECONDS, GatedBackend, Ticket, body_of, engine_on, has, live_engine, query_of
from tests.faults import SECRET, FaultyBackend, Kind, Place

TIMEOUT = 300.0  # seconds of the watchdog; the tests make them pass
PACKED = {"algorithm": "packed"}  # no KV blocks


@contextmanager
def faulty(**options: Any) -> Iterator[tuple[FaultyBackend, GatedBackend, ScoringEngine]]:
    """An engine that must survive its faults, and must be left with nothing that is held."""
    gated = GatedBackend(**options)
    faults = FaultyBackend(gated)
    with live_engine(gated, faults=faults, scheduler={"watchdog_timeout": TIMEOUT}) as engine:
        yield faults, gated, engine
        assert state_of(engine.scheduler.health) is EngineState.OK


@contextmanager
def failing(timeout: float = TIMEOUT, **options: Any) -> Iterator[tuple[FaultyBackend, ScoringEngine]]:
    """An engine that must fail, and be closed without waiting for its device."""
    before = set(threading.enumerate())
    faults = FaultyBackend(GatedBackend(is_open=True, **options))
    engine = engine_on(faults, scheduler={"watchdog_timeout": timeout})
    try:
        yield faults, engine
        assert engine.scheduler.health.failed.wait(SECONDS)
        engine.close()
        assert engine.scheduler.admission.tokens == 0
        assert engine.scheduler.stats().running_requests == 0
    finally:
        faults.clear()
        engine.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(SECONDS)


def in_one_step(gated: GatedBackend, engine: ScoringEngine, *bodies: dict[str, Any]) -> list[Ticket]:
    """Requests that share a step: they come while the device is busy with another one, at the gate."""
    first = Ticket(engine, body_of([1], [[2]], **PACKED))
    gated.next_forward()
    tickets = [Ticket(engine, body) for body in bodies]
    gated.open()
    first.check()
    return tickets


class TestRerun:
    """A step fails once, or for one of its requests."""

    @pytest.mark.parametrize("async_scheduling", [False, True])
    @pytest.mark.parametrize("place", ["start", "wait"])
    @pytest.mark.parametrize("kind", ["raise", "exit", "shape", "dtype"])
    def test_after_one_failure_all_requests_of_the_step_get_their_scores(
        self, kind: Kind, place: Place, async_scheduling: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        with faulty(joins_prefill=True, async_scheduling=async_scheduling) as (faults, gated, engine):
            faults.inject(kind, at=place, when=has(MARK))
            bodies = [body_of([MARK, *query_of(200)], [[n, 3], [n]]) for n in range(3)]
            for ticket in in_one_step(gated, engine, *bodies):
                ticket.check()
            stats = engine.scheduler.stats()
            assert (faults.struck[kind], stats.failed_steps) == (1, 1)
            assert stats.reruns in ((1, 2, 3) if async_scheduling else (3,)), (
                "a second step may be in flight before all came"
            )
            assert caplog.messages == ["a forward pass failed"]

    @pytest.mark.parametrize("joins", [False, True])
    def test_the_request_that_fails_every_step_is_found_and_gets_the_error(self, joins: bool) -> None:
        """Also where its prefix takes several steps, which succeed, before its items fail."""
        with faulty(joins_prefill=joins, step_tokens=2 * KV_BLOCK_SIZE) as (faults, gated, engine):
            faults.inject("raise", times=None, when=has(MARK))
            query = query_of(5 * KV_BLOCK_SIZE)
            bodies = [body_of(query, [[n, 2]] * 30, algorithm="prefill_extend") for n in (3, MARK, 5, 6)]
            tickets = in_one_step(gated, engine, *bodies)
            with pytest.raises(RuntimeError, match=SECRET):
                tickets.pop(1).result()
            for ticket in tickets:
                ticket.check()

    def test_several_that_fail_are_all_found(self) -> None:
        with faulty() as (faults, gated, engine):
            faults.inject("exit", times=None, when=has(MARK))
            bodies = [body_of([n % 40], [[MARK if n % 3 == 0 else 2]], **PACKED) for n in range(9)]
            for n, ticket in enumerate(in_one_step(gated, engine, *bodies)):
                if n % 3 == 0:
                    with pytest.raises(BackendError, match="a forward pass failed: SystemExit"):
                        ticket.result()
                else:
                    ticket.check()

    def test_blocks_of_a_failed_step_are_not_cached(self) -> None:
        with faulty(joins_prefill=True) as (faults, gated, engine):
            faults.inject("raise")
            gated.open()
            body = body_of(query_of(300), [[1]], algorithm="prefill_extend")
            assert Ticket(engine, body).check().usage.cached_tokens == 0
            assert len(gated.made) == 2 * 3
            assert Ticket(engine, body).check().usage.cached_tokens == 300

    def test_one_that_is_cancelled_meanwhile_is_not_run_again(self) -> None:
        with faulty() as (faults, gated, engine):
            faults.inject("raise")
            ticket = Ticket(engine, body_of([1], [[2]]))
            gated.next_forward()
            ticket.state.cancel()
            gated.open()
            ticket.wait()
            Ticket(engine, body_of([1], [[3]])).check()
            assert engine.scheduler.stats().reruns == 0
            assert len(gated.forwards) == 2


def test_a_rerun_on_a_real_backend_has_the_same_bits(checkpoint_of: Callable[[str], Path]) -> None:
    options = BackendOptions(backend="torch", device="cpu", dtype="float32", token_budget=512)
    faults = FaultyBackend(load_backend(open_checkpoint(checkpoint_of("llama")), options))
    engine = engine_on(faults)
    bodies = [body_of(query_of(1 + 200 * (n % 3), n), [[n, k] for k in range(5)]) for n in range(1, 7)]
    expected = [engine.score(parse_score_request(body)).scores for body in bodies]
    faults.inject("raise")
    faults.inject("raise", times=None, when=has(MARK))
    poisoned, *tickets = [Ticket(engine, body) for body in (body_of([MARK], [[1]]), *bodies)]
    with pytest.raises(RuntimeError, match=SECRET):
        poisoned.result()
    assert [ticket.result().scores for ticket in tickets] == expected
    assert engine.scheduler.stats().failed_steps >= 2
    engine.close()


class TestLies:
    def test_a_wrong_shape_is_an_error_and_no_broadcast(self) -> None:
        with faulty(is_open=True) as (faults, _, engine):
            faults.inject("shape", times=None, when=has(MARK))
            ticket = Ticket(engine, body_of([MARK], [[1], [2], [3]], **PACKED))
            with pytest.raises(BackendError, match=r"label_logits \[3, 2\] of float32, got \[1, 2\] of float32"):
                ticket.result()

    def test_another_dtype_is_an_error(self) -> None:
        with faulty(is_open=True) as (faults, _, engine):
            faults.inject("dtype", times=None, when=has(MARK))
            with pytest.raises(BackendError, match=r"\[1, 2\] of float32, got \[1, 2\] of float64"):
                Ticket(engine, body_of([MARK], [[1]], **PACKED)).result()

    def test_nan_is_an_error_of_the_request_and_its_prefix_is_not_cached(self) -> None:
        body = body_of(query_of(300), [[1]], algorithm="prefill_extend")
        with faulty(is_open=True) as (faults, _, engine):
            other = body_of(query_of(200, 7), [[1]], algorithm="prefill_extend")
            Ticket(engine, other).check()
            faults.inject("nan")
            with pytest.raises(InternalError, match="not a finite number"):
                Ticket(engine, body).result()
            assert Ticket(engine, body).check().usage.cached_tokens == 0
            assert Ticket(engine, other).check().usage.cached_tokens == 200

    def test_requests_that_overflow_do_not_end_the_engine(self) -> None:
        with faulty(is_open=True) as (faults, _, engine):
            faults.inject("nan", times=None, when=has(MARK))
            for _ in range(7):
                with pytest.raises(InternalError, match="not a finite number"):
                    Ticket(engine, body_of([MARK], [[1]])).result()
            Ticket(engine, body_of([1], [[1]])).check()


class TestOutOfMemory:
    def test_steps_become_smaller_until_they_fit(self, caplog: pytest.LogCaptureFixture) -> None:
        with faulty(step_tokens=2000) as (faults, gated, engine):
            faults.inject("out_of_memory", above=300)
            bodies = [body_of([n], [[k % 40, 2, 3] for k in range(200)], algorithm="prefill_extend") for n in range(3)]
            for ticket in in_one_step(gated, engine, *bodies):
                ticket.check()
            assert faults.struck["out_of_memory"] == len([each for each in caplog.messages if "out of memory" in each])
            assert max(batch.num_tokens for batch in gated.forwards[-3:]) <= 300

    def test_an_item_that_does_not_fit_alone_gets_the_error(self) -> None:
        with faulty(step_tokens=256, is_open=True) as (faults, _, engine):
            faults.inject("out_of_memory", above=500)
            with pytest.raises(MemoryError, match=SECRET):
                Ticket(engine, body_of([1], [[2] * 600], **PACKED)).result()
            Ticket(engine, body_of([1], [[2] * 400], **PACKED)).check()

    def test_after_many_steps_they_may_grow_again(self) -> None:
        budget = StepBudget(StepLimits(1000))
        assert budget.shrink(900)
        assert budget.limits.num_tokens == 450
        assert not budget.shrink(900), "they are as small already"
        assert not budget.shrink(LEAST_TOKENS_IN_MEMORY), "a small step did not fail for its size"
        assert budget.shrink(LEAST_TOKENS_IN_MEMORY + 1)
        assert budget.limits.num_tokens == LEAST_TOKENS_IN_MEMORY
        assert not budget.shrink(LEAST_TOKENS_IN_MEMORY + 1)
        for expected in (2 * LEAST_TOKENS_IN_MEMORY, 4 * LEAST_TOKENS_IN_MEMORY, 1000, 1000):
            for _ in range(STEPS_UNTIL_GROWTH):
                budget.count_step()
            assert budget.limits.num_tokens == expected


class TestFailedDevice:
    """Nothing helps but a restart: every request gets an error at once that says so."""

    @pytest.mark.parametrize("async_scheduling", [False, True])
    @pytest.mark.parametrize(
        ("kind", "place"), [("raise", "start"), ("raise", "wait"), ("exit", "start"), ("shape", "wait")]
    )
    def test_all_requests_get_an_error_that_asks_to_retry_elsewhere(
        self, kind: Kind, place: Place, async_scheduling: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        with failing(async_scheduling=async_scheduling) as (faults, engine):
            reasons: list[str] = []
            engine.scheduler.health.when_failed(reasons.append)
            Ticket(engine, body_of([1], [[2]])).check()
            faults.inject(kind, at=place, times=None)
            for ticket in [Ticket(engine, body_of([n], [[2]], **PACKED)) for n in range(3)]:
                check_failed(ticket, "it cannot compute one token any more")
            assert state_of(engine.scheduler.health) is EngineState.FAILED
            assert reasons == [engine.scheduler.health.reason]
            critical = [record.message for record in caplog.records if record.levelno == logging.CRITICAL]
            assert critical == [f"the engine has failed: {reasons[0]}"]
            with pytest.raises(UnavailableError):
                Ticket(engine, body_of([1], [[2]]))
            with pytest.raises(UnavailableError):
                engine.scheduler.call(lambda: None)

    def test_a_device_that_gives_nan_alone_has_failed(self) -> None:
        with failing() as (faults, engine):
            faults.inject("nan", times=None)
            for _ in range(3):
                with pytest.raises(InternalError, match="not a finite number"):
                    Ticket(engine, body_of([1], [[2]])).result()


def check_failed(ticket: Ticket, reason: str) -> None:
    with pytest.raises(UnavailableError, match=reason) as caught:
        ticket.result()
    assert (caught.value.status, caught.value.code) == (503, "engine_failed")
    assert caught.value.retry_after
    assert SECRET not in caught.value.message


class TestScheduler:
    def test_a_scheduler_that_dies_leaves_no_request_waiting(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def die(*_: object) -> None:
            raise SystemExit

        with failing() as (faults, engine):
            faults.inject("hang")
            running = Ticket(engine, body_of([1], [[2]]))
            assert faults.hangs.wait(SECONDS)
            monkeypatch.setattr(engine.scheduler._live, "drop_expired", die)
            waiting = Ticket(engine, body_of([1], [[3]]))
            for ticket in (waiting, running):
                check_failed(ticket, "the scheduler has died")
            with pytest.raises(UnavailableError):
                Ticket(engine, body_of([1], [[4]]))
            assert caplog.messages == ["the engine has failed: the scheduler has died"]
            assert caplog.records[0].exc_info is not None

    def test_one_that_fails_again_and_again_gives_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with failing() as (_, engine):
            monkeypatch.setattr(engine.scheduler, "_run_calls", lambda: 1 // 0)
            ticket = Ticket(engine, body_of([1], [[2]]))
            with pytest.raises(ZeroDivisionError):
                ticket.result()


class TestHang:
    """The watchdog's looks are made by the tests: no test waits for seconds to pass."""

    def test_a_step_far_beyond_its_usual_time_stalls_the_engine_until_it_ends(self) -> None:
        with faulty(is_open=True) as (faults, _, engine):
            Ticket(engine, body_of([1], [[2]])).check()  # now the watchdog knows how long that takes
            faults.inject("hang")
            hanging = Ticket(engine, body_of([3], [[2]]))
            assert faults.hangs.wait(SECONDS)
            waiting = Ticket(engine, body_of([5], [[2]]))
            look(engine, 0.9 * STALL_SECONDS)
            assert state_of(engine.scheduler.health) is EngineState.OK
            look(engine, 0.2 * STALL_SECONDS)
            assert state_of(engine.scheduler.health) is EngineState.STALLED
            with pytest.raises(UnavailableError, match="busy with a step of 2 tokens for 11 s, and usually") as caught:
                waiting.result()
            assert (caught.value.code, caught.value.retry_after) == ("engine_stalled", 5)
            with pytest.raises(UnavailableError):
                Ticket(engine, body_of([5], [[2]]))
            faults.release()
            hanging.check()
            look(engine, 1.0)
            Ticket(engine, body_of([5], [[2]])).check()

    @pytest.mark.parametrize("async_scheduling", [False, True])
    @pytest.mark.parametrize("place", ["start", "wait"])
    def test_a_device_that_hangs_for_good_fails_the_engine(self, place: Place, async_scheduling: bool) -> None:
        with failing(async_scheduling=async_scheduling) as (faults, engine):
            faults.inject("hang", at=place)
            hanging = Ticket(engine, body_of([3], [[2]]))
            assert faults.hangs.wait(SECONDS)
            look(engine, TIMEOUT + 1)
            check_failed(hanging, "busy with a step of 2 tokens for 301 s; restart")

    def test_a_probe_that_hangs_is_noticed_too(self) -> None:
        with failing() as (faults, engine):
            faults.inject("raise", times=2)
            faults.inject("hang")
            ticket = Ticket(engine, body_of([3], [[2]]))
            assert faults.hangs.wait(SECONDS)
            look(engine, TIMEOUT + 1)
            check_failed(ticket, "busy with a step of 1 tokens")

    def test_the_thread_of_the_watchdog_looks(self) -> None:
        with failing(timeout=0.05) as (faults, engine):
            faults.inject("hang")
            check_failed(Ticket(engine, body_of([3], [[2]])), "busy with a step")


def state_of(health: EngineHealth) -> EngineState:
    """A function, as the type checker takes a property for a constant."""
    return health.state


def look(engine: ScoringEngine, seconds: float) -> None:
    """Twice, so that a step that began since the last look is seen first."""
    watchdog = engine.scheduler._watchdog
    watchdog.look(0.0)
    watchdog.look(seconds)


class Device:
    """What a watchdog sees."""

    def __init__(self, num_tokens: int) -> None:
        self.times = StepTimes()
        self.is_compiling = False
        self.num_tokens = num_tokens

    def oldest(self) -> Device:
        return self


class TestWatchdog:
    def test_a_step_that_usually_takes_long_may_take_long(self) -> None:
        device, health = Device(2000), EngineHealth()
        device.times.record(2000, 30.0)
        watchdog = Watchdog(health, device, TIMEOUT, lambda: None)
        watchdog.look(1.0)
        watchdog.look(0.9 * STALL_FACTOR * 30.0)
        assert state_of(health) is EngineState.OK
        watchdog.look(0.2 * STALL_FACTOR * 30.0)
        assert state_of(health) is EngineState.FAILED

    def test_a_first_step_may_take_the_whole_timeout(self) -> None:
        health = EngineHealth()
        watchdog = Watchdog(health, Device(2000), TIMEOUT, lambda: None)
        watchdog.look(1.0)
        watchdog.look(TIMEOUT - 1)
        assert state_of(health) is EngineState.OK
        watchdog.look(2.0)
        assert state_of(health) is EngineState.FAILED

    def test_a_program_that_is_compiled_takes_no_time(self) -> None:
        device, health = Device(2000), EngineHealth()
        watchdog = Watchdog(health, device, TIMEOUT, lambda: None)
        watchdog.look(1.0)
        device.is_compiling = True
        watchdog.look(10 * TIMEOUT)
        assert state_of(health) is EngineState.OK

    def test_the_time_of_a_size_comes_from_the_nearest_that_is_known(self) -> None:
        times = StepTimes()
        assert times.expected(1) is None
        times.record(2, 0.005)
        assert times.expected(4) == 0.01
        times.record(16_384, 0.3)
        assert times.expected(16_384) == times.expected(8192) == 0.3
        assert times.expected(3) == 0.005
        times.record(2, 0.001)
        assert 0.001 < (times.expected(2) or 0.0) < 0.005, "a fast one does not make the slow one forgotten at once"
