"""Admission: how many tokens may wait, who meets its deadline, and when a refused client may retry."""

from __future__ import annotations

import numpy as np
import pytest

from prefixwise.contract.errors import QueueFullError, RequestTooLargeError
from prefixwise.engine.admission import MAX_COMPARED, MAX_TIME, MAX_WAIT, Admission, tokens_before_end
from prefixwise.engine.prefix_cache import PrefixCache
from prefixwise.engine.request_state import RequestState, ScoringTask
from prefixwise.engine.step_limits import SHARES
from prefixwise.forward.batch import KV_BLOCK_SIZE
from tests.engine.step_runner import trunk_of

STEP = 400  # a turn has 100 tokens
RATE = 1000.0  # tokens per second, where a test has measured it


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("admission", "request_state"):
        monkeypatch.setattr(f"prefixwise.engine.{module}.monotonic", clock)
    return clock


@pytest.fixture
def measured(clock: Clock) -> Admission:
    """Of a device that computes RATE; nothing waits."""
    admission = Admission(10**9, STEP)
    admission.restore(500)  # of a request that was admitted long ago
    clock.now += 0.5
    admission.count_step(500)
    assert admission.tokens_per_second == RATE
    return admission


def request_of(tokens: int, *, deadline: float | None = None, priority: int = 0) -> RequestState:
    return RequestState(ScoringTask(np.zeros(tokens, np.int32), None, deadline=deadline, priority=priority))


def admit(admission: Admission, tokens: int, *, deadline: float | None = None, priority: int = 0) -> RequestState:
    request = request_of(tokens, deadline=deadline, priority=priority)
    admission.admit([request])
    return request


def compute(admission: Admission, clock: Clock, request: RequestState, seconds: float) -> None:
    """One step computes the whole request."""
    clock.now += seconds
    tokens, request.tokens_left = request.tokens_left, 0
    admission.count_step(tokens)
    admission.leave(request)


def refusal(admission: Admission, tokens: int, *, deadline: float | None = None, priority: int = 0) -> QueueFullError:
    before = admission.tokens
    with pytest.raises(QueueFullError) as caught:
        admit(admission, tokens, deadline=deadline, priority=priority)
    assert admission.tokens == before, "a refused request takes no room"
    return caught.value


class TestTokens:
    def test_requests_are_admitted_up_to_the_bound(self) -> None:
        admission = Admission(100, STEP)
        admit(admission, 60)
        admit(admission, 40)
        assert admission.is_full
        error = refusal(admission, 1)
        assert error.message == (
            "at most 100 tokens may wait (max_queued_tokens), 100 are waiting and this request has 1; retry later"
        )
        assert (error.status, error.code) == (429, "queue_full")
        assert admission.refusals == {"queue_full": 1}

    def test_a_request_larger_than_the_bound_is_admitted_where_nothing_waits(self) -> None:
        admission = Admission(100, STEP)
        large = admit(admission, 1000)
        refusal(admission, 1)
        admission.leave(large)
        admit(admission, 1)
        refusal(admission, 1000)

    def test_all_requests_of_a_call_or_none(self) -> None:
        admission = Admission(100, STEP)
        admit(admission, 50)
        with pytest.raises(QueueFullError, match="this request has 60"):
            admission.admit([request_of(30), request_of(30)])
        admission.admit([request_of(20), request_of(30)])
        assert admission.tokens == 100

    def test_it_can_be_asked_before_a_request_is_read(self) -> None:
        admission = Admission(100, STEP)
        admit(admission, 99)
        admission.check()
        admit(admission, 1)
        with pytest.raises(QueueFullError, match="100 are waiting; retry later"):
            admission.check()

    def test_tokens_leave_when_they_are_computed_or_given_up_and_may_come_back(self) -> None:
        admission = Admission(100, STEP)
        request = admit(admission, 100)
        admission.count_step(30)
        request.tokens_left -= 30
        assert (admission.tokens, admission.is_full) == (70, False)
        admission.restore(30)
        request.tokens_left += 30
        assert admission.is_full
        admission.leave(request)
        assert admission.tokens == 0


