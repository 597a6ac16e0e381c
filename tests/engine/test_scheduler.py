"""Many requests at a time: right to the last bit, fair, and never in each other's way when one of them ends early."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from itemwise.backends.base import PREFIX_BLOCK, ForwardBatch
from itemwise.contract.errors import BackendError, CancelledError, DeadlineExceededError, QueueFullError, RequestError
from itemwise.contract.parse import parse_score_request
from itemwise.engine.engine import ScoringEngine
from itemwise.engine.job import Job
from itemwise.engine.scheduler import SchedulerOptions
from itemwise.engine.step_forwards import Step
from itemwise.engine.steps import MAX_LEFT_OUT, StepFiller
from tests.engine.live import SECONDS, VOCAB_SIZE, GatedBackend, Ticket, body_of, live_engine

ALGORITHMS = ("serial", "packed", "prefill_extend")
MARK = VOCAB_SIZE - 1  # a token that only the request under test has


def query_of(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + k) % 40 for k in range(num_tokens)]


def has(token: int) -> Callable[[ForwardBatch], bool]:
    return lambda batch: token in batch.token_ids


def num_prefills(backend: GatedBackend, token: int | None = None) -> int:
    return sum(bool(batch.keep_segments) and (token is None or has(token)(batch)) for batch in backend.forwards)


class Seen:
    """Looks at every forward that is waited for, and lets none fail."""

    def __init__(self, look: Callable[[ForwardBatch], int]) -> None:
        self.what: list[int] = []
        self._look = look

    def __call__(self, batch: ForwardBatch) -> bool:
        self.what.append(self._look(batch))
        return False


# Together as alone


@dataclass(frozen=True)
class Geometry:
    """How the device is cut; none of it may show."""

    step_tokens: int
    num_prefix_blocks: int
    max_blocks_read: int | None
    prefix_cache: bool
    chunked_prefill_size: int | None
    chunk_size: int | None
    token_budget: int | None
    joins_prefill: bool
    runs_ahead: bool

    def backend(self) -> GatedBackend:
        return GatedBackend(
            step_tokens=self.step_tokens,
            num_prefix_blocks=self.num_prefix_blocks,
            max_blocks_read=self.max_blocks_read,
            joins_prefill=self.joins_prefill,
            runs_ahead=self.runs_ahead,
        )

    @property
    def options(self) -> dict[str, Any]:
        scheduler = {"prefix_cache": self.prefix_cache, "chunked_prefill_size": self.chunked_prefill_size}
        return {"scheduler": scheduler, "chunk_size": self.chunk_size, "token_budget": self.token_budget}


geometries = st.builds(
    Geometry,
    step_tokens=st.sampled_from([8, 100, 300, 2048]),
    num_prefix_blocks=st.sampled_from([2, 4, 100]),
    max_blocks_read=st.sampled_from([None, 3, 5]),  # at least those of the longest prefix
    prefix_cache=st.booleans(),
    chunked_prefill_size=st.sampled_from([None, 1, 256]),
    chunk_size=st.sampled_from([None, 0, 2]),
    token_budget=st.sampled_from([None, 50, 400]),
    joins_prefill=st.booleans(),
    runs_ahead=st.booleans(),
)
MODES = {1: ["logit", "prob", "sigmoid"], 2: ["softmax", "logprob", "sigmoid"], 3: ["softmax"], 18: ["softmax"]}
tokens = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Queries that are equal, or equal up to some place; labels of all numbers and lengths."""
    query = query_of(draw(st.sampled_from([1, 20, 127, 128, 129, 300])), draw(st.sampled_from([0, 5])))
    query[-1] = draw(st.sampled_from([query[-1], 41]))
    items = draw(st.lists(st.lists(tokens, max_size=9), min_size=1, max_size=6))
    labels: list[Any] = draw(st.sampled_from([[3], [5, 3], [7, 8, 9], list(range(18))]))
    mode = draw(st.sampled_from(MODES[len(labels)]))
    algorithm = draw(st.sampled_from([*ALGORITHMS, "auto"]))
    body = body_of(query, items, label_token_ids=labels, score_mode=mode, algorithm=algorithm)
    if draw(st.integers(0, 4)) == 0:
        labels = [[3], [5, 6], [7, 8, 9]][: draw(st.integers(2, 3))]
        return {**body, "label_token_ids": labels, "label_scoring": "sequence", "score_mode": "logprob"}
    return {**body, "item_first": draw(st.integers(0, 5)) == 0}


