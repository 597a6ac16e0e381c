"""Metrics of a load, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwise.bench.kinds.load import LOAD_VERSION, LoadResult, metrics_of
from prefixwise.bench.run.load_stats import DROPPED, Call, ClientUse, notes_of, spread_of, summarise
from tests.bench.load_samples import small_requests

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


def evenly(count: int, per_second: float, service: float) -> list[Call]:
    """Sent one after another, each answered after `service` seconds."""
    return [Call(index / per_second, index / per_second, index / per_second + service) for index in range(count)]


def test_a_straggler_does_not_dilute_the_rates() -> None:
    """231 in 8 s, 230 answered in 5 ms and one after 20 s: 230 in time are 28.75 a second, not 230 in 24 s."""
    calls = evenly(230, 28.75, 0.005)
    phase = summarise([*calls, Call(4.0, 4.0, 24.0)], num_items=10, send_sec=8.0, bound_ms=100.0)
    assert phase.goodput is not None
    assert (phase.send_sec, phase.rate_sec, phase.wall_sec, phase.drain_sec) == (8.0, 8.0, 24.0, 16.0)
    assert phase.goodput.requests_per_sec == pytest.approx(28.75)
    assert phase.goodput.items_per_sec == pytest.approx(287.5)
    assert phase.qps_answered == pytest.approx(231 / 8)
    assert phase.items_per_sec == pytest.approx(2310 / 8)


def test_a_server_that_falls_behind_is_as_slow_as_it_is() -> None:
    """100 a second for ten seconds, of which it does 50 a second: the last one in a hundred comes after 19.8 s."""
    calls = [Call(index / 100, index / 100, (index + 1) / 50) for index in range(1000)]
    phase = summarise(calls, num_items=1, send_sec=10.0)
    assert phase.wall_sec == pytest.approx(20.0)
    assert phase.qps_sent == pytest.approx(100.0)
    assert phase.qps_answered == pytest.approx(50.0, rel=0.02)


def test_what_every_answer_takes_is_no_backlog() -> None:
    """300 ms each: the last ones come after the sending, and the server keeps up."""
    phase = summarise(evenly(600, 100.0, 0.3), num_items=1, send_sec=6.0, bound_ms=400.0)
    assert phase.qps_answered == pytest.approx(100.0)
    assert phase.goodput is not None and phase.goodput.requests_per_sec == pytest.approx(100.0)


def test_a_burst_lasts_until_it_is_answered() -> None:
    """Ten at once, answered after 0.4 s: 25 a second, and not ten in no time."""
    phase = summarise([Call(0.0, 0.0, 0.4)] * 10, num_items=1, send_sec=0.0)
    assert phase.qps_answered == pytest.approx(25.0)


def test_a_late_sender_has_sent_less() -> None:
    """Ten were due in a second; the last was sent after two: they are five a second."""
    calls = [Call(index / 10, index / 5 + 0.2, index / 5 + 0.21) for index in range(10)]
    phase = summarise(calls, num_items=1, send_sec=1.0)
    assert (phase.qps_offered, phase.qps_sent, phase.send_sec) == pytest.approx((10.0, 5.0, 2.0))
    assert phase.client_limited


@pytest.mark.parametrize(
    ("late_ms", "service_ms", "is_limited"),
    [(0.0, 1.0, False), (4.5, 1.0, False), (5.5, 1.0, True), (29.0, 300.0, False), (31.0, 300.0, True)],
)
def test_the_client_is_the_limit_where_it_is_late_by_5_ms_and_a_tenth(
    late_ms: float, service_ms: float, is_limited: bool
) -> None:
    calls = [Call(0.0, late_ms / 1000, (late_ms + service_ms) / 1000)] * 5
    phase = summarise(calls, num_items=1, send_sec=1.0)
    assert phase.client_limited is is_limited
    assert any(note.startswith("CLIENT LIMITED: this machine sent late") for note in notes_of(phase)) is is_limited


@pytest.mark.parametrize(
    ("cpu_sec", "wall_sec", "is_limited"), [(1.7, 2.0, False), (1.9, 2.0, True), (0.1, 0.1, False)]
)
def test_the_client_is_the_limit_where_a_process_has_no_cpu_time_left(
    cpu_sec: float, wall_sec: float, is_limited: bool
) -> None:
    """Nothing is sent late; a burst of 0.1 s says nothing."""
    calls = [Call(0.0, 0.0, 0.001)] * 100
    clients = [ClientUse(calls[:60], 0.1, wall_sec), ClientUse(calls[60:], cpu_sec, wall_sec)]
    phase = summarise(calls, num_items=1, send_sec=wall_sec, clients=clients)
    assert [client.sent for client in phase.client_processes] == [60, 40]
    assert phase.client_processes[1].busy_share == pytest.approx(cpu_sec / wall_sec)
    assert phase.client_limited is is_limited
    note = "CLIENT LIMITED: 1 of 2 client processes had no CPU time left (95% busy)"
    assert any(each.startswith(note) for each in notes_of(phase)) is is_limited


def test_a_closed_loop_lasts_until_its_last_answer() -> None:
    phase = summarise([Call(0.0, 0.0, 0.5), Call(0.5, 0.5, 2.0)], num_items=3)
    assert (phase.send_sec, phase.qps_sent, phase.items_per_sec) == (2.0, 1.0, 3.0)


def test_a_closed_loop_does_not_wait_for_one_that_hangs() -> None:
    """One of two hangs from the start; the other does ten a second for five seconds."""
    phase = summarise([*evenly(50, 10.0, 0.1), Call(0.0, 0.0, 25.0)], num_items=1)
    assert (phase.rate_sec, phase.wall_sec) == pytest.approx((5.0, 25.0))
    assert phase.qps_answered == pytest.approx(51 / 5)


def test_failures_wait_for_ever_in_the_latency_of_all() -> None:
    """98 of 100 are answered in 10 ms; the p99 of all is one that got nothing."""
    calls = [*[Call(0.0, 0.0, 0.010)] * 98, Call(0.0, 0.0, 5.0, "timeout"), Call(0.0, 0.0, 0.0, DROPPED)]
    phase = summarise(calls, num_items=1, send_sec=1.0)
    assert phase.latency is not None and phase.latency.p99_ms == pytest.approx(10.0)
    assert phase.latency_with_failures is not None
    found = phase.latency_with_failures
    assert (found.p50_ms, found.p95_ms) == pytest.approx((10.0, 10.0))
    assert found.p99_ms is None


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
    late, lost, few = notes_of(summarise(CALLS, num_items=1, send_sec=2.0))
    assert late.startswith("CLIENT LIMITED: this machine sent late (p99 196.0 ms)")
    assert lost.startswith("2 of 4 arrivals got no scores")
    assert few.startswith("the p99 of 2 answers")
    assert notes_of(summarise(of_101(0, 0), num_items=1)) == []


def result_of(calls: list[Call], **phase: Any) -> LoadResult:
    return LoadResult(
        schema_version=LOAD_VERSION,
        generated_at_utc="2026-02-11T12:00:00Z",
        url="http://127.0.0.1:30000",
        server_config={},
        geometry=small_requests().geometry,
        mode="open",
        rate_qps=1.0,
        concurrency=None,
        seed=0,
        timeout_sec=1.0,
        max_in_flight=8,
        client_overhead=None,
        warmup=None,
        measured=summarise(calls, **phase),
        rate_search=[],
        notes=[],
    )


def test_figures_for_people_have_separators_and_no_more_rows_than_needed() -> None:
    """All but 30 are there after 2,969 / 1,500 + 1.5 s; a tenth of the sending time is taken off for the fastest."""
    metrics = metrics_of(result_of(evenly(3000, 1500.0, 1.5), num_items=10, send_sec=2.0, bound_ms=2000.0))
    assert dict(metrics) == {
        "sent": "1,500.00 requests/s: 3,000 of 3,000 arrivals in 2.0 s",
        "answered": "914.82 requests/s: 3,000 in 3.3 s, the last after 3.5 s",
        "items": "9,148.2 items/s",
        "latency": "p50 1,500.0  p95 1,500.0  p99 1,500.0  max 1,500.0  ms",
        "service latency": "p50 1,500.0  p95 1,500.0  p99 1,500.0  max 1,500.0  ms",
        "sender late by": "p50 0.0  p95 0.0  p99 0.0  max 0.0  ms",
        "client overhead": "-",
        "errors": "none",
        "dropped": "0",
        "goodput": "914.82 requests/s, 9,148.2 items/s within 2,000 ms (100.0% of arrivals; p99 bound met)",
    }


def test_a_row_has_the_failures_where_there_are_some() -> None:
    calls = [*[Call(0.0, 0.0, 0.010)] * 98, *[Call(0.0, 0.0, 5.0, "timeout")] * 2]
    metrics = dict(metrics_of(result_of(calls, num_items=1, send_sec=1.0)))
    assert metrics["latency of all"] == "p50 10.0  p95 10.0  p99 never  ms, with the 2 that got no scores"
    assert metrics["latency"].startswith("p50 10.0  p95 10.0  p99 10.0")
