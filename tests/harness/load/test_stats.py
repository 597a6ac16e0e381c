"""Figures of a load, worked out by hand."""

from __future__ import annotations

import pytest

from itemwise.harness.load.stats import DROPPED, Call, notes_of, spread_of, summarise

# Two requests a second for two seconds. The second was sent late, the third failed, the fourth was dropped.
CALLS = [
    Call(intended=0.0, sent=0.0, done=0.1),
    Call(intended=0.5, sent=0.7, done=1.0),
    Call(intended=1.0, sent=1.0, done=1.1, failure="queue_full"),
    Call(intended=1.5, sent=1.5, done=1.5, failure=DROPPED),
]


def test_a_spread_interpolates() -> None:
    """Of 0..100: the p99 is the value at place 99."""
    spread = spread_of([float(value) for value in range(101)])
    assert spread is not None
    assert spread.model_dump() == {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100, "mean_ms": 50}
    halves = spread_of([10.0, 20.0])
    assert halves is not None
    assert (halves.p50_ms, halves.p95_ms, halves.p99_ms) == pytest.approx((15.0, 19.5, 19.9))
    assert spread_of([]) is None


def test_counts_and_rates() -> None:
    phase = summarise(CALLS, num_items=10, send_sec=2.0)
    assert (phase.arrivals, phase.sent, phase.dropped, phase.answered) == (4, 3, 1, 2)
    assert phase.errors_by_code == {"queue_full": 1}
    assert (phase.send_sec, phase.wall_sec) == (2.0, 2.0)
    assert (phase.qps_offered, phase.qps_sent, phase.qps_answered, phase.items_per_sec) == (2.0, 1.5, 1.0, 10.0)
    assert phase.goodput is None


def test_latency_counts_from_the_intended_time_and_service_from_the_actual_one() -> None:
    """The two that were answered: 100 and 500 ms, of which 100 and 300 ms are the server's."""
    phase = summarise(CALLS, num_items=10, send_sec=2.0)
    assert phase.latency is not None and phase.service_latency is not None and phase.sender_late is not None
    assert (phase.latency.p50_ms, phase.latency.max_ms) == pytest.approx((300, 500))
    assert (phase.service_latency.p50_ms, phase.service_latency.max_ms) == pytest.approx((200, 300))
    assert (phase.sender_late.p50_ms, phase.sender_late.max_ms) == pytest.approx((0, 200))


def test_answers_that_come_after_the_last_arrival_take_their_time() -> None:
    phase = summarise([Call(0.0, 0.0, 4.0), Call(1.0, 1.0, 3.0)], num_items=1, send_sec=1.0)
    assert (phase.wall_sec, phase.qps_sent, phase.qps_answered) == (4.0, 2.0, 0.5)


def test_a_closed_loop_lasts_until_its_last_answer() -> None:
    phase = summarise([Call(0.0, 0.0, 0.5), Call(0.5, 0.5, 2.0)], num_items=3)
    assert (phase.send_sec, phase.qps_sent, phase.items_per_sec) == (2.0, 1.0, 3.0)


def test_goodput_counts_what_is_answered_within_the_bound() -> None:
    """At 100 ms sharp it is; the late, the failed and the dropped one are not: 1 of 4, in two seconds."""
    goodput = summarise(CALLS, num_items=10, send_sec=2.0, bound_ms=100.0).goodput
    assert goodput is not None
    assert (goodput.requests_per_sec, goodput.items_per_sec, goodput.share_within_bound) == (0.5, 5.0, 0.25)
    assert not goodput.bound_met


def of_101(slow: int, failed: int) -> list[Call]:
    """101 calls, of which a p99 is the second slowest."""
    quick = [Call(0.0, 0.0, 0.010)] * (101 - slow - failed)
    return [*quick, *[Call(0.0, 0.0, 0.030)] * slow, *[Call(0.0, 0.0, 0.010, "timeout")] * failed]


@pytest.mark.parametrize(
    ("slow", "failed", "is_met"),
    [(0, 0, True), (1, 0, True), (2, 0, False), (0, 1, True), (0, 2, False), (1, 1, False)],
)
def test_the_bound_is_for_the_p99_and_no_answer_is_a_late_one(slow: int, failed: int, is_met: bool) -> None:
    goodput = summarise(of_101(slow, failed), num_items=1, bound_ms=20.0).goodput
    assert goodput is not None
    assert goodput.bound_met is is_met


def test_nothing_arrived() -> None:
    phase = summarise([], num_items=1, send_sec=1.0, bound_ms=5.0)
    assert (phase.arrivals, phase.qps_offered, phase.latency, phase.sender_late) == (0, 0.0, None, None)
    assert phase.goodput is not None and not phase.goodput.bound_met


def test_notes_say_what_the_figures_hide() -> None:
    lost, few, late = notes_of(summarise(CALLS, num_items=1, send_sec=2.0))
    assert lost.startswith("2 of 4 arrivals got no scores")
    assert few.startswith("the p99 of 2 answers")
    assert late.startswith("this machine sent late (p99 196.0 ms)")
    assert notes_of(summarise(of_101(0, 0), num_items=1)) == []