@settings(max_examples=120, deadline=None)
@given(bodies=st.lists(requests(), min_size=2, max_size=7), geometry=geometries, late=st.integers(0, 3))
def test_requests_together_get_exactly_what_they_get_alone(
    bodies: list[dict[str, Any]], geometry: Geometry, late: int
) -> None:
    """The first is running when the others come, all at once; some come when a few steps are done."""
    backend = geometry.backend()
    with live_engine(backend, **geometry.options) as engine:
        tickets = [Ticket(engine, bodies[0])]
        backend.next_forward()
        tickets += [Ticket(engine, body) for body in bodies[1 : len(bodies) - late]]
        backend.let_pass(2)
        tickets += [Ticket(engine, body) for body in bodies[len(tickets) :]]
        backend.open()
        for ticket in tickets:
            result = ticket.check()
            assert 0 <= result.usage.cached_tokens <= len(ticket.body["query"])
            assert geometry.prefix_cache or not result.usage.cached_tokens


def scores_of_those_that_stay(
    bodies: list[dict[str, Any]], geometry: Geometry, leaving: set[int]
) -> dict[int, list[list[float] | None]]:
    """By number. All come while the first is running, and then some of them leave."""
    backend = geometry.backend()
    scores = {}
    with live_engine(backend, **geometry.options) as engine:
        tickets = [Ticket(engine, bodies[0])]
        backend.next_forward()
        tickets += [Ticket(engine, body) for body in bodies[1:]]
        backend.let_pass(2)
        for number in leaving & set(range(len(tickets))):
            tickets[number].job.cancel()
        backend.open()
        for number, ticket in enumerate(tickets):
            ticket.wait()
            if not isinstance(ticket.job.error, CancelledError):  # some are done before they can leave
                scores[number] = ticket.check().scores
    assert set(scores) >= set(range(len(bodies))) - leaving
    return scores


@settings(max_examples=60)
@given(
    bodies=st.lists(requests(), min_size=2, max_size=7),
    geometry=geometries,
    leaving=st.sets(st.integers(0, 6), max_size=3),
)
def test_prefixes_and_tails_in_one_forward_give_what_they_give_in_two(
    bodies: list[dict[str, Any]], geometry: Geometry, leaving: set[int]
) -> None:
    joined, apart = (
        scores_of_those_that_stay(bodies, replace(geometry, joins_prefill=joins), leaving) for joins in (True, False)
    )
    for number in joined.keys() & apart.keys():
        assert joined[number] == apart[number]


@pytest.mark.parametrize("joins", [False, True])
def test_threads_that_score_at_the_same_time_get_what_they_get_alone(joins: bool) -> None:
    backend = GatedBackend(is_open=True, step_tokens=200, num_prefix_blocks=8, max_context_len=900, joins_prefill=joins)
    bodies = [
        body_of(query_of(100 + 30 * (n % 5)), [[n % 7, k] for k in range(n % 11 + 1)], algorithm=ALGORITHMS[n % 3])
        for n in range(60)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with live_engine(backend) as engine, ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda body: Ticket(engine, body).check(), bodies):
                pass
    finally:
        sys.setswitchinterval(interval)


def test_requests_that_wait_share_the_next_forward() -> None:
    backend = GatedBackend()
    with live_engine(backend) as engine:
        first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
        backend.next_forward()
        others = [Ticket(engine, body_of([1, n], [[2]], algorithm="packed")) for n in range(10, 15)]
        backend.let_pass()
        assert len(backend.next_forward().row_starts) - 1 == 5
        backend.open()
        for ticket in (first, *others):
            ticket.check()
    assert len(backend.forwards) == 2


