"""Requests that are cancelled, come too late, or are too many: the others do not notice."""

from __future__ import annotations

from time import monotonic

import pytest

from prefixwise.contract.errors import CancelledError, DeadlineExceededError, QueueFullError
from prefixwise.forward.batch import KV_BLOCK_SIZE
from tests.engine.live import (
    ALGORITHMS,
    MARK,
    GatedBackend,
    Ticket,
    body_of,
    has,
    live_engine,
    next_prepared_step,
    query_of,
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_that_is_cancelled_leaves_before_the_next_step_and_the_others_are_right(algorithm: str) -> None:
    """Both have a part in the step that was prepared."""
    backend = GatedBackend(step_tokens=64)
    with live_engine(backend, chunk_size=2) as engine:
        first = Ticket(engine, body_of([1], [[2]], algorithm=algorithm))
        backend.next_forward()
        fields = {"algorithm": algorithm}
        cancelled = Ticket(engine, body_of(query_of(9, 1), [[MARK, 4]] * 100, **fields))
        other = Ticket(engine, body_of(query_of(9), [[3, 4]] * 30, **fields))  # not in its line
        num_first = 1 + (algorithm == "prefill_extend")
        backend.let_pass(num_first)
        backend.until_waited_for(num_first + 1)
        assert {cancelled.state, other.state} <= set(next_prepared_step(engine).requests)
        assert cancelled.state.started is not None
        cancelled.state.cancel()
        num_marked = sum(map(has(MARK), backend.forwards))
        backend.open()
        with pytest.raises(CancelledError):
            cancelled.result()
        other.check()
        first.check()
        assert sum(map(has(MARK), backend.forwards)) == num_marked, "it has no part in a later step"


def test_one_that_is_cancelled_while_it_waits_is_never_started() -> None:
    backend = GatedBackend()
    with live_engine(backend) as engine:
        first = Ticket(engine, body_of([1], [[2]]))
        backend.next_forward()
        waiting = Ticket(engine, body_of([MARK], [[2]]))
        waiting.state.cancel()
        backend.open()
        with pytest.raises(CancelledError):
            waiting.result()
        first.check()
    assert not any(map(has(MARK), backend.forwards))


def test_cancelling_one_that_is_done_does_nothing() -> None:
    with live_engine(GatedBackend(is_open=True)) as engine:
        ticket = Ticket(engine, body_of([1], [[2]]))
        ticket.wait()
        ticket.state.cancel()
        ticket.check()


@pytest.mark.parametrize("joins", [False, True])
def test_who_computed_a_prefix_for_others_may_leave_in_the_middle_of_it(joins: bool) -> None:
    """Those that waited go on where it stopped; nothing is computed twice."""
    backend = GatedBackend(step_tokens=512, joins_prefill=joins)
    query = query_of(5 * KV_BLOCK_SIZE)
    with live_engine(backend, scheduler={"chunked_prefill_size": KV_BLOCK_SIZE}) as engine:
        owner = Ticket(engine, body_of(query, [[1]]))
        backend.next_forward()
        others = [Ticket(engine, body_of(query, [[n]])) for n in range(3)]
        owner.state.cancel()
        backend.open()
        with pytest.raises(CancelledError):
            owner.result()
        cached = [ticket.check().usage.cached_tokens for ticket in others]
        assert cached[0] == KV_BLOCK_SIZE
        assert min(cached[1:]) > KV_BLOCK_SIZE
    assert len(backend.made) == 5


def test_a_deadline_ends_one_that_waits() -> None:
    backend = GatedBackend()
    with live_engine(backend) as engine:
        first = Ticket(engine, body_of([1], [[2]]))
        backend.next_forward()
        late = Ticket(engine, body_of([MARK], [[2]]), deadline=monotonic())
        in_time = Ticket(engine, body_of([3], [[2]]), deadline=monotonic() + 1000)
        backend.open()
        with pytest.raises(DeadlineExceededError, match=r"not done after .* s; its deadline has passed"):
            late.result()
        first.check()
        in_time.check()
    assert not any(map(has(MARK), backend.forwards))


def test_a_deadline_ends_one_that_runs_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    for module in ("request_state", "live_requests", "scheduler"):
        monkeypatch.setattr(f"prefixwise.engine.{module}.monotonic", lambda: now[0])
    backend = GatedBackend(step_tokens=64)
    with live_engine(backend) as engine:
        late = Ticket(engine, body_of(query_of(9), [[MARK, 4]] * 1000, algorithm="prefill_extend"), deadline=1010.0)
        next_prepared_step(engine)
        other = Ticket(engine, body_of(query_of(9), [[3, 4]] * 50, algorithm="prefill_extend"))
        now[0] = 1011.0
        backend.open()
        with pytest.raises(DeadlineExceededError, match="not done after 11 s"):
            late.result()
        other.check()
        assert sum(map(has(MARK), backend.forwards)) == 1


def test_no_more_tokens_wait_than_may() -> None:
    backend = GatedBackend()
    with live_engine(backend, scheduler={"max_queued_tokens": 100}) as engine:
        first = Ticket(engine, body_of([1], [[2]] * 90, algorithm="prefill_extend"))
        backend.next_forward()
        with pytest.raises(QueueFullError, match=r"91 are waiting and this request has 11; retry later") as caught:
            Ticket(engine, body_of([1], [[2]] * 10, algorithm="prefill_extend"))
        assert caught.value.retry_after >= 1
        fits = Ticket(engine, body_of([1], [[2]] * 8, algorithm="prefill_extend"))
        backend.open()
        first.check()
        fits.check()
        Ticket(engine, body_of([1], [[2]] * 500)).check()
