"""What Ray costs: the cluster's items per second on this machine against those of one plain server, and who is busy.

A real Ray cluster of several nodes here (`ray.cluster_utils`), the product's Serve application with the fake backend;
and `prefixwise serve`, the same engine without Ray. Requests are token ids over HTTP, so many in flight per replica.

    device   every forward takes 100 ms, and a request fills one: the device is the bound, and what is lost is Ray's
    host     forwards take no time and requests are small: the host is the bound, and CPU times say which process it is

`lost` is the part of replicas x the server's rate that the cluster does not reach. CPU times are shares of one core, by
process, over the measured phase. The last line is JSON.

`--serve-variables` starts Ray with the variables of Serve that docs/scaling.md speaks of.

    python -m benchmarks.cluster_throughput [--seconds 10] [--serve-variables] [--output FILE] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from benchmarks.cpu.__main__ import machine
from benchmarks.goals.__main__ import commit
from benchmarks.ports import free_port
from benchmarks.text_rows import aligned
from prefixwise import __version__
from prefixwise.backends.load import FAKE_STEP_VARIABLE
from prefixwise.bench.files import now_utc, write_text
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LoadGeometry, LoadPhase
from prefixwise.bench.processes import ended_by_signals, local_server
from prefixwise.bench.run.load import LoadPlan, LoadRun
from prefixwise.bench.run.load_driver import LoadTarget, PhaseLength

VOCABULARY = 40_000  # no more than the embedded model's, which the fake backend goes by
NODES = 2  # beside the head
_NODE_CPUS = 4  # as Ray counts them; they are this machine's
_SMALL_NODE = {"object_store_memory": 100 << 20, "include_dashboard": False}
SERVE_VARIABLES = {  # fewer threads, less logging, and gRPC between Serve's processes, for bodies of up to 256 MiB
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
}
_ROLES = {"ServeReplica:prefixwise:front": "front", "ServeReplica:prefixwise:replica": "replica", "ProxyActor": "proxy"}


@dataclass(frozen=True)
class Shape:
    """A cluster; no replicas: one plain server."""

    replicas: int
    fronts: int = 1

    @property
    def title(self) -> str:
        return f"{self.replicas} replicas, {self.fronts} fronts" if self.replicas else "one server"


@dataclass(frozen=True)
class Case:
    """What is sent, how long a forward takes, and to whom."""

    name: str
    step_seconds: float
    query_tokens: int
    items: int
    item_tokens: int
    in_flight: int  # for each replica
    shapes: tuple[Shape, ...]

    @property
    def geometry(self) -> LoadGeometry:
        return LoadGeometry(
            query_tokens=self.query_tokens,
            num_items=self.items,
            item_tokens=self.item_tokens,
            label_token_ids=[1, 2],
            vocab_size=VOCABULARY,
            distinct_queries=64,
        )


_SERVER = Shape(0)
CASES = (
    Case("device", 0.1, 40, 100, 20, 8, (_SERVER, Shape(1), Shape(2), Shape(4), Shape(4, fronts=2))),
    Case("host", 0.0, 40, 10, 20, 16, (_SERVER, Shape(1), Shape(2), Shape(2, fronts=2))),
)
TINY_CASES = (Case("device", 0.02, 10, 10, 20, 2, (_SERVER, Shape(1), Shape(2))),)


class Measurement:
    """One server or cluster under load."""

    def __init__(self, case: Case, seconds: float) -> None:
        self._case = case
        self._seconds = seconds

    def rows(self, folder: Path) -> Iterator[dict[str, Any]]:
        """First the server, whose rate the others are held against."""
        server_rate: float | None = None
        for shape, url in self._targets(folder):
            row = self._row(shape, url, server_rate)
            server_rate = server_rate or row["items_per_second"]
            yield row

    def _targets(self, folder: Path) -> Iterator[tuple[Shape, str]]:
        case = self._case
        os.environ[FAKE_STEP_VARIABLE] = str(case.step_seconds)  # for the processes that are started from here
        with local_server(["--backend", "fake", "--warmup", "none"], folder / "server.log") as server:
            yield _SERVER, server.url
        with ray_cluster():
            port = free_port()  # one for all: Serve listens where it listened first
            for shape in case.shapes[1:]:
                deploy(shape, port)
                yield shape, f"http://127.0.0.1:{port}"

    def _row(self, shape: Shape, url: str, server_rate: float | None) -> dict[str, Any]:
        replicas = max(1, shape.replicas)
        alone = self._run(url, 1, PhaseLength(seconds=self._seconds / 2, requests=200))
        before, begin = cpu_seconds(), perf_counter()
        phase = self._run(url, replicas * self._case.in_flight, PhaseLength(seconds=self._seconds))
        elapsed = perf_counter() - begin
        assert phase.latency is not None and alone.latency is not None, phase.errors_by_code
        rate = phase.items_per_sec
        return {
            "case": self._case.name,
            "who": shape.title,
            "replicas": shape.replicas,
            "fronts": shape.fronts if shape.replicas else 0,
            "in_flight": replicas * self._case.in_flight,
            "requests_per_second": round(phase.qps_answered, 1),
            "items_per_second": round(rate, 1),
            "lost": None if server_rate is None else round(1 - rate / (replicas * server_rate), 4),
            "p50_ms": round(phase.latency.p50_ms, 2),
            "p99_ms": round(phase.latency.p99_ms, 2),
            "alone_p50_ms": round(alone.latency.p50_ms, 2),
            "errors": phase.errors_by_code,
            "cores": {name: round(spent / elapsed, 2) for name, spent in (cpu_seconds() - before).most_common()},
            "machine_load": round(os.getloadavg()[0], 1),
        }

    def _run(self, url: str, in_flight: int, length: PhaseLength) -> LoadPhase:
        warm_up = PhaseLength(seconds=self._seconds / 2, requests=8 * in_flight + 64)
        plan = LoadPlan("closed", length, warm_up, concurrency=in_flight)
        maker = RequestMaker(self._case.geometry, seed=1)
        return LoadRun(LoadTarget(url), maker, plan, lambda words: None, server_config={}).run().measured


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Of nodes that are processes here, connected to, and ended with the block."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_SMALL_NODE})
    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=_NODE_CPUS, **_SMALL_NODE)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def deploy(shape: Shape, port: int) -> None:
    """Start or update the application."""
    from prefixwise.cluster.options import ClusterOptions, ScaleOptions
    from prefixwise.cluster.serve_app import deploy as deploy_application
    from prefixwise.launch.options import EngineOptions
    from prefixwise.server.config import ServerOptions

    scale = ScaleOptions(replicas=shape.replicas, fronts=shape.fronts)
    server = ServerOptions(port=port, log_level="warning")
    deploy_application(ClusterOptions(EngineOptions(backend="fake"), server, scale))


def cpu_seconds() -> Counter[str]:
    """User and system time so far of this process and all that it has started, by what they are."""
    found: Counter[str] = Counter()
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        try:
            times = process.cpu_times()
            found["client" if process == me else role_of(process.cmdline())] += times.user + times.system
        except psutil.Error:  # it is gone
            continue
    return found


def role_of(command: Sequence[str]) -> str:
    """What a process is for; several of one kind are added up."""
    line = " ".join(command)
    named = next((role for name, role in _ROLES.items() if f"ray::{name}" in line), None)
    if named is not None:
        return named
    if "prefixwise" in line and " serve " in f"{line} ":
        return "server"
    return "rest of Ray"


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster_throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measured phase")
    parser.add_argument("--serve-variables", action="store_true", help="with the variables of docs/scaling.md")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON to this file, too")
    parser.add_argument("--tiny", action="store_true", help="short steps and two replicas: a test of this script")
    options = parser.parse_args(arguments)
    if options.seconds <= 0:
        parser.error(f"--seconds must be more than 0, got {options.seconds}")
    return options


def summarise(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "prefixwise": __version__,
        "commit": commit(),
        "date": now_utc(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("ray", "uvicorn")}},
        "command": " ".join(
            ["python -m benchmarks.cluster_throughput", f"--seconds {options.seconds:g}", *_flags(options)]
        ),
        "serve_variables": SERVE_VARIABLES if options.serve_variables else {},
        "tiny": options.tiny,
        "nodes": NODES + 1,
        "rows": rows,
    }


def _flags(options: argparse.Namespace) -> list[str]:
    chosen = {"--serve-variables": options.serve_variables, "--tiny": options.tiny}
    only = [f"--only {options.only}"] if options.only else []
    return [*only, *(flag for flag, is_given in chosen.items() if is_given)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["case", "who", "requests/s", "items/s", "lost", "p50 ms", "p99 ms", "alone p50", "cores", "load"]]
    for row in rows:
        lost = "-" if row["lost"] is None else f"{100 * row['lost']:.1f} %"
        cores = ", ".join(f"{name} {spent:.2f}" for name, spent in row["cores"].items() if spent >= 0.01)
        figures = [f"{row[name]:,.1f}" for name in ("p50_ms", "p99_ms", "alone_p50_ms")]
        rates = [f"{row['requests_per_second']:,.1f}", f"{row['items_per_second']:,.0f}"]
        lines.append([row["case"], row["who"], *rates, lost, *figures, cores, str(row["machine_load"])])
    return aligned(lines, left=(0, 1, 8))


def main() -> None:
    options = parse_options()
    cases = TINY_CASES if options.tiny else [case for case in CASES if options.only in (None, case.name)]
    rows: list[dict[str, Any]] = []
    os.environ.update(SERVE_VARIABLES if options.serve_variables else {})  # before Ray is imported
    with ended_by_signals(), tempfile.TemporaryDirectory() as folder:
        for case in cases:
            for row in Measurement(case, options.seconds).rows(Path(folder)):
                rows.append(row)
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    result = summarise(options, rows)
    if options.output is not None:
        write_text(options.output, f"{json.dumps(result)}\n")
    print(f"\n{table(rows)}\n{json.dumps(result)}")


if __name__ == "__main__":
    main()