def test_requests_with_one_new_prefix_compute_it_once() -> None:
    backend = GatedBackend()
    with live_engine(backend) as engine:
        first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
        backend.next_forward()
        others = [Ticket(engine, body_of(query_of(300), [[n]])) for n in range(4)]
        backend.open()
        assert [ticket.check().usage.cached_tokens for ticket in others] == [0, 300, 300, 300]
        first.check()
    assert num_prefills(backend) == 1


class TestCrowds:
    """More requests at once than a step looks at, all of which wait for something. They come while one runs."""

    NUM_REQUESTS = 2 * MAX_LEFT_OUT + 4

    def check_all(self, backend: GatedBackend, bodies: list[dict[str, Any]]) -> list[int]:
        """Cached tokens of each."""
        with live_engine(backend) as engine:
            first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
            backend.next_forward()
            deadline = monotonic() + SECONDS / 2
            tickets = [Ticket(engine, {**body, "algorithm": "prefill_extend"}, deadline=deadline) for body in bodies]
            backend.open()
            first.check()
            return [ticket.check().usage.cached_tokens for ticket in tickets]

    def test_all_with_one_new_prefix_that_is_longer_than_a_share(self) -> None:
        backend = GatedBackend(step_tokens=512)
        query = query_of(5 * PREFIX_BLOCK)
        cached = self.check_all(backend, [body_of(query, [[n]]) for n in range(self.NUM_REQUESTS)])
        assert cached == [0] + [len(query)] * (self.NUM_REQUESTS - 1)
        assert len(backend.made) == 5

    def test_all_with_a_prefix_of_their_own_and_room_for_two_of_them(self) -> None:
        backend = GatedBackend(step_tokens=512, num_prefix_blocks=9)
        queries = [[n, *query_of(4 * PREFIX_BLOCK - 1)] for n in range(self.NUM_REQUESTS)]
        cached = self.check_all(backend, [body_of(query, [[k, 1, 2] for k in range(40)]) for query in queries])
        assert cached == [0] * self.NUM_REQUESTS

    def test_prefixes_with_a_common_beginning_in_no_more_blocks_than_a_forward_may_list(self) -> None:
        """The backend counts them: a block for every prefix that has it."""
        backend = GatedBackend(step_tokens=2048, num_prefix_blocks=24, max_blocks_read=48)
        base = query_of(16 * PREFIX_BLOCK)
        queries = [[*base, *query_of(100, n)] for n in range(self.NUM_REQUESTS)]
        cached = self.check_all(backend, [body_of(query, [[1]]) for query in queries])
        assert cached == [0] + [len(base)] * (self.NUM_REQUESTS - 1)


# Fairness


class Backlog:
    """Small requests, so many at a time: each that ends is followed by another, until `limit` of them have come."""

    def __init__(self, engine: ScoringEngine, body: dict[str, Any], size: int, limit: int) -> None:
        self._engine = engine
        self._prepared = engine.prepare(parse_score_request(body))
        self._num_left = limit
        self.jobs: list[Job] = []
        for _ in range(size):
            self._next()

    def stop(self) -> None:
        self._num_left = 0

    def _next(self) -> None:
        if self._num_left:
            self._num_left -= 1
            self.jobs.append(self._engine.submit(self._prepared, on_change=partial(self._changed, len(self.jobs))))

    def _changed(self, number: int) -> None:
        if self.jobs[number].is_done:
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
    num_turns = len(large.job.batches)
    assert num_turns <= 2 * 400 * 5 // 64, "at least half a share each"
    assert num_steps <= 8 * num_turns
    assert all(job.error is None or isinstance(job.error, BackendError) for job in backlog.jobs)


@pytest.mark.parametrize("query_len", [20, 100])
@pytest.mark.parametrize("num_large", [4, 5])
def test_ten_items_wait_for_one_row_of_each_large_packed_request(num_large: int, query_len: int) -> None:
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
        row_lens = {row.num_tokens for ticket in large if ticket.job.plan for row in ticket.job.plan.rows[:-1]}
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


