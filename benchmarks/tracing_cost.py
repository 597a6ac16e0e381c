"""What traces cost a server: CPU time per request without them, and with 10 % and all of the requests sampled.

Measured: CPU time of a process with the whole HTTP server on a backend that takes no time, so that all of it is the
host's: HTTP, JSON, planning, scheduler, traces and their export. Requests of 300 + 10 x 20 token ids come over one
connection from a second process, which also is the collector (OTLP over HTTP). One server has its traces switched
between turns of --turn requests, and a turn ends when its spans are exported (the SDK does so every 5 s, or when it has
512): two processes would differ by more than is measured here. Shown is the mean over the middle half of --rounds.

On a machine that other programs use, two such figures differ by some percent. So the same is also measured without a
server (`alone`): the traces of so many requests, their spans and their export, against the CPU time of a request. The
goal is at most 2 % with 10 % sampled. The last line is JSON.

    python -m benchmarks.tracing_cost [--rounds 20] [--turn 500]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, cast

import httpx
import uvloop

from prefixwise import __version__
from prefixwise.backends.fake import FakeBackend
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.server.config import ServerOptions
from prefixwise.server.context import RequestContext, RequestStats
from prefixwise.server.launch import HttpServer, bind, relax_garbage_collection
from prefixwise.server.logs import set_up_logging
from prefixwise.server.service import Service
from prefixwise.server.tracing import Tracing, open_tracing

RATIOS = {"off": None, "10 %": 0.1, "100 %": 1.0}
GOAL_PERCENT = 2.0
WARM_UP_TURNS = 3
SAMPLED = 100  # requests in a batch of spans, as of a busy server


class Collector(BaseHTTPRequestHandler):
    """Takes what is sent."""

    protocol_version = "HTTP/1.1"
    num_bytes = 0

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.rfile.read(size)
        Collector.num_bytes += size
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def other_process(pipe: Connection) -> None:
    """The collector, and the client: sends as many requests as the pipe says."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    pipe.send(collector.server_port)
    url: str = pipe.recv()
    items = [[2 + item, *range(20, 39)] for item in range(10)]
    request = {"query": list(range(2, 302)), "items": items, "label_token_ids": [7, 8], "apply_softmax": True}
    body = json.dumps(request).encode()
    with httpx.Client(base_url=url, timeout=60) as client:
        while num_requests := pipe.recv():
            for _ in range(num_requests):
                client.post("/v1/score", content=body).raise_for_status()
            pipe.send(Collector.num_bytes)


@contextmanager
def running_server() -> Iterator[tuple[Service, str]]:
    """In a thread of this process."""
    options = ServerOptions(port=0)
    set_up_logging(options)
    engine = ScoringEngine(EngineConfig("fake"), Scheduler(FakeBackend(), SchedulerOptions()), None)
    listener = bind(options)
    ready: list[Any] = []
    is_ready = threading.Event()

    async def serve() -> None:
        service = Service(options)
        service.open(engine)
        server = HttpServer.of(service)
        ready.extend((service, server))
        is_ready.set()
        await server.serve(sockets=[listener])

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    is_ready.wait()
    try:
        yield ready[0], f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ready[1].should_exit = True
        thread.join()
        engine.close()


def tracing_of(ratio: float | None, port: int) -> Tracing | None:
    if ratio is None:
        return None
    os.environ |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(ratio)}
    return open_tracing(ServerOptions(otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces"))


def microseconds_alone(tracing: Tracing, num_requests: int) -> float:
    """CPU time of a request's traces by themselves: sampling, notes, spans, encoding, and the collector's requests."""
    unused = cast(Any, None)
    contexts = []
    for _ in range(num_requests):
        scope = {"type": "http", "method": "POST", "path": "/v1/score", "headers": [], "scheme": "http"}
        contexts.append(RequestContext(scope, unused, unused, unused))
        contexts[-1].stats = RequestStats(1, 10, 500, 2, "prefill_extend", 0, 0.001, 0.001)
    before = time.process_time()
    for context in contexts:
        tracing.begin(context)
        context.end_stage("receive")
        context.end_stage("prepare")
        if context.trace is not None:
            for name in ("queue", "steps"):  # without the seconds of the device
                context.end_stage(name)
        context.end_stage("render")
        if context.trace is not None:
            context.trace.end(context, "/v1/score", 200, "fake")
    tracing.processor.force_flush()  # type: ignore[attr-defined]
    return 1e6 * (time.process_time() - before) / num_requests


def middle(values: list[float]) -> float:
    """The mean of the middle half."""
    quarter = len(values) // 4
    return statistics.fmean(sorted(values)[quarter : len(values) - quarter])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turn", type=int, default=500, help="requests with one setting in a round")
    args = parser.parse_args()
    context = get_context("spawn")
    pipe, far_end = context.Pipe()
    other = context.Process(target=other_process, args=(far_end,), daemon=True)
    other.start()
    port = pipe.recv()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  # the log, which is written as to any file
    tracings = {name: tracing_of(ratio, port) for name, ratio in RATIOS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in RATIOS}
    num_bytes = 0
    with running_server() as (service, url):
        pipe.send(url)
        relax_garbage_collection()
        for number in range(WARM_UP_TURNS + args.rounds):
            names = list(RATIOS) if number % 2 else list(reversed(RATIOS))
            for name in names:
                service.tracing = tracing = tracings[name]
                before = time.process_time()
                pipe.send(args.turn)
                num_bytes = pipe.recv()
                if tracing is not None:
                    tracing.processor.force_flush()  # type: ignore[attr-defined]
                if number >= WARM_UP_TURNS:
                    seconds[name].append((time.process_time() - before) / args.turn)
        service.tracing = None
        alone = {
            name: middle([microseconds_alone(each, int(SAMPLED / (RATIOS[name] or 1))) for _ in range(args.rounds)])
            for name, each in tracings.items()
            if each is not None
        }
        pipe.send(0)
        other.join()
    assert num_bytes > 0, "no spans have arrived"
    microseconds = {name: 1e6 * middle(values) for name, values in seconds.items()}
    percent = {name: 100 * (microseconds[name] / microseconds["off"] - 1) for name in RATIOS if name != "off"}
    of_request = {name: 100 * value / microseconds["off"] for name, value in alone.items()}
    for name, value in microseconds.items():
        more = (
            f"{percent[name]:+.1f} %; alone {alone[name]:.1f} us, {of_request[name]:.1f} %" if name in percent else ""
        )
        print(f"traces {name:>6}  {value:8.1f} us of CPU a request  {more}")
    result = {
        "prefixwise": __version__,
        "us_per_request": microseconds,
        "percent": percent,
        "us_alone": alone,
        "percent_alone": of_request,
        "goal_percent": GOAL_PERCENT,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