class TestRetryAfter:
    def test_before_anything_was_measured_it_is_one_second(self) -> None:
        admission = Admission(100, STEP)
        admit(admission, 100)
        assert refusal(admission, 100).retry_after == 1

    def test_it_is_what_the_measured_rate_makes_of_the_excess(self, clock: Clock) -> None:
        admission = Admission(1000, STEP)
        admit(admission, 1000)
        clock.now += 20.0
        admission.count_step(200)  # 10 tokens a second
        assert refusal(admission, 255).retry_after == 6, "55 tokens too many"
        assert refusal(admission, 201).retry_after == 1

    def test_no_client_is_asked_to_wait_for_more_than_a_minute(self, clock: Clock) -> None:
        admission = Admission(1000, STEP)
        admit(admission, 1000)
        clock.now += 50.0
        admission.count_step(100)
        assert refusal(admission, 1000).retry_after == 60

    def test_idle_time_does_not_lower_the_rate(self, clock: Clock) -> None:
        admission = Admission(100, STEP)
        for _ in range(5):
            compute(admission, clock, admit(admission, 100), 1.0)
            clock.now += 50.0
        assert admission.tokens_per_second == pytest.approx(100.0)


class TestDeadlines:
    def test_without_a_rate_or_a_deadline_only_tokens_count(self, clock: Clock, measured: Admission) -> None:
        admit(Admission(10**9, STEP), 10**6, deadline=clock.now + 1)
        admit(measured, 10**6)
        assert measured.refusals == {}

    def test_what_the_device_cannot_compute_in_time_alone_is_not_worth_a_retry(
        self, clock: Clock, measured: Admission
    ) -> None:
        most = round(MAX_TIME * 10 * RATE)
        with pytest.raises(RequestTooLargeError) as caught:
            admit(measured, most + 1, deadline=clock.now + 10)
        assert (caught.value.status, caught.value.code) == (413, "deadline_too_short")
        assert caught.value.message == (
            "the request must be computed in 9 s, so that its deadline is met; alone on the device it takes 9 s: 9001 "
            "tokens at 1000 tokens/s; allow more time, or send fewer items in a request"
        )
        assert measured.refusals == {"deadline_too_short": 1}
        admit(measured, most, deadline=clock.now + 10)

    def test_what_waits_before_a_request_must_leave_it_its_time(self, clock: Clock, measured: Admission) -> None:
        admit(measured, 4500, deadline=clock.now + 10)
        error = refusal(measured, 3500, deadline=clock.now + 10)
        assert (error.status, error.code) == (429, "queue_too_long")
        assert error.message == (
            "the work until the end of this request may take 7.5 s, so that its deadline is met; it takes 8 s: 8000 "
            "tokens at 1000 tokens/s; retry later"
        )
        assert error.retry_after == 1
        admit(measured, 3500, deadline=clock.now + 15)

    def test_later_requests_of_its_size_do_not_take_its_time(self, clock: Clock, measured: Admission) -> None:
        """They wait in its line. It may take most of its time, and those behind it find the line too long."""
        admit(measured, 4000, deadline=clock.now + 10)
        admit(measured, 4000, deadline=clock.now + 10)
        refusal(measured, 4000, deadline=clock.now + 10)

    def test_a_small_request_passes_large_ones(self, clock: Clock, measured: Admission) -> None:
        """As in the scheduler: it waits for one turn of each."""
        for _ in range(3):
            admit(measured, 10_000, deadline=clock.now + 1000)
        refusal(measured, 10_000, deadline=clock.now + 30)
        deadline = clock.now + (3 * 100 + STEP + 1) / RATE / MAX_WAIT
        admit(measured, 100, deadline=deadline)
        refusal(measured, 100, deadline=deadline)

    def test_requests_of_an_earlier_priority_are_waited_for_and_those_of_a_later_one_are_not(
        self, clock: Clock, measured: Admission
    ) -> None:
        admit(measured, 10_000, deadline=clock.now + 1000, priority=3)
        refusal(measured, 100, deadline=clock.now + 10, priority=4)
        refusal(measured, 4000, deadline=clock.now + 10, priority=3)
        admit(measured, 3000, deadline=clock.now + 10, priority=2)

    def test_smaller_requests_that_keep_coming_are_taken_from_the_rate(self, clock: Clock, measured: Admission) -> None:
        """They pass a larger one, which gets what they leave."""
        for _ in range(1000):  # half of the device for 100 s
            clock.now += 0.1
            compute(measured, clock, admit(measured, 50, deadline=clock.now + 10), 0.05)
        assert measured.tokens_per_second == pytest.approx(RATE)
        clock.now += 0.1
        error = refusal(measured, 8000, deadline=clock.now + 10)
        takes, allowed = error.message.split("it takes ")[1], MAX_TIME * 10
        assert f"may take {allowed:.3g} s" in error.message
        assert 10 < float(takes.split(" s")[0]) < 20
        admit(measured, 4000, deadline=clock.now + 10)

    def test_smaller_requests_that_leave_uncomputed_take_nothing(self, clock: Clock, measured: Admission) -> None:
        """Else clients that disconnect at once could keep larger requests out."""
        for _ in range(1000):
            clock.now += 0.01
            request = admit(measured, 100, deadline=clock.now + 10)
            clock.now += 0.01
            measured.leave(request)
        admit(measured, 8000, deadline=clock.now + 10)

    def test_many_requests_are_not_compared_one_by_one(self, clock: Clock, measured: Admission) -> None:
        measured.admit([request_of(2, deadline=clock.now + 100) for _ in range(MAX_COMPARED)])
        refusal(measured, 2, deadline=clock.now + 1)
        admit(measured, 2, deadline=clock.now + 2 * MAX_COMPARED / RATE / MAX_WAIT + 1)

    def test_cached_tokens_are_no_work(self, clock: Clock, measured: Admission) -> None:
        cache = PrefixCache(100)
        first, second = (request_of(50 * KV_BLOCK_SIZE, deadline=clock.now + 1) for _ in range(2))
        with pytest.raises(RequestTooLargeError):
            measured.admit([first])
        assert trunk_of(first).reserve_prefix(cache)
        second.expect_hits(cache)
        assert (second.work_left, second.tokens_left) == (0, 50 * KV_BLOCK_SIZE)
        measured.admit([second])
        second.invalidate_prefix(cache)
        assert second.work_left == 50 * KV_BLOCK_SIZE, "after a failure it is computed again"

    def test_one_that_is_past_its_deadline_is_left_to_the_scheduler(self, clock: Clock, measured: Admission) -> None:
        admit(measured, 10**6, deadline=clock.now - 1)


