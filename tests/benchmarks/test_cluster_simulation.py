"""The simulated cluster: what its parts cost, and what the product's routing is worth."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cluster_simulation.cases import CASES, TINY, moved_share
from benchmarks.cluster_simulation.cluster import Cluster, Loss, Scaling, Setup
from benchmarks.cluster_simulation.device import Device
from benchmarks.cluster_simulation.figures import most_within_bound, simulate
from benchmarks.cluster_simulation.policies import all_policies, home, prefixwise
from benchmarks.cluster_simulation.replica import Replica
from benchmarks.cluster_simulation.traffic import QueryBlocks, Request, Traffic, make_requests
from prefixwise.cluster.routing import RoutingOptions, rank_replicas

ROOT = Path(__file__).parents[2]
SETUP = Setup(replicas=4)
TRAFFIC = Traffic(num_queries=500, requests_per_second=95, seconds=6)
HOT = replace(TRAFFIC, skew=1.6)  # one query is more than one replica takes


def run(setup: Setup, traffic: Traffic) -> Cluster:
    return Cluster(setup, traffic, prefixwise(RoutingOptions())).run()


def test_a_step_takes_what_was_measured() -> None:
    device = Device()
    measured = {(2000, 10_000): 29.93e-3, (0, 10_000): 26.18e-3, (300, 200): 3.9e-3}
    for tokens, seconds in measured.items():
        assert device.seconds(*tokens) == pytest.approx(seconds, rel=0.01)


def test_full_steps_have_the_rate_that_was_measured_through_http() -> None:
    """Of many cold requests: a figure that the constants were not fitted to."""
    device = Device()
    steps = (2000 + 10_000) / device.step_tokens
    seconds = device.seconds(2000, 10_000) - (1 - steps) * device.fixed_seconds
    assert 500 / seconds == pytest.approx(17_185, rel=0.01)


def test_a_replica_finds_the_prefix_that_it_has_computed() -> None:
    replica = Replica("a", Device(), TRAFFIC, QueryBlocks(TRAFFIC.query_tokens))
    first, again = Request(0.0, 7, 0), Request(0.0, 7, 0)
    replica.take(first)
    assert replica.begin_step() == pytest.approx(Device().seconds(2000, 10_000))
    assert replica.end_step() == [first]
    replica.take(again)
    assert replica.begin_step() == pytest.approx(Device().seconds(0, 10_000))
    assert (replica.end_step(), again.hit_tokens, replica.queued_tokens) == ([again], 2000, 0)


def test_a_prefix_that_was_driven_out_is_computed_again() -> None:
    device = Device(cache_tokens=2048)  # room for one
    replica = Replica("a", device, TRAFFIC, QueryBlocks(TRAFFIC.query_tokens))
    requests = [Request(0.0, query, 0) for query in (1, 2, 1)]
    for request in requests:
        replica.take(request)
        replica.begin_step()
        replica.end_step()
    assert [request.hit_tokens for request in requests] == [0, 0, 0]


def test_the_hottest_query_comes_as_often_as_zipf_says() -> None:
    requests = make_requests(replace(TRAFFIC, skew=1.0, num_queries=3, seconds=60), 2, seed=1)
    counts = [sum(request.query == query for request in requests) for query in range(3)]
    assert [count / len(requests) for count in counts] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)


def test_every_request_is_answered_once_and_after_it_came() -> None:
    cluster = run(SETUP, TRAFFIC)
    assert all(request.done > request.arrived and request.attempts == 1 for request in cluster.requests)
    assert all(replica.queued_tokens == 0 for replica in cluster.replicas.values())


def test_the_same_seed_gives_the_same_figures() -> None:
    one, again, other = (simulate(SETUP, TRAFFIC, all_policies(seed)["random"], seed) for seed in (3, 3, 4))
    assert one == again
    assert one != other


def test_the_products_routing_finds_more_than_chance() -> None:
    found = {name: simulate(SETUP, TRAFFIC, policy).hit_rate for name, policy in all_policies(0).items()}
    assert found["prefixwise"] > found["random"] + 0.1
    assert found["prefixwise"] > found["least loaded"] + 0.1


def test_a_home_that_is_too_hot_is_left() -> None:
    spilled, stayed = (simulate(SETUP, HOT, policy) for policy in (prefixwise(RoutingOptions()), home))
    assert spilled.p99_ms < 500 < stayed.p99_ms
    assert spilled.load_spread < 1.6 < stayed.load_spread


def test_fronts_that_believe_old_figures_of_single_replicas_make_requests_wait() -> None:
    ours, greater = (
        simulate(
            Setup(fronts=8, estimate=estimate),
            Traffic(requests_per_second=200, seconds=8),
            prefixwise(RoutingOptions()),
        )
        for estimate in ("prefixwise", "greater")
    )
    assert ours.p99_ms < 0.7 * greater.p99_ms


def test_a_lost_replica_moves_its_own_queries_only() -> None:
    names = [f"replica-{number}" for number in range(8)]
    keys = [f"query {number}".encode() for number in range(500)]
    for key in keys:
        before, after = (rank_replicas(key, known)[0] for known in (names, names[1:]))
        assert before == after or before == names[0]
    assert moved_share(names, names[1:], TRAFFIC) == pytest.approx(1 / 8, abs=0.05)


def test_what_a_lost_replica_had_is_sent_again_and_answered() -> None:
    cluster = run(replace(SETUP, loss=Loss(at=3.0, back_after=1.0)), replace(TRAFFIC, requests_per_second=120))
    assert sum(request.attempts == 2 for request in cluster.requests) > 0
    assert all(request.done for request in cluster.requests)
    assert len(cluster.replicas) == 4 and "replica-0" not in cluster.replicas


def test_a_burst_adds_replicas_up_to_the_bound() -> None:
    scaling = Scaling(most=3, up_after=1.0, start_seconds=1.0)
    cluster = run(Setup(replicas=1, scaling=scaling), replace(TRAFFIC, requests_per_second=60))
    assert len(cluster.replicas) == 3
    assert cluster.sizes[-1][0] >= 2.0


def test_the_rate_that_is_found_is_within_the_bound() -> None:
    found = most_within_bound(Setup(replicas=1), replace(TRAFFIC, requests_per_second=20, seconds=4), lambda: home)
    assert found is not None and found.p99_ms <= 250
    assert 5_000 < found.offered_items_per_second < 19_100, "no more than one H200 was measured at"


@pytest.mark.slow
def test_all_cases_run_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "simulation.json"
    command = [sys.executable, "-m", "benchmarks.cluster_simulation", "--tiny", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(output.read_text(encoding="utf-8")) == result
    assert result["cases"].keys() == CASES.keys()
    assert all(rows for rows in result["cases"].values())
    assert result["replicas"] == TINY.setup.replicas
