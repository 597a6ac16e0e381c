"""A whole run against a real server: the warm-up is apart, each phase goes on where the last one ended."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LoadResult
from prefixwise.bench.run.load import (
    LoadPlan,
    LoadRun,
    _Measured,
    choose_client_processes,
    find_rate,
    probe_length,
)
from prefixwise.bench.run.load_driver import LoadTarget, PhaseLength
from prefixwise.bench.run.load_overhead import measure_client_overhead
from prefixwise.bench.run.load_stats import Call, summarise
from tests.bench.load_samples import small_requests
from tests.bench.run.slow_server import slow_server, wait_for_calls
from tests.server.server_process import ServerProcess, server_process

CLOSED = LoadPlan(
    mode="closed", concurrency=2, length=PhaseLength(requests=12), warmup=PhaseLength(requests=5), bound_ms=60_000.0
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as running:
        yield running


def stats(server: ServerProcess) -> dict[str, int]:
    found: dict[str, int] = httpx.get(f"{server.url}/server_info").json()["stats"]
    return found


def run(server: ServerProcess, plan: LoadPlan, maker: RequestMaker, reported: list[str] | None = None) -> LoadResult:
    tell = (lambda line: None) if reported is None else reported.append
    return LoadRun(LoadTarget(server.url), maker, plan, tell, server_config={"some": "configuration"}).run()


def test_the_warm_up_is_sent_and_in_no_figure(server: ServerProcess) -> None:
    reported: list[str] = []
    before = stats(server)["items_scored"]
    result = run(server, CLOSED, small_requests(num_items=3), reported)
    assert stats(server)["items_scored"] - before == (5 + 12) * 3
    assert result.warmup is not None
    assert (result.warmup.arrivals, result.measured.arrivals, result.measured.answered) == (5, 12, 12)
    assert result.measured.goodput is not None and result.measured.goodput.bound_met
    assert reported == ["warm-up, 2 in flight", "measuring, 2 in flight"]
    assert (result.rate_qps, result.concurrency, result.rate_search) == (None, 2, [])
    assert result.server_config == {"some": "configuration"}


@pytest.mark.parametrize(("distinct_queries", "hits"), [(0, 0), (1, 16 * 300)])
def test_queries_are_shared_as_asked_for(server: ServerProcess, distinct_queries: int, hits: int) -> None:
    """Of 17 requests all but the first find the one query of 300 tokens."""
    before = stats(server)["prefix_hit_tokens"]
    maker = small_requests(seed=1 + distinct_queries, query_tokens=300, distinct_queries=distinct_queries)
    run(server, replace(CLOSED, concurrency=1), maker)
    assert stats(server)["prefix_hit_tokens"] - before == hits


def test_an_open_loop_without_warm_up(server: ServerProcess) -> None:
    plan = LoadPlan(mode="open", rate_qps=200.0, length=PhaseLength(seconds=0.5))
    result = run(server, plan, small_requests())
    assert result.warmup is None
    assert result.measured.answered == result.measured.arrivals > 60
    assert result.measured.send_sec > 0.25  # the arrivals are spread; a busy machine sends the last of them late
    assert result.measured.goodput is None


def search_plan(bound_ms: float, **changes: Any) -> LoadPlan:
    length = PhaseLength(requests=3)
    plan = LoadPlan(mode="open", rate_qps=50.0, length=length, bound_ms=bound_ms, search=True, min_arrivals=3)
    return replace(plan, **changes)


def test_a_search_ends_at_a_rate_that_met_the_bound(server: ServerProcess) -> None:
    """Everything is within a minute: it doubles as often as it may."""
    result = run(server, search_plan(60_000.0), small_requests())
    assert [probe.rate_qps for probe in result.rate_search] == [50.0 * 2**index for index in range(13)]
    assert all(probe.bound_met for probe in result.rate_search)
    assert result.rate_qps == 50.0 * 2**12
    assert result.measured.arrivals == 3
    assert not result.cut_short


def test_a_search_that_finds_none_shows_the_lowest_rate_and_has_tried_each_twice(server: ServerProcess) -> None:
    """Nothing is answered within a microsecond."""
    reported: list[str] = []
    result = run(server, search_plan(0.001, rate_qps=100_000.0), small_requests(), reported)
    rates = [probe.rate_qps for probe in result.rate_search]
    assert not any(probe.bound_met for probe in result.rate_search)
    assert rates == [100_000.0 / 2**index for index in range(13) for _ in range(2)]
    assert result.rate_qps == min(rates)
    assert [line.partition(",")[0] for line in reported] == ["trying", "trying again"] * 13


def test_a_probe_has_arrivals_enough(server: ServerProcess) -> None:
    result = run(server, search_plan(60_000.0, rate_qps=20_000.0, min_arrivals=40), small_requests())
    assert {probe.arrivals for probe in result.rate_search} == {40}


def test_a_miss_by_chance_does_not_count() -> None:
    """One request hangs, which is in the first probe: tried again the rate is met."""
    with slow_server(0.001, hang=1, hang_seconds=0.7) as url:
        plan = search_plan(500.0, rate_qps=2000.0)
        result = LoadRun(LoadTarget(url), small_requests(), plan, lambda line: None, server_config={}).run()
    first, again, *_ = result.rate_search
    assert (first.rate_qps, first.bound_met) == (again.rate_qps, not again.bound_met) == (2000.0, False)
    assert result.rate_qps is not None and result.rate_qps >= 2000.0


def test_what_is_found_so_far_is_handed_out_after_every_probe(server: ServerProcess) -> None:
    kept: list[LoadResult] = []
    plan = search_plan(60_000.0, rate_qps=1000.0)
    target, maker = LoadTarget(server.url), small_requests()
    LoadRun(target, maker, plan, lambda line: None, server_config={}, keep=kept.append).run()
    assert [len(each.rate_search) for each in kept] == list(range(1, 14))
    assert [each.rate_qps for each in kept] == [1000.0 * 2**index for index in range(13)]
    assert all(each.cut_short and each.notes[0].startswith("cut short") for each in kept)


def interrupted(plan: LoadPlan, url: str, after_calls: int) -> LoadRun:
    def interrupt() -> None:
        wait_for_calls(url, after_calls)
        os.kill(os.getpid(), signal.SIGINT)

    load = LoadRun(LoadTarget(url), small_requests(), plan, lambda line: None, server_config={})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watching = threading.Thread(target=interrupt)
    watching.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            load.run()
    finally:
        watching.join()
        signal.signal(signal.SIGINT, before)
    gc.collect()  # a connection that was left open is reported here, as a warning
    return load


@pytest.mark.parametrize(
    "plan",
    [
        LoadPlan(mode="open", rate_qps=50.0, length=PhaseLength(seconds=60.0)),
        LoadPlan(mode="closed", concurrency=2, length=PhaseLength(seconds=60.0)),
        LoadPlan(mode="open", rate_qps=50.0, length=PhaseLength(seconds=60.0), client_processes=2),
    ],
)
def test_an_interrupt_leaves_what_was_done(plan: LoadPlan) -> None:
    with slow_server(0.01) as url:
        result = interrupted(plan, url, after_calls=25).result_so_far()
    assert result is not None and result.cut_short
    assert result.notes[0].startswith("cut short")
    assert 5 < result.measured.answered == result.measured.arrivals
    assert sum(client.sent for client in result.measured.client_processes) == result.measured.sent


def test_an_interrupt_before_anything_was_measured_leaves_nothing() -> None:
    with slow_server(30.0) as url:
        plan = LoadPlan(mode="closed", concurrency=1, length=PhaseLength(requests=1), warmup=PhaseLength(requests=1))
        assert interrupted(plan, url, after_calls=1).result_so_far() is None


def test_a_search_says_where_the_client_was_the_limit(server: ServerProcess) -> None:
    """Two probes that were missed half a second late: not the server's failures, and said to be none."""
    load = LoadRun(LoadTarget(server.url), small_requests(), search_plan(1.0), lambda line: None, server_config={})
    late = summarise([Call(0.0, 0.5, 0.6)], num_items=2, send_sec=1.0, bound_ms=1.0)
    load._measured = [_Measured(80.0, late), _Measured(40.0, late)]
    result = load.result_so_far()
    assert result is not None
    assert [probe.client_limited for probe in result.rate_search] == [True, True]
    assert any(note.startswith("CLIENT LIMITED: at 40 requests/s this machine sent late") for note in result.notes)


