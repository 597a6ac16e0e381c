"""Processes of a real Ray cluster that are killed with -9 under load: what clients see of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from benchmarks.ports import free_port
from prefixwise import Scorer
from tests.cluster.ray_cluster import (
    TIMEOUT,
    Load,
    add_node,
    check_scores,
    front_processes,
    kill,
    node_of,
    options_of,
    ray_nodes,
    replica_process,
    replica_processes,
    score_body,
    wait_until,
)

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEP_SECONDS = 0.03


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with ray_nodes(STEP_SECONDS) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def port(nodes: Cluster) -> int:
    """The application with two fake engines and two fronts."""
    port = free_port()
    update(port)
    return port


@pytest.fixture
def url(port: int) -> str:
    """With all of them again, whatever a test has done to them."""
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: len(replica_processes()) == len(front_processes()) == 2, "two replicas and two fronts")
    wait_until(lambda: num_answering(url) == 2, "both answer")
    return url


def update(port: int, **scale: Any) -> None:
    from prefixwise.cluster.serve_app import deploy

    deploy(options_of(port, **{"fronts": 2, **scale}))


def num_answering(url: str) -> int:
    """Replicas that tell their metrics."""
    lines = httpx.get(url + "/metrics", timeout=60).text.splitlines()
    return sum(line.startswith("prefixwise:requests_running{") for line in lines)


def home_of(url: str, query: int) -> str:
    """The name of the replica that this query belongs to."""
    response = httpx.post(url + "/v1/score", json=score_body(query), timeout=60)
    name: str = response.headers["x-prefixwise-replica"]
    return name


def is_running(url: str, replica: str) -> bool:
    """Does this replica compute a request?"""
    lines = httpx.get(url + "/metrics", timeout=60).text.splitlines()
    mine = [line for line in lines if line.startswith(f'prefixwise:requests_running{{replica="{replica}"')]
    return any(float(line.split()[-1]) > 0 for line in mine)


def test_a_killed_replica_costs_no_answer_and_no_score(url: str) -> None:
    with Load(url) as load:
        load.wait_for(20)
        victim = replica_processes()[0]
        kill(victim)
        load.wait_for(40)
        wait_until(lambda: len([each for each in replica_processes() if each.pid != victim.pid]) == 2, "another one")
        load.wait_for(20)
    check_scores(load)


def test_a_request_that_its_replica_dies_with_is_answered_by_another(url: str) -> None:
    """One of some 250 steps, which is the victim's beyond doubt when it is killed."""
    body = {**score_body(1), "items": [[item % 500] * 500 for item in range(1000)]}
    home = home_of(url, 1)
    victim = replica_process(home)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, url + "/v1/score", json=body, timeout=TIMEOUT)
        wait_until(lambda: is_running(url, home), "the request is computed")
        assert not answer.done()
        kill(victim)
        response = answer.result()
    assert response.status_code == 200
    assert response.headers["x-prefixwise-replica"] != home
    with Scorer(backend="fake") as scorer:
        assert response.json()["scores"] == scorer.score(**body).scores


def test_a_killed_front_costs_at_most_the_requests_that_it_had(url: str) -> None:
    """Nobody else knows of them; sent again they are answered by the other one."""
    with Load(url, tries=3) as load:
        load.wait_for(20)
        kill(front_processes()[0])
        load.wait_for(60)
    check_scores(load)
    assert load.num_failures <= 2 * 4  # what was in flight, and what was sent to it before its end was known


def test_a_killed_node_is_done_without(nodes: Cluster, port: int, url: str) -> None:
    """Its proxy, which clients may be connected to, goes with it, and so does a front if it is there."""
    update(port, cpus_per_replica=3.0)  # no node has room for two
    homes = {node_of(home_of(url, query)) for query in range(10)}
    victim = next(node for node in nodes.worker_nodes if node.node_id in homes)
    with Load(url, tries=10) as load:
        load.wait_for(20)
        nodes.remove_node(victim, allow_graceful=False)
        load.wait_for(60)
        wait_until(lambda: len(replica_processes()) == 2, "two replicas on the nodes that are left")
        load.wait_for(20)
    check_scores(load)
    add_node(nodes)
    update(port)


def test_no_replica_at_all_is_told_in_time(port: int, url: str) -> None:
    """The only one is killed: whoever cannot wait for the next is told so when the time is up."""
    update(port, replicas=1)
    wait_until(lambda: len(replica_processes()) == 1, "one replica")
    kill(replica_processes()[0])
    response = httpx.post(url + "/v1/score", json=score_body(1), headers={"x-request-timeout": "0.5"}, timeout=60)
    assert response.status_code in (200, 503, 504)
    update(port)
