"""The application on a real Ray cluster: exactness, homes, another model, more replicas."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from benchmarks.ports import free_port
from prefixwise import Scorer
from prefixwise.cluster.options import ClusterOptions
from tests.cluster.ray_cluster import (
    Load,
    check_scores,
    options_of,
    ray_nodes,
    replica_processes,
    score_body,
    wait_until,
)
from tests.server.server_process import real_server

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEP_SECONDS = 0.03
REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/score", score_body(1)),
    ("POST", "/v1/score", {"query": "Is it?", "items": ["yes it is", "no"], "labels": [" yes", " no"]}),
    ("POST", "/v1/score", {"query": "Is it?"}),
    ("POST", "/v1/score", {"query": [1], "items": [[10**9]], "label_token_ids": [1]}),
    ("POST", "/v1/rerank", {"model": "m", "query": "basil", "documents": ["water", "sun", "frost"]}),
    ("POST", "/v2/rerank", {"model": "m", "query": "basil", "documents": ["water", "sun"], "top_n": 1}),
    ("POST", "/rerank", {"query": "basil", "texts": ["water", "sun"]}),
    ("POST", "/tokenize", {"text": "some words"}),
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
    ("GET", "/nothing/here", None),
    ("PUT", "/v1/score", None),
]
VOLATILE = ("id", "created")


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    with ray_nodes(STEP_SECONDS):
        yield


@pytest.fixture(scope="module")
def port(nodes: None) -> int:
    """The application with two fake engines."""
    from prefixwise.cluster.serve_app import deploy

    port = free_port()
    deploy(options_of(port))
    return port


@pytest.fixture
def url(port: int) -> str:
    """With two replicas again, whatever a test has done to them."""
    wait_until(lambda: len(replica_processes()) == 2, "two replicas")
    return f"http://127.0.0.1:{port}"


def update(options: ClusterOptions) -> None:
    from prefixwise.cluster.serve_app import deploy

    deploy(options)


def steady(answer: Any) -> Any:
    """Without what is new in every answer."""
    if isinstance(answer, dict):
        return {name: steady(value) for name, value in answer.items() if name not in VOLATILE}
    return [steady(each) for each in answer] if isinstance(answer, list) else answer


def test_replicas_answer_exactly_what_one_server_answers(url: str) -> None:
    with real_server("--backend=fake") as server, httpx.Client(timeout=60) as http:
        for method, path, body in REQUESTS:
            single, cluster = (http.request(method, base + path, json=body) for base in (server.url, url))
            assert cluster.status_code == single.status_code, (method, path)
            assert steady(cluster.json()) == steady(single.json()), (method, path)
            kinds = cluster.headers["content-type"], single.headers["content-type"]
            assert kinds[0] == kinds[1]
            assert cluster.headers.get("allow") == single.headers.get("allow")


def test_the_same_query_lands_on_the_same_replica(url: str) -> None:
    homes: dict[int, set[str]] = {}
    with httpx.Client(base_url=url, timeout=60) as http:
        for seed in range(3):
            for query in range(10):
                response = http.post("/v1/score", json=score_body(query, seed))
                homes.setdefault(query, set()).add(response.headers["x-prefixwise-replica"])
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert len(set.union(*homes.values())) == 2


def test_metrics_are_those_of_all_replicas(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        for query in range(10):
            http.post("/v1/score", json=score_body(query)).raise_for_status()
        page = http.get("/metrics").text
    counted = [line for line in page.splitlines() if line.startswith("prefixwise:items_scored_total{")]
    assert len({line.split('replica="')[1].split('"')[0] for line in counted}) == 2


def test_a_request_id_of_the_client_comes_back_once(url: str) -> None:
    response = httpx.post(url + "/v1/score", json=score_body(1), headers={"x-request-id": "mine"}, timeout=60)
    assert response.headers.get_list("x-request-id") == ["mine"]


def test_another_model_comes_without_a_failed_request(port: int, url: str) -> None:
    """The new one differs in its name, which answers carry; its scores can be told from no other."""
    with Load(url) as load:
        load.wait_for(20)
        update(options_of(port, engine={"served_names": ("next",)}))
        load.wait_for(40)
    names = [answer["model"] for _, status, answer in load.answers if status == 200]
    assert names[-1] == "next" != names[0]
    check_scores(load)
    update(options_of(port))


def test_a_full_replica_s_requests_go_to_another(port: int, url: str) -> None:
    """Ten at once of one query, where a replica takes two: some are answered elsewhere, the rest are told when to come
    again."""
    body = score_body(1)
    tokens = 4 + sum(len(item) for item in body["items"])
    update(options_of(port, engine={"max_queued_tokens": 2 * tokens}, max_wait_steps=1000.0))
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: httpx.post(url + "/v1/score", json=body, timeout=60), range(10)))
    update(options_of(port))
    good = [answer for answer in answers if answer.status_code == 200]
    assert len({answer.headers["x-prefixwise-replica"] for answer in good}) == 2
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in refused} <= {429}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)


def test_waiting_tokens_bring_more_replicas(port: int, url: str) -> None:
    update(options_of(port, replicas=2, max_replicas=3, target_queued_tokens=4))
    with Load(url, num_clients=12) as load:
        wait_until(lambda: len(replica_processes()) == 3, "a third replica")
    check_scores(load)
    update(options_of(port))


def test_real_scores_are_those_of_one_server_to_the_bit(port: int, url: str) -> None:
    """The embedded model, on two replicas."""
    update(options_of(port, engine={"backend": "torch", "device": "cpu"}, cpus_per_replica=1.0))
    items = ["water it every morning", "keep it dry", "put it in the sun", "a story about cars"]
    with Scorer(backend="torch", device="cpu") as scorer, httpx.Client(base_url=url, timeout=120) as http:
        for query in ("How do I keep basil alive? ", "What do cars do? ", "Why? "):
            body: dict[str, Any] = {"query": query, "items": items, "labels": [" yes", " no"]}
            assert http.post("/v1/score", json=body).json()["scores"] == scorer.score(**body).scores
    update(options_of(port))


def test_the_key_is_asked_for_and_in_no_log(port: int, url: str) -> None:
    import ray

    options = options_of(port)
    update(replace(options, server=replace(options.server, api_key="sesame-7391")))
    assert httpx.post(url + "/v1/score", json=score_body(1), timeout=60).status_code == 401
    keyed = httpx.post(url + "/v1/score", json=score_body(1), headers={"x-api-key": "sesame-7391"}, timeout=60)
    assert keyed.status_code == 200
    update(options)
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    logs = [path for path in session.rglob("*") if path.is_file()]
    assert logs
    assert [path for path in logs if b"sesame-7391" in path.read_bytes()] == []
