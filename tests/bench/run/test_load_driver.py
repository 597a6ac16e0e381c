"""The driver against real servers: send times that no answer moves, drops that are counted, failures by their code."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from prefixwise.bench.run.load_driver import LoadDriver, LoadTarget, PhaseLength, Schedule, poisson_schedule
from prefixwise.bench.run.load_stats import DROPPED, Call
from tests.bench.load_samples import small_requests
from tests.bench.run.slow_server import slow_server
from tests.bench.wrong_server import Fault, wrong_server
from tests.server.server_process import server_process

TEN_AT_ONCE = Schedule((0.0,) * 10, 0.0)


@pytest.fixture(scope="module")
def quick() -> Iterator[str]:
    with server_process("--api-key=secret") as server:
        yield server.url


@pytest.fixture(scope="module")
def slow() -> Iterator[str]:
    """No answer in less than a second; 350 tokens fit its queue."""
    with server_process("--delay=1", "--max-queued-tokens=350") as server:
        yield server.url


def run_open(url: str, schedule: Schedule, query_tokens: int = 20, **target: Any) -> list[Call]:
    async def run() -> list[Call]:
        async with LoadDriver(LoadTarget(url, **target), small_requests(query_tokens=query_tokens)) as driver:
            return await driver.run_open(schedule)

    return asyncio.run(run())


def run_closed(url: str, concurrency: int, length: PhaseLength, **target: Any) -> list[Call]:
    async def run() -> list[Call]:
        async with LoadDriver(LoadTarget(url, **target), small_requests()) as driver:
            return await driver.run_closed(concurrency, length)

    return asyncio.run(run())


def test_a_slow_server_does_not_slow_the_schedule() -> None:
    """Ten arrivals in 90 ms at a server that answers nobody before all are there."""
    times = tuple(index / 100 for index in range(10))
    with slow_server(0.0, together=10) as url:
        calls = run_open(url, Schedule(times, 0.1))
    assert [call.intended for call in calls] == list(times)
    assert [call.failure for call in calls] == [None] * 10
    assert max(call.sent for call in calls) < min(call.done for call in calls)
    assert all(call.sent >= call.intended for call in calls)
    assert all(call.latency_ms == pytest.approx(call.service_ms + call.late_ms) for call in calls)


def test_a_request_that_is_sent_late_is_charged_for_it(quick: str) -> None:
    """It was due a second before the sender had time for it."""
    (call,) = run_open(quick, Schedule((-1.0,), 0.0), api_key="secret")
    assert call.failure is None
    assert call.late_ms >= 1000
    assert call.latency_ms == pytest.approx(call.service_ms + call.late_ms)


def test_arrivals_over_the_bound_are_dropped_and_counted(quick: str) -> None:
    calls = run_open(quick, TEN_AT_ONCE, max_in_flight=4, api_key="secret")
    assert [call.failure for call in calls] == [None] * 4 + [DROPPED] * 6


def test_room_is_made_by_answers(quick: str) -> None:
    calls = run_open(quick, Schedule((0.0, 0.0, 0.6, 0.6), 0.6), max_in_flight=2, api_key="secret")
    assert [call.failure for call in calls] == [None] * 4


def test_a_full_queue_is_an_error_with_its_code(slow: str) -> None:
    """One of 200 + 2 x 5 tokens fits, a second one does not."""
    calls = run_open(slow, TEN_AT_ONCE, query_tokens=200)
    assert sorted(str(call.failure) for call in calls) == ["None"] + ["queue_full"] * 9


def test_a_request_times_out() -> None:
    with slow_server(600.0) as url:
        (call,) = run_open(url, Schedule((0.0,), 0.0), timeout_sec=0.1)
    assert call.failure == "timeout"
    assert call.service_ms >= 100


def test_a_wrong_key_is_the_servers_own_error(quick: str) -> None:
    assert [call.failure for call in run_open(quick, Schedule((0.0,), 0.0))] == ["invalid_api_key"]


def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        calls = run_closed(f"http://127.0.0.1:{unused.getsockname()[1]}", 1, PhaseLength(requests=2))
    assert [call.failure for call in calls] == ["http_error"] * 2


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("error", "internal_error"),
        ("oom", "oom"),
        ("garbage", "bad_json"),
        ("short", "bad_response"),
        ("nan", "bad_response"),
    ],
)
def test_an_answer_that_is_none_is_counted_as_such(quick: str, fault: Fault, failure: str) -> None:
    with wrong_server(quick, fault) as url:
        assert [call.failure for call in run_closed(url, 1, PhaseLength(requests=1), api_key="secret")] == [failure]


def test_a_closed_loop_sends_the_next_when_one_is_answered(quick: str) -> None:
    calls = run_closed(quick, 1, PhaseLength(requests=5), api_key="secret")
    assert [call.failure for call in calls] == [None] * 5
    assert all(after.sent >= before.done for before, after in pairwise(calls))
    assert all(call.intended == call.sent for call in calls)


def test_a_closed_loop_has_so_many_in_flight(quick: str) -> None:
    calls = run_closed(quick, 3, PhaseLength(requests=12), api_key="secret")
    assert len(calls) == 12
    in_flight = [sum(other.sent <= call.sent < other.done for other in calls) for call in calls]
    assert max(in_flight) == 3


def test_a_closed_loop_has_exactly_so_many_in_flight() -> None:
    """The server answers only when eight are there: with fewer nobody would be answered, and there are never more."""
    with slow_server(0.0, together=8) as url:
        calls = run_closed(url, 8, PhaseLength(requests=80))
        stats = httpx.get(f"{url}/stats").json()
    assert [call.failure for call in calls] == [None] * 80
    assert len(stats["in_flight"]) == 80
    assert max(stats["in_flight"]) == 8
    assert stats["connections"] == 8 + 1


def test_an_open_loop_has_hundreds_in_flight() -> None:
    """The server answers nobody before all are there."""
    schedule = poisson_schedule(200.0, PhaseLength(requests=400), seed=0)
    with slow_server(0.0, together=400) as url:
        calls = run_open(url, schedule)
        in_flight = httpx.get(f"{url}/stats").json()["in_flight"]
    assert [call.failure for call in calls] == [None] * 400
    assert in_flight == list(range(1, 401))
    assert max(call.sent for call in calls) < min(call.done for call in calls)


def test_a_proxy_of_the_environment_is_not_asked(quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run_closed(quick, 1, PhaseLength(requests=1), api_key="secret")[0].failure is None


def test_an_open_loop_that_is_cut_short_ends_what_is_in_flight() -> None:
    """Cut between two arrivals, which nobody answers."""

    async def run(url: str) -> tuple[set[asyncio.Task[Any]], int]:
        async with LoadDriver(LoadTarget(url), small_requests()) as driver:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await driver.run_open(Schedule((0.0, 0.0, 60.0), 60.0))
            return asyncio.all_tasks() - {asyncio.current_task()}, len(driver.finished)

    with slow_server(600.0) as url:
        assert asyncio.run(run(url)) == (set(), 0)
    gc.collect()  # a connection that was left open is reported here, as a warning


def test_a_closed_loop_pauses_where_nobody_answers() -> None:
    """50, 100, 200 ms and so on: without that there would be thousands of calls in a second."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        calls = run_closed(f"http://127.0.0.1:{unused.getsockname()[1]}", 2, PhaseLength(seconds=1.0))
    assert {call.failure for call in calls} == {"http_error"}
    assert 2 <= len(calls) <= 2 * 6


