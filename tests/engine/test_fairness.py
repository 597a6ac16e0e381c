"""Many requests at a time: nobody waits for ever, and small ones do not wait for large ones."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from prefixwise.contract.errors import BackendError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.request_state import RequestState
from tests.engine.live import (
    ALGORITHMS,
    MARK,
    GatedBackend,
    Seen,
    Ticket,
    body_of,
    live_engine,
    next_prepared_step,
    query_of,
)


class Backlog:
    """Small requests, so many at a time: each that ends is followed by another, until `limit` of them have come."""

    def __init__(self, engine: ScoringEngine, body: dict[str, Any], size: int, limit: int) -> None:
        self._engine = engine
        self._prepared = engine.prepare(parse_score_request(body))
        self._num_left = limit
        self.states: list[RequestState] = []
        for _ in range(size):
            self._next()

    def stop(self) -> None:
        self._num_left = 0

    def _next(self) -> None:
        if self._num_left:
            self._num_left -= 1
            self.states.append(self._engine.submit(self._prepared, on_change=partial(self._changed, len(self.states))))

    def _changed(self, number: int) -> None:
        if self.states[number].is_done:
            self._next()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_large_request_ends_however_many_small_ones_keep_coming(algorithm: str) -> None:
    """Of the 40 at a time a step holds about eight, so that it is everybody's turn after five steps or so."""
    backend = GatedBackend(step_tokens=256)
    fields = {"algorithm": algorithm}
    with live_engine(backend, scheduler={"max_queued_tokens": 10**7}) as engine:
        large = Ticket(engine, body_of([1], [[MARK, k % 40, 1, 2] for k in range(400)], **fields))
        backend.next_forward()
        backlog = Backlog(engine, body_of([1], [[k, 1, 2] for k in range(8)], **fields), size=40, limit=4000)
        before = engine.scheduler.stats().steps
        backend.open()
        large.check()
        num_steps = engine.scheduler.stats().steps - before
        backlog.stop()
    num_turns = len(large.state.batches)
    assert num_turns <= 2 * 400 * 5 // 64, "at least half a share each"
    assert num_steps <= 8 * num_turns
    assert all(state.error is None or isinstance(state.error, BackendError) for state in backlog.states)


@pytest.mark.parametrize("query_len", [20, 100])
@pytest.mark.parametrize("num_large", [4, 5])
def test_ten_items_wait_for_one_sequence_of_each_large_packed_request(num_large: int, query_len: int) -> None:
    """The rows fill a step, and where the prefix is long they are longer."""
    backend, seen = GatedBackend(step_tokens=256), Seen(lambda batch: MARK in batch.token_ids)
    backend.fails = seen
    with live_engine(backend, scheduler={"max_queued_tokens": 10**7}) as engine:
        items = [[k % 40, 1, 2, 3] for k in range(1000)]
        large = [Ticket(engine, body_of(query_of(query_len, n), items, algorithm="packed")) for n in range(num_large)]
        backend.next_forward()
        small = Ticket(engine, body_of(query_of(20), [[MARK, k] for k in range(10)], algorithm="packed"))
        backend.open()
        small.check()
        for ticket in large:
            ticket.wait()
        row_lens = {
            row.num_tokens
            for ticket in large
            if ticket.state.task.plan
            for row in ticket.state.task.plan.sequences[:-1]
        }
    assert row_lens == {max(256, 4 * query_len)}
    assert seen.what.index(True) <= 1 + num_large, "one runs when it comes, and then has its turn before it"


