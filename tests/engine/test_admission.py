"""Admission: how many tokens may wait, and when a refused client may retry."""

from __future__ import annotations

import pytest

from prefixwise.contract.errors import QueueFullError
from prefixwise.engine.admission import Admission


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("prefixwise.engine.admission.monotonic", clock)
    return clock


def refusal(admission: Admission, tokens: int) -> QueueFullError:
    with pytest.raises(QueueFullError) as caught:
        admission.admit(tokens)
    return caught.value


def test_requests_are_taken_up_to_the_bound() -> None:
    admission = Admission(100)
    admission.admit(60)
    admission.admit(40)
    assert admission.is_full
    error = refusal(admission, 1)
    assert error.message == (
        "at most 100 tokens may wait (max_queued_tokens), 100 are waiting and this request has 1; retry later"
    )
    assert (error.status, error.code) == (429, "queue_full")
    assert admission.tokens == 100, "a refused request takes no room"


def test_a_request_larger_than_the_bound_is_taken_where_nothing_waits() -> None:
    admission = Admission(100)
    admission.admit(1000)
    refusal(admission, 1)
    admission.release(1000)
    admission.admit(1)
    refusal(admission, 1000)


def test_it_can_be_asked_before_a_request_is_read() -> None:
    admission = Admission(100)
    admission.admit(99)
    admission.check()
    admission.admit(1)
    with pytest.raises(QueueFullError, match="100 are waiting; retry later"):
        admission.check()


def test_tokens_leave_when_they_are_computed_or_given_up() -> None:
    admission = Admission(100)
    admission.admit(100)
    admission.release(30)
    admission.release(50, computed=False)
    assert (admission.tokens, admission.is_full) == (20, False)
    admission.release(20)
    assert admission.tokens == 0


def test_before_anything_was_measured_one_second_is_suggested() -> None:
    admission = Admission(100)
    admission.admit(100)
    assert refusal(admission, 100).retry_after == 1


def test_the_wait_is_what_the_measured_rate_makes_of_the_excess(clock: Clock) -> None:
    admission = Admission(100)
    admission.admit(100)
    clock.now += 2.0
    admission.release(20)  # 10 tokens a second
    assert refusal(admission, 75).retry_after == -(-(80 + 75 - 100) // 10) == 6
    assert refusal(admission, 21).retry_after == 1


def test_a_rate_can_be_forgotten(clock: Clock) -> None:
    admission = Admission(100)
    admission.admit(100)
    clock.now += 50.0
    admission.release(1)
    assert refusal(admission, 100).retry_after == 60
    admission.reset_rate()
    assert refusal(admission, 100).retry_after == 1


def test_no_client_is_asked_to_wait_for_more_than_a_minute(clock: Clock) -> None:
    admission = Admission(100)
    admission.admit(100)
    clock.now += 10.0
    admission.release(1)
    assert refusal(admission, 100).retry_after == 60


def test_idle_time_does_not_lower_the_rate(clock: Clock) -> None:
    admission = Admission(100)
    for _ in range(5):
        admission.admit(100)
        clock.now += 1.0
        admission.release(100)
        clock.now += 10_000.0
    admission.admit(100)
    assert refusal(admission, 250).retry_after == 3


def test_tokens_that_were_given_up_say_nothing_of_the_rate(clock: Clock) -> None:
    admission = Admission(100)
    admission.admit(200)
    clock.now += 1.0
    admission.release(10)
    clock.now += 1.0
    admission.release(90, computed=False)
    assert refusal(admission, 50).retry_after == 5


def test_the_rate_follows_what_is_measured_now(clock: Clock) -> None:
    admission = Admission(100)
    admission.admit(100_000)
    clock.now += 1.0
    admission.release(1000)
    for _ in range(10):
        clock.now += 10.0
        admission.release(100)
    left = admission.tokens
    wait = refusal(admission, 400).retry_after
    assert wait == 60
    admission.release(left - 100, computed=False)
    assert 25 <= refusal(admission, 300).retry_after <= 30, "10 tokens a second, and no longer 1,000"