def next_prepared_step(engine: ScoringEngine) -> Step:
    """The step that is filled while the device is busy with the one before."""
    deadline = monotonic() + SECONDS
    while engine.scheduler._prepared is None:
        assert monotonic() < deadline, "nothing is prepared while the device runs"
    return engine.scheduler._prepared


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


# Ends before the end


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_that_is_cancelled_leaves_before_the_next_step_and_the_others_are_right(algorithm: str) -> None:
    """Both have a part in the step that was prepared."""
    backend = GatedBackend(step_tokens=64)
    with live_engine(backend, chunk_size=2) as engine:
        first = Ticket(engine, body_of([1], [[2]], algorithm=algorithm))
        backend.next_forward()
        fields = {"algorithm": algorithm}
        cancelled = Ticket(engine, body_of(query_of(9, 1), [[MARK, 4]] * 100, **fields))
        other = Ticket(engine, body_of(query_of(9), [[3, 4]] * 100, **fields))
        num_first = 1 + (algorithm == "prefill_extend")
        backend.let_pass(num_first)
        backend.until_waited_for(num_first + 1)
        assert {cancelled.job, other.job} <= set(next_prepared_step(engine).jobs)
        assert cancelled.job.started is not None
        cancelled.job.cancel()
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
        waiting.job.cancel()
        backend.open()
        with pytest.raises(CancelledError):
            waiting.result()
        first.check()
    assert not any(map(has(MARK), backend.forwards))


def test_cancelling_one_that_is_done_does_nothing() -> None:
    with live_engine(GatedBackend(is_open=True)) as engine:
        ticket = Ticket(engine, body_of([1], [[2]]))
        ticket.wait()
        ticket.job.cancel()
        ticket.check()


@pytest.mark.parametrize("joins", [False, True])
def test_who_computed_a_prefix_for_others_may_leave_in_the_middle_of_it(joins: bool) -> None:
    """Those that waited go on where it stopped; nothing is computed twice."""
    backend = GatedBackend(step_tokens=512, joins_prefill=joins)
    query = query_of(5 * PREFIX_BLOCK)
    with live_engine(backend, scheduler={"chunked_prefill_size": PREFIX_BLOCK}) as engine:
        owner = Ticket(engine, body_of(query, [[1]]))
        backend.next_forward()
        others = [Ticket(engine, body_of(query, [[n]])) for n in range(3)]
        owner.job.cancel()
        backend.open()
        with pytest.raises(CancelledError):
            owner.result()
        cached = [ticket.check().usage.cached_tokens for ticket in others]
        assert cached[0] == PREFIX_BLOCK
        assert min(cached[1:]) > PREFIX_BLOCK
    assert len(backend.made) == 5


def test_a_deadline_ends_one_that_waits() -> None:
    backend = GatedBackend()
    with live_engine(backend) as engine:
        first = Ticket(engine, body_of([1], [[2]]))
        backend.next_forward()
        late = Ticket(engine, body_of([MARK], [[2]]), deadline=monotonic())
        in_time = Ticket(engine, body_of([3], [[2]]), deadline=monotonic() + 1000)
        backend.open()
        with pytest.raises(DeadlineExceededError, match=r"the request was not done after .* s; its time is up"):
            late.result()
        first.check()
        in_time.check()
    assert not any(map(has(MARK), backend.forwards))


def test_a_deadline_ends_one_that_runs_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    for module in ("job", "scheduler"):
        monkeypatch.setattr(f"itemwise.engine.{module}.monotonic", lambda: now[0])
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
        with pytest.raises(QueueFullError, match=r"91 are waiting and this request has 11; come again later") as caught:
            Ticket(engine, body_of([1], [[2]] * 10, algorithm="prefill_extend"))
        assert caught.value.retry_after >= 1
        fits = Ticket(engine, body_of([1], [[2]] * 8, algorithm="prefill_extend"))
        backend.open()
        first.check()
        fits.check()
        Ticket(engine, body_of([1], [[2]] * 500)).check()