@pytest.mark.parametrize("in_flight", [1, 60])
def test_what_the_client_costs_is_measured(in_flight: int) -> None:
    overhead = asyncio.run(measure_client_overhead(small_requests(num_items=100), in_flight, calls=20))
    assert overhead is not None
    assert 0 < overhead.p50_ms <= overhead.p99_ms <= overhead.max_ms


def test_an_interrupt_closes_both_ends_of_the_calls_that_measure_the_client() -> None:
    async def cut_short() -> None:
        async with asyncio.timeout(0.1):
            await measure_client_overhead(small_requests(), in_flight=20, calls=100_000)

    with pytest.raises(TimeoutError):
        asyncio.run(cut_short())
    gc.collect()  # a connection that was left open is reported here, as a warning


def test_what_the_client_costs_is_measured_at_the_concurrency_expected(server: ServerProcess) -> None:
    closed = run(server, replace(CLOSED, concurrency=7), small_requests())
    assert closed.client_overhead_in_flight == 7
    with slow_server(0.2) as url:
        plan = LoadPlan(mode="open", rate_qps=100.0, length=PhaseLength(requests=5), warmup=PhaseLength(requests=5))
        opened = LoadRun(LoadTarget(url), small_requests(), plan, lambda line: None, server_config={}).run()
    assert opened.client_overhead_in_flight is not None
    assert 20 <= opened.client_overhead_in_flight < 60