@pytest.mark.parametrize("num_large", [1, 6])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ten_items_do_not_wait_for_five_thousand(algorithm: str, num_large: int) -> None:
    """Whatever the large ones are made of: rows of the packed ones fill a step."""
    backend, seen = GatedBackend(step_tokens=256), Seen(lambda batch: MARK in batch.token_ids)
    backend.fails = seen
    with live_engine(backend, token_budget=1000, scheduler={"max_queued_tokens": 10**7}) as engine:
        items = [[k % 40, 1, 2, 3] for k in range(5000 if num_large == 1 else 1000)]
        large = [Ticket(engine, body_of(query_of(20, n), items, algorithm=algorithm)) for n in range(num_large)]
        backend.next_forward()
        small = Ticket(engine, body_of(query_of(20), [[MARK, k] for k in range(10)], algorithm=algorithm))
        backend.open()
        small.check()
        for ticket in large:
            ticket.wait()
        steps = engine.scheduler.stats().steps
    last = max(number for number, is_marked in enumerate(seen.what) if is_marked)
    assert last <= min(steps // 4, 15)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_lower_priority_number_is_served_first(algorithm: str) -> None:
    """Whatever came first; and what the urgent one leaves of a step, the others get."""
    backend = GatedBackend(step_tokens=100)
    with live_engine(backend) as engine:
        first = Ticket(engine, body_of([1], [[2]], algorithm=algorithm))
        backend.next_forward()  # it keeps the device while the others come
        later = [Ticket(engine, body_of([2, 9 + n], [[3] * 9] * 40, algorithm=algorithm), priority=7) for n in range(4)]
        urgent = Ticket(engine, body_of([4], [[MARK] * 9] * 40, algorithm=algorithm), priority=3)
        backend.open()
        for ticket in (first, urgent, *later):
            ticket.check()
    marks, others = ([int((batch.token_ids == token).sum()) for batch in backend.forwards] for token in (MARK, 3))
    last = max(number for number, count in enumerate(marks) if count)
    assert (sum(marks), sum(others)) == (360, 4 * 360)
    assert sum(map(bool, marks)) <= 6, "all of a step is its own"
    assert sum(others[: last + 1]) <= 100, "the others had no more than it left"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_large_requests_of_one_size_end_one_after_the_other(algorithm: str) -> None:
    """The last one not later than if all had been served side by side, the others earlier."""
    backend = GatedBackend(step_tokens=100)
    with live_engine(backend) as engine:
        first = Ticket(engine, body_of([1], [[2]], algorithm=algorithm))
        backend.next_forward()  # it keeps the device while the others come
        marks = (MARK, MARK - 1, MARK - 2)
        large = [Ticket(engine, body_of([mark], [[mark] * 9] * 40, algorithm=algorithm)) for mark in marks]
        backend.open()
        for ticket in (first, *large):
            ticket.check()
    of_each = [[number for number, batch in enumerate(backend.forwards) if mark in batch.token_ids] for mark in marks]
    for before, after in pairwise(of_each):
        assert before[-1] <= after[0] + 1, "the next one may share the last step of the one before"


def test_a_small_request_does_not_wait_for_a_large_one_with_its_query_that_waits_in_line() -> None:
    backend = GatedBackend(step_tokens=256)
    query = query_of(200, 7)
    with live_engine(backend) as engine:
        items = [[k % 40, 1, 2, 3] for k in range(1000)]
        running = Ticket(engine, body_of(query_of(200), items, algorithm="prefill_extend"))
        backend.next_forward()
        waiting = Ticket(engine, body_of(query, items, algorithm="prefill_extend"))
        small = Ticket(engine, body_of(query, [[MARK]], algorithm="prefill_extend"))
        backend.open()
        for ticket in (running, waiting, small):
            ticket.check()
    marked = [number for number, batch in enumerate(backend.forwards) if MARK in batch.token_ids]
    assert marked[-1] <= 8 < len(backend.forwards) // 2


def test_a_request_that_leaves_room_in_its_turn_lets_the_next_in_line_begin() -> None:
    """As with a limit for the prefixes in a step: else the device would be almost idle."""
    backend = GatedBackend(step_tokens=2048)
    with live_engine(backend, scheduler={"chunked_prefill_size": 128}) as engine:
        first = Ticket(engine, body_of([1], [[2]], algorithm="prefill_extend"))
        backend.next_forward()
        large = [Ticket(engine, body_of(query_of(1280, n), [[2, 3]], algorithm="prefill_extend")) for n in (3, 5)]
        backend.open()
        for ticket in (first, *large):
            ticket.check()
    together = [batch for batch in backend.forwards if len(batch.cache_segments) == 2]
    assert len(together) >= 9


def test_a_step_that_was_prepared_is_dropped_when_somebody_comes() -> None:
    backend = GatedBackend(step_tokens=100)
    with live_engine(backend) as engine:
        large = Ticket(engine, body_of([1], [[2, 3, 4, 5]] * 200, algorithm="prefill_extend"))
        backend.next_forward()  # the prefill
        backend.next_forward()
        next_prepared_step(engine)
        small = Ticket(engine, body_of([1], [[MARK]], algorithm="prefill_extend"))
        backend.let_pass(2)
        batch = backend.next_forward()
        assert MARK in batch.token_ids
        assert batch.num_tokens <= 25 + 1, "a share for the large one, and the small one"
        backend.open()
        small.check()
        large.check()


def test_a_step_that_was_prepared_is_the_next_where_nobody_comes() -> None:
    backend = GatedBackend(step_tokens=100)
    with live_engine(backend) as engine:
        ticket = Ticket(engine, body_of([1], [[2, 3, 4, 5]] * 200, algorithm="prefill_extend"))
        prepared = next_prepared_step(engine)
        for _ in range(2):
            backend.next_forward()
        backend.let_pass(2)
        batch = backend.next_forward()
        assert prepared.forwards[0].batch is not None
        assert batch.token_ids is prepared.forwards[0].batch.token_ids
        backend.open()
        ticket.check()