def test_a_server_that_dies_midway_is_not_stormed() -> None:
    with server_process() as mortal:

        async def run() -> list[Call]:
            async with LoadDriver(LoadTarget(mortal.url), small_requests()) as driver:
                task = asyncio.create_task(driver.run_closed(2, PhaseLength(seconds=1.5)))
                while len(driver.finished) < 4:
                    await asyncio.sleep(0.01)
                mortal.process.kill()
                return await task

        calls = asyncio.run(run())
    failed = [call for call in calls if call.failure is not None]
    assert {call.failure for call in failed} == {"http_error"}
    assert 2 <= len(failed) <= 2 * 8


def test_time_ends_a_closed_loop(quick: str) -> None:
    calls = run_closed(quick, 1, PhaseLength(seconds=0.2), api_key="secret")
    assert len(calls) >= 2
    assert max(call.sent for call in calls) < 20  # it would go on for ever


def gaps(times: tuple[float, ...]) -> list[float]:
    return [after - before for before, after in zip((0.0, *times), times, strict=False)]


def test_gaps_have_the_mean_and_the_spread_of_a_poisson_process() -> None:
    """Exponential gaps: the deviation is the mean, and 1 - 1/e of them are shorter than it."""
    found = gaps(poisson_schedule(50.0, PhaseLength(requests=20_000), seed=1).times)
    mean = sum(found) / len(found)
    deviation = (sum((gap - mean) ** 2 for gap in found) / len(found)) ** 0.5
    assert mean == pytest.approx(0.02, rel=0.03)
    assert deviation == pytest.approx(0.02, rel=0.05)
    assert sum(gap < 0.02 for gap in found) / len(found) == pytest.approx(0.632, abs=0.015)


def test_as_many_arrive_in_a_time_as_the_rate_says() -> None:
    schedule = poisson_schedule(100.0, PhaseLength(seconds=100.0), seed=2)
    assert len(schedule.times) == pytest.approx(10_000, abs=300)  # three deviations
    assert schedule.times[-1] < 100.0
    assert schedule.send_sec == 100.0
    assert all(gap >= 0 for gap in gaps(schedule.times))


def test_a_number_ends_it_at_its_last_arrival() -> None:
    schedule = poisson_schedule(100.0, PhaseLength(requests=5), seed=3)
    assert len(schedule.times) == 5
    assert schedule.send_sec == schedule.times[-1]


def test_what_comes_first_ends_it() -> None:
    assert len(poisson_schedule(100.0, PhaseLength(seconds=60.0, requests=5), seed=3).times) == 5
    short = poisson_schedule(100.0, PhaseLength(seconds=0.5, requests=10_000), seed=3)
    assert len(short.times) < 100
    assert short.send_sec == 0.5


def test_the_seed_decides() -> None:
    length = PhaseLength(requests=10)
    assert poisson_schedule(5.0, length, 1) == poisson_schedule(5.0, length, 1)
    assert poisson_schedule(5.0, length, 1) != poisson_schedule(5.0, length, 2)


def test_nothing_may_arrive_at_all() -> None:
    schedule = poisson_schedule(0.001, PhaseLength(seconds=0.001), seed=0)
    assert (schedule.times, schedule.send_sec) == ((), 0.001)