def search(border: float, first: float, stride: float = 2.0) -> tuple[float | None, list[float]]:
    """What is found, and what was tried on the way."""
    tried: list[float] = []

    async def is_met(rate: float) -> bool:
        tried.append(rate)
        return rate <= border

    return asyncio.run(find_rate(is_met, first, precision=1.05, stride=stride)), tried


@pytest.mark.parametrize("border", [37.0, 100.0, 119.9, 120.0, 1000.0])
@pytest.mark.parametrize("first", [1.0, 120.0, 700.0])
def test_the_border_is_found_from_below_and_from_above(border: float, first: float) -> None:
    found, tried = search(border, first)
    assert found is not None
    assert border / 1.05 <= found <= border
    assert len(tried) == len(set(tried)) <= 16


def test_the_way_is_doubling_and_then_halving_the_gap() -> None:
    """10 and 20 are met, 40 is not; then the geometric middle of 20 and 40, which is 28.3."""
    _, tried = search(30.0, 10.0)
    assert tried[:4] == pytest.approx([10.0, 20.0, 40.0, 28.284], abs=0.001)


def test_a_search_that_begins_near_the_border_takes_smaller_strides() -> None:
    found, tried = search(900.0, 1000.0, stride=1.25)
    assert found == pytest.approx(894.427, abs=0.001)
    assert tried == pytest.approx([1000.0, 800.0, 894.427, 945.742, 919.727], abs=0.001)


def test_a_bound_that_no_rate_meets() -> None:
    found, tried = search(0.0, 64.0)
    assert found is None
    assert tried[-1] == 64.0 / 2**12


def test_a_server_that_takes_everything_gives_the_highest_rate_tried() -> None:
    assert search(float("inf"), 1.0)[0] == 2.0**12


@pytest.mark.parametrize(
    ("rate", "asked", "found"),
    [
        (100.0, PhaseLength(seconds=6.0), PhaseLength(seconds=6.0)),  # 600 arrivals
        (10.0, PhaseLength(seconds=6.0), PhaseLength(seconds=120.0, requests=200)),  # 60
        (10.0, PhaseLength(seconds=600.0, requests=3), PhaseLength(seconds=600.0, requests=200)),
        (1000.0, PhaseLength(requests=3), PhaseLength(seconds=120.0, requests=200)),
        (1.0, PhaseLength(requests=500), PhaseLength(requests=500)),
    ],
)
def test_a_probe_is_long_enough_for_a_p99(rate: float, asked: PhaseLength, found: PhaseLength) -> None:
    assert probe_length(rate, asked) == found


def test_how_many_arrivals_are_enough_may_be_said() -> None:
    assert probe_length(1.0, PhaseLength(requests=3), min_arrivals=3) == PhaseLength(requests=3)


@pytest.mark.parametrize(
    ("rate", "concurrency", "search", "cores", "chosen"),
    [
        (120.0, None, False, 16, 1),
        (3000.0, None, False, 16, 3),
        (120.0, None, True, 16, 3),
        (9000.0, None, True, 64, 9),
        (9000.0, None, True, 8, 4),  # half of the cores are left to the server
        (9000.0, None, False, 1, 1),
        (None, 8, False, 16, 1),
        (None, 100, False, 16, 4),
    ],
)
def test_so_many_client_processes_are_chosen(
    rate: float | None, concurrency: int | None, search: bool, cores: int, chosen: int
) -> None:
    assert choose_client_processes(rate, concurrency, search=search, cores=cores) == chosen