class TestGivingUp:
    def test_a_request_that_cannot_be_done_any_more(self, clock: Clock, measured: Admission) -> None:
        request = admit(measured, 4000, deadline=clock.now + 10)
        request.started = clock.now
        assert measured.why_late(request, clock.now + 6.5) is None
        assert measured.why_late(request, clock.now + 7) == (
            "the request was given up 3 s before its deadline: 4000 tokens had to be computed until its end, which "
            "takes 4 s at 1000 tokens/s"
        )

    def test_one_that_has_not_begun_is_given_up_earlier(self, clock: Clock, measured: Admission) -> None:
        """Nothing is lost with it: the device begins what it can finish, at the rate that smaller ones leave."""
        request = admit(measured, 4000, deadline=clock.now + 10)
        assert measured.why_late(request, clock.now + 5.9) is None
        assert measured.why_late(request, clock.now + 6.1) is not None
        admit(measured, 1000, deadline=clock.now + 10)  # 100 tokens a second of the last ten
        assert measured.why_late(request, clock.now + 5.9) is not None
        assert clock.now + 10 <= measured.at_risk_until(clock.now + 5.9)
        request.started = clock.now
        assert measured.why_late(request, clock.now + 6.1) is None

    def test_the_small_requests_of_a_call_take_nothing_from_its_large_one(
        self, clock: Clock, measured: Admission
    ) -> None:
        call = [request_of(tokens, deadline=clock.now + 100) for tokens in (4000, *[250] * 80)]
        measured.admit(call)
        assert measured.why_late(call[0], clock.now) is None
        assert measured.why_late(call[-1], clock.now) is None
        for request in call:
            measured.leave(request)
        assert measured.why_late(admit(measured, 4000, deadline=clock.now + 5), clock.now) is None

    def test_a_small_one_ends_with_the_step_that_it_shares(self, clock: Clock, measured: Admission) -> None:
        admit(measured, 4000)
        request = admit(measured, 10, deadline=clock.now + 10)
        assert measured.why_late(request, clock.now + 9.5) is None
        assert measured.why_late(request, clock.now + 9.7) is not None

    def test_nothing_is_given_up_without_a_rate_or_a_deadline(self, clock: Clock, measured: Admission) -> None:
        assert measured.why_late(admit(measured, 10**6), clock.now + 10**6) is None
        unmeasured = Admission(10**9, STEP)
        assert unmeasured.why_late(admit(unmeasured, 10**6, deadline=clock.now), clock.now + 10) is None


