"""A whole run against a real server: the warm-up is apart, each phase goes on where the last one ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from itemwise.harness.artifacts import LoadResult
from itemwise.harness.geometry import RequestMaker
from itemwise.harness.load.arrivals import PhaseLength
from itemwise.harness.load.client_overhead import measure_client_overhead
from itemwise.harness.load.driver import LoadTarget
from itemwise.harness.load.run import LoadPlan, LoadRun
from tests.harness.load_samples import small_requests
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


def run(server: ServerProcess, plan: LoadPlan, maker: RequestMaker, told: list[str] | None = None) -> LoadResult:
    tell = (lambda line: None) if told is None else told.append
    return LoadRun(LoadTarget(server.url), maker, plan, tell).run({"some": "configuration"})


def test_the_warm_up_is_sent_and_in_no_figure(server: ServerProcess) -> None:
    told: list[str] = []
    before = stats(server)["items_scored"]
    result = run(server, CLOSED, small_requests(num_items=3), told)
    assert stats(server)["items_scored"] - before == (5 + 12) * 3
    assert result.warmup is not None
    assert (result.warmup.arrivals, result.measured.arrivals, result.measured.answered) == (5, 12, 12)
    assert result.measured.goodput is not None and result.measured.goodput.bound_met
    assert told == ["warm-up, 2 in flight", "measuring, 2 in flight"]
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
    assert result.measured.send_sec == 0.5
    assert result.measured.goodput is None


def search_plan(bound_ms: float, **changes: Any) -> LoadPlan:
    plan = LoadPlan(mode="open", rate_qps=50.0, length=PhaseLength(requests=3), bound_ms=bound_ms, search=True)
    return replace(plan, **changes)


def test_a_search_ends_at_a_rate_that_met_the_bound(server: ServerProcess) -> None:
    """Everything is within a minute: it doubles as often as it may."""
    result = run(server, search_plan(60_000.0), small_requests())
    assert [probe.rate_qps for probe in result.rate_search] == [50.0 * 2**index for index in range(13)]
    assert all(probe.bound_met for probe in result.rate_search)
    assert result.rate_qps == 50.0 * 2**12
    assert result.measured.arrivals == 3


def test_a_search_that_finds_none_shows_the_lowest_rate(server: ServerProcess) -> None:
    """Nothing is answered within a microsecond."""
    result = run(server, search_plan(0.001, rate_qps=100_000.0), small_requests())
    assert not any(probe.bound_met for probe in result.rate_search)
    assert result.rate_qps == min(probe.rate_qps for probe in result.rate_search)


def test_what_the_client_costs_is_little_and_not_nothing() -> None:
    overhead = asyncio.run(measure_client_overhead(small_requests(num_items=100), calls=20))
    assert 0.05 < overhead.p50_ms < 50
    assert overhead.p50_ms <= overhead.p99_ms <= overhead.max_ms