@pytest.mark.parametrize(
    ("name", "value"), [("max_queued_tokens", 0), ("chunked_prefill_size", "9"), ("max_queued_tokens", True)]
)
def test_options_that_make_no_sense_are_refused(name: str, value: object) -> None:
    with pytest.raises(
        RequestError, match=f"{name} must be a whole number of at least 1 token, got {value!r}"
    ) as caught:
        SchedulerOptions(**{name: value})  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.param) == (f"invalid_{name}", name)


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
        with live_engine(backend) as engine, caplog.at_level(logging.ERROR, "itemwise"):
            running = Ticket(engine, self.LONG)
            while running.job.num_items_done == 0:
                backend.next_forward()
                backend.let_pass()
            bad, waiting = Ticket(engine, self.BAD), Ticket(engine, body_of(query_of(300), [[7]]))
            backend.open()
            with pytest.raises(RuntimeError, match="the device"):
                bad.result()
            running.check()
            waiting.check()
            assert caplog.messages == ["a forward pass failed"]
            assert num_prefills(backend) == 2 * 3, "three blocks, one to a step, twice"
            assert Ticket(engine, body_of(query_of(300), [[8]])).check().usage.cached_tokens == 300
            stats = engine.scheduler.stats()
            assert stats.items_scored == 200 + 1 + 1

    def test_tokens_that_are_to_be_computed_again_are_counted_again(self) -> None:
        backend = GatedBackend(step_tokens=self.STEP)
        backend.fails_to_start = has(MARK)
        with live_engine(backend) as engine:
            running = Ticket(engine, self.LONG)
            while running.job.num_items_done == 0:
                backend.next_forward()
                backend.let_pass()
            bad = Ticket(engine, self.BAD)
            left = Seen(lambda batch: running.job.tokens_left)
            backend.fails = left
            backend.open()
            running.check()
            assert bad.job.error is not None
        assert left.what[-1] == backend.forwards[-1].num_tokens, "the last forward's are the last"

    def test_whoever_is_in_the_same_step_fails_with_it(self) -> None:
        backend = GatedBackend()
        backend.fails = has(MARK)
        with live_engine(backend) as engine:
            first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
            backend.next_forward()
            pair = [Ticket(engine, body_of([n], [[2]], algorithm="packed")) for n in (MARK, 5)]
            backend.open()
            for ticket in pair:
                with pytest.raises(RuntimeError, match="the device has failed"):
                    ticket.result()
            first.check()
            Ticket(engine, body_of([5], [[2]], algorithm="packed")).check()

    def test_a_prefix_whose_forward_failed_is_not_kept(self) -> None:
        backend = GatedBackend()
        query = [*query_of(200), MARK]
        with live_engine(backend) as engine:
            failing = [True]
            backend.fails = lambda batch: failing[0] and bool(batch.keep_segments)
            first = Ticket(engine, body_of(query, [[1]]))
            backend.open()
            with pytest.raises(RuntimeError):
                first.result()
            failing[0] = False
            assert Ticket(engine, body_of(query, [[1]])).check().usage.cached_tokens == 0

    def test_one_that_waited_for_a_prefix_that_failed_computes_it_itself(self) -> None:
        backend = GatedBackend(step_tokens=512)
        query = query_of(4 * PREFIX_BLOCK)
        with live_engine(backend, scheduler={"chunked_prefill_size": PREFIX_BLOCK}) as engine:
            backend.fails = lambda batch: len(backend.forwards) == 1
            failing = Ticket(engine, body_of(query, [[1]]))
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
        with live_engine(backend) as engine, caplog.at_level(logging.ERROR, "itemwise"):
            with monkeypatch.context() as patch:
                patch.setattr(StepFiller, "fill", lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    Ticket(engine, body_of([1], [[2]])).result()
            assert caplog.messages == ["the scheduler failed"]
            Ticket(engine, body_of([1], [[2]])).check()

    def test_an_on_change_that_fails_hurts_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        backend = GatedBackend(step_tokens=64)
        with live_engine(backend) as engine, caplog.at_level(logging.ERROR, "itemwise"):
            prepared = engine.prepare(parse_score_request(body_of([1], [[2, 3]] * 100, algorithm="prefill_extend")))
            jobs = [engine.submit(prepared, on_change=lambda: 1 // 0) for _ in range(3)]  # type: ignore[arg-type]
            backend.next_forward()
            beside = Ticket(engine, body_of([1], [[4, 5]] * 100, algorithm="prefill_extend"))
            backend.open()
            beside.check()
            Ticket(engine, body_of([1], [[2]])).check()
            expected = Ticket(engine, body_of([1], [[2, 3]] * 100, algorithm="prefill_extend")).check()
            while not all(job.is_done for job in jobs):
                Ticket(engine, body_of([1], [[2]])).check()
            assert [engine.finish(prepared, job).scores for job in jobs] == [expected.scores] * 3
        assert set(caplog.messages) == {"a request's on_change failed"}

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("joins", [False, True])
    @pytest.mark.parametrize("runs_ahead", [False, True])
    def test_failures_at_random_leave_nothing_wrong_behind(self, algorithm: str, joins: bool, runs_ahead: bool) -> None:
        geometry = {"step_tokens": 150, "num_prefix_blocks": 6, "max_context_len": 600}
        backend = GatedBackend(is_open=True, **geometry, joins_prefill=joins, runs_ahead=runs_ahead)
        chance = np.random.default_rng(0)
        backend.fails = lambda batch: bool(chance.random() < 0.1)
        outcomes = []
        with live_engine(backend) as engine:
            for _ in range(8):
                bodies = [
                    body_of(query_of(150 + 50 * (n % 3)), [[n, k] for k in range(40)], algorithm=algorithm)
                    for n in range(8)
                ]
                for ticket in [Ticket(engine, body) for body in bodies]:
                    ticket.wait()
                    outcomes.append(ticket.job.error is None)
                    if outcomes[-1]:
                        ticket.check()
        assert len(set(outcomes)) == 2, "some failed, some did not"


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
                return threading.current_thread().name, backend.num_running, ticket.job.is_done

            seen = pool.submit(engine.scheduler.call, look)
            while not engine.scheduler._calls:
                assert not seen.done()
            backend.open()
            assert seen.result(SECONDS) == ("itemwise-device", 0, False)
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


def test_a_job_that_is_done_lets_go_of_whoever_waited() -> None:
    class Waiter:
        job: Job | None = None

        def notify(self) -> None:
            assert self.job is not None and self.job.is_done

    waiter = Waiter()
    waiter.job = Job(np.arange(3, dtype=np.int32), None, on_change=waiter.notify)
    waiter.job.finish()
    is_there = weakref.ref(waiter)
    del waiter
    assert is_there() is None, "only the garbage collector would find them"


class TestProgress:
    def test_it_is_told_on_the_callers_thread(self) -> None:
        backend = GatedBackend(is_open=True)
        told: list[tuple[int, int, bool]] = []
        body = body_of([1], [[2], [3], [4]], algorithm="prefill_extend")
        with live_engine(backend, chunk_size=1) as engine:
            here = threading.current_thread()
            engine.score(
                parse_score_request(body),
                lambda done, total: told.append((done, total, threading.current_thread() is here)),
            )
        assert told[-1] == (3, 3, True)
        assert all(told[i] <= told[i + 1] for i in range(len(told) - 1))
        assert all(is_here for _, _, is_here in told)

    def test_only_what_was_answered_counts(self) -> None:
        """The next step may be running when the caller looks."""
        backend = GatedBackend()
        with live_engine(backend, chunk_size=1) as engine:
            ticket = Ticket(engine, body_of([1], [[2], [3], [4]], algorithm="prefill_extend"))
            backend.let_pass(2)
            for _ in range(3):  # the prefill, and two items
                backend.next_forward()
            assert ticket.job.num_items_done == 1

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

    def test_running_and_waiting_requests_are_told_apart(self) -> None:
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