def served_in_turns(work: list[int], sizes: list[int], turn: int) -> list[int]:
    """Tokens that are computed until each request is done: turn by turn, the slow way."""
    lines: dict[tuple[int, int], list[int]] = {}
    for number, size in enumerate(sizes):
        lines.setdefault((size, 0 if size else number), []).append(number)
    left, done, ends = list(work), 0, [0] * len(work)
    while any(left):
        for members in lines.values():
            room = turn * min(SHARES, len(members))
            while members and room:
                tokens = min(left[members[0]], room)
                left[members[0]], room, done = left[members[0]] - tokens, room - tokens, done + tokens
                if not left[members[0]]:
                    ends[members.pop(0)] = done
    return ends


@pytest.mark.parametrize("seed", range(20))
def test_no_request_ends_later_than_estimated(seed: int) -> None:
    rng = np.random.default_rng(seed)
    turn = 10
    work = rng.integers(1, 80, rng.integers(1, 16))
    sizes = np.array([int(-(-each // turn) - 1).bit_length() for each in work])
    lines = np.stack([np.zeros_like(sizes), sizes], axis=1)
    ends = np.array(served_in_turns(work.tolist(), sizes.tolist(), turn))
    bounds = {int(size): tokens_before_end(0, int(size), work, lines, turn, turn) for size in set(sizes.tolist())}
    assert all(ends[sizes == size].max() <= bound for size, bound in bounds.items())
    assert max(bounds.values()) == work.sum() == ends.max()


def test_a_line_waits_for_as_many_turns_of_another_line_as_it_needs() -> None:
    work, lines = np.array([500, 400, 40, 40, 5]), np.array([[0, 6], [0, 6], [0, 2], [0, 2], [0, 0]])
    assert tokens_before_end(0, 0, work, lines, 10, 10) == 5 + 2 * 10 + 2 * 10, "one round"
    assert tokens_before_end(0, 2, work, lines, 10, 10) == 80 + 5 + (2 + 4) * 2 * 10, "six rounds"
    assert tokens_before_end(0, 6, work, lines, 10, 10) == work.sum()


def test_work_of_an_earlier_priority_comes_before() -> None:
    work, lines = np.array([50, 20, 5]), np.array([[1, 3], [0, 1], [2, 0]])
    assert [tokens_before_end(*line, work, lines, 10, 10) for line in ((1, 3), (0, 1), (2, 0))] == [70, 20, 75]


def test_a_unit_that_cannot_be_split_makes_a_turn_longer() -> None:
    work, lines = np.array([500, 20]), np.array([[0, 6], [0, 1]])
    assert tokens_before_end(0, 1, work, lines, 10, 200) == 420
