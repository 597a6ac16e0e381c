"""A real Ray cluster of several nodes on this machine, the application on it, and load for both."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from prefixwise import Scorer
from prefixwise.backends.load import FAKE_STEP_VARIABLE
from prefixwise.cluster.options import ClusterOptions, ScaleOptions
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

NODES = 3
_OK = 200
_CPUS_PER_NODE = 4  # to Ray; they need not be there
TIMEOUT = 90.0  # seconds for what takes a few on a quiet machine


@contextmanager
def ray_nodes(step_seconds: float = 0.0) -> Iterator[Cluster]:
    """Several nodes, each with processes of its own; steps of the fake backend take so long."""
    os.environ[FAKE_STEP_VARIABLE] = str(step_seconds)  # before the nodes start: their workers have it
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": _CPUS_PER_NODE, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            add_node(nodes)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
    finally:
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        nodes.shutdown()
        del os.environ[FAKE_STEP_VARIABLE]


def add_node(nodes: Cluster) -> None:
    nodes.add_node(num_cpus=_CPUS_PER_NODE)


def options_of(port: int, *, engine: dict[str, Any] | None = None, **scale: Any) -> ClusterOptions:
    """Fake engines unless others are asked for."""
    return ClusterOptions(
        EngineOptions(**{"backend": "fake", **(engine or {})}),
        ServerOptions(port=port, shutdown_grace=10.0),
        ScaleOptions(**{"replicas": 2, "cpus_per_replica": 0.5, **scale}),
    )


def replica_processes() -> list[psutil.Process]:
    """Of the engines, on all nodes; they do not run on another cluster of this machine."""
    return _processes("replica")


def front_processes() -> list[psutil.Process]:
    return _processes("front")


def _processes(deployment: str) -> list[psutil.Process]:
    own = psutil.Process().children(recursive=True)
    title = f"ray::ServeReplica:prefixwise:{deployment}"
    return [process for process in own if title in " ".join(_command_line(process))]


def replica_process(name: str) -> psutil.Process:
    """Of the engine that answers under this name."""
    return psutil.Process(_actor(name)["Pid"])


def node_of(name: str) -> str:
    """The id of the node that the engine of this name runs on."""
    return str(_actor(name)["Address"]["NodeID"])


def _actor(replica: str) -> dict[str, Any]:
    import ray

    actor = ray.get_actor(f"SERVE_REPLICA::prefixwise#replica#{replica}", namespace="serve")
    found: dict[str, Any] = ray._private.state.actors(actor._actor_id.hex())
    return found


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT
    while not is_so():
        assert time.monotonic() < end, f"{what}: not within {TIMEOUT:g} s"
        time.sleep(0.1)


class Load:
    """Clients that send requests one after the other, each of its own queries, and keep every answer.

    With `tries` a request that fails is sent again after a moment, as a load balancer does; its last answer counts.
    """

    def __init__(self, url: str, num_clients: int = 4, tries: int = 1) -> None:
        self.answers: list[tuple[dict[str, Any], int, Any]] = []  # body, status, what came back
        self.num_failures = 0  # of all tries
        self._url = url
        self._tries = tries
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send_all, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT)

    def wait_for(self, num_more: int) -> None:
        target = len(self.answers) + num_more
        wait_until(lambda: len(self.answers) >= target, f"{num_more} more answers")

    def _send_all(self, client: int) -> None:
        number = 0
        with httpx.Client(base_url=self._url, timeout=TIMEOUT) as http:
            while not self._stop.is_set():
                number += 1
                body = score_body(query=client * 10 + number % 10, seed=number)
                self.answers.append((body, *self._send(http, body)))

    def _send(self, http: httpx.Client, body: dict[str, Any]) -> tuple[int, Any]:
        for attempt in range(self._tries):
            time.sleep(0.3 * attempt)
            try:
                response = http.post("/v1/score", json=body)
                status, answer = response.status_code, response.json()
            except Exception as error:
                status, answer = 0, repr(error)
            if status == _OK:
                break
            self.num_failures += 1
        return status, answer


def check_scores(load: Load) -> None:
    """Every answer is a good one, and holds the scores of its own request."""
    failed = [(status, answer) for _, status, answer in load.answers if status != _OK]
    assert failed == []
    with Scorer(backend="fake") as scorer:
        for body, _, answer in load.answers:
            assert answer["scores"] == scorer.score(**body).scores


def score_body(query: int, seed: int = 0) -> dict[str, Any]:
    """Another query for every number, other items for every seed."""
    items = [[(7 * seed + 3 * item + position) % 500 for position in range(1 + item % 3)] for item in range(5)]
    return {"query": [query, 5, 6, 7], "items": items, "label_token_ids": [3, 4], "score_mode": "logit"}
