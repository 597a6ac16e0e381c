"""What the host costs: requests per second of the whole server on one core, on a backend that computes nothing.

Measured: `POST /v1/score` with token ids over real sockets, driven by `wrk` (Debian package of that name) on another
core; HTTP, JSON, checks, planning, scheduling and the fake backend's few array operations, no model. Both processes are
pinned, the server to the first core that this process may use and wrk to the second. Beside the rate stands what the
server's process used of its core per request, which other programs disturb less. The last line is JSON.

    python -m benchmarks.host_cost [--seconds 10] [--connections 32] [--profile FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

from prefixwise import __version__


@dataclass(frozen=True)
class Geometry:
    """Requests of one shape, and how many per second there should be."""

    query_tokens: int
    items: int
    item_tokens: int
    goal: int

    @property
    def title(self) -> str:
        return f"{self.query_tokens} + {self.items} x {self.item_tokens}"


GEOMETRIES = (Geometry(10, 10, 20, 1500), Geometry(200, 50, 20, 300))
VOCABULARY = 50_000


def serve(port: int, profile: str | None) -> None:
    """The server, in a process of its own."""
    from prefixwise.backends.fake import FakeBackend
    from prefixwise.engine.engine import ScoringEngine
    from prefixwise.engine.prepare import EngineConfig
    from prefixwise.engine.scheduler import Scheduler
    from prefixwise.server.config import ServerOptions
    from prefixwise.server.launch import run_server

    def open_engine() -> ScoringEngine:
        return ScoringEngine(EngineConfig("fake"), Scheduler(FakeBackend(VOCABULARY)), None)

    def run() -> None:
        run_server(ServerOptions(port=port, log_level="info"), open_engine, lambda engine: {})

    if profile is None:
        run()
        return
    import cProfile

    profiler = cProfile.Profile()
    profiler.runcall(run)  # of the event loop's thread
    profiler.dump_stats(profile)


def lua_script(geometry: Geometry, num_bodies: int = 64) -> str:
    """Different queries and items, so that nothing is found in the cache but by chance."""
    random = np.random.default_rng(0)

    def body() -> str:
        query = random.integers(0, VOCABULARY, geometry.query_tokens).tolist()
        items = random.integers(0, VOCABULARY, (geometry.items, geometry.item_tokens)).tolist()
        return json.dumps({"query": query, "items": items, "label_token_ids": [1, 2], "apply_softmax": True})

    bodies = ",\n".join(f"'{body()}'" for _ in range(num_bodies))
    return f"""
local bodies = {{{bodies}}}
local number = 0
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
request = function()
  number = number % #bodies + 1
  return wrk.format(nil, "/v1/score", nil, bodies[number])
end
"""


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}")
        try:
            with urlopen(f"{url}/health"):
                return
        except URLError:
            time.sleep(0.1)
    sys.exit("the server was not ready after a minute")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drive(url: str, server: int, geometry: Geometry, core: int, options: argparse.Namespace) -> dict[str, object]:
    """One run of wrk."""
    before = cpu_seconds(server)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(lua_script(geometry))
        script.flush()
        command = [
            "wrk",
            "-t1",
            f"-c{options.connections}",
            f"-d{options.seconds}s",
            "--latency",
            "-s",
            script.name,
            url,
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    found = read_wrk(done.stdout)
    found["cpu_microseconds"] = round(1e6 * (cpu_seconds(server) - before) / found.pop("requests"))
    return {"geometry": geometry.title, "goal": geometry.goal, **found}


def read_wrk(text: str) -> dict[str, Any]:
    count = re.search(r"(\d+) requests in", text)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    latencies = dict(re.findall(r"^\s+(50|99)%\s+(\S+)", text, re.MULTILINE))
    errors = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    assert rate is not None and count is not None, text
    return {
        "requests": int(count[1]),
        "requests_per_second": float(rate[1]),
        "p50": latencies.get("50"),
        "p99": latencies.get("99"),
        "errors": int(errors[1]) if errors else 0,
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--port", type=int, default=30_099)
    parser.add_argument("--profile", help="write the event loop's profile (cProfile) to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.serve:
        serve(options.port, options.profile)
        return
    cores = sorted(os.sched_getaffinity(0))
    if shutil.which("wrk") is None or len(cores) < 2:
        sys.exit("this needs the program wrk (apt install wrk) and two cores")
    arguments = [sys.executable, "-m", "benchmarks.host_cost", "--serve", "--port", str(options.port)]
    if options.profile:
        arguments += ["--profile", str(Path(options.profile).absolute())]
    url = f"http://127.0.0.1:{options.port}"
    with tempfile.TemporaryFile() as log:  # its lines per request are part of the cost
        server = subprocess.Popen(arguments, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, cores[:1]))
        try:
            wait_until_ready(url, server)
            runs = [drive(url, server.pid, geometry, cores[1], options) for geometry in GEOMETRIES]
        finally:
            server.terminate()
            server.wait()
    for run in runs:
        print(
            f"{run['geometry']}: {run['requests_per_second']} requests/s (goal {run['goal']}), "
            f"{run['cpu_microseconds']} us of CPU each, "
            f"p50 {run['p50']}, p99 {run['p99']}, {run['errors']} errors"
        )
    print(
        json.dumps(
            {"prefixwise": __version__, "uvicorn": version("uvicorn"), "connections": options.connections, "runs": runs}
        )
    )


if __name__ == "__main__":
    main()
