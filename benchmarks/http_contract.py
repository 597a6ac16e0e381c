"""The contract workload through HTTP, beside the same through the engine: what the server takes away.

Measured, in one run on one machine: items per second of `ScoringEngine.score` in the server's own process before it
opens, then of `POST /v1/score` from clients in another process over keep-alive connections (token ids, 2000 + 500 x 20,
Qwen3-0.6B's shape, random weights; every query is new unless `--cached`). Median seconds per request for one client;
all items over the whole time for several. The last line is JSON.

    python -m benchmarks.http_contract [--backend jax] [--clients 8] [--rounds 20] [--cached | --disable-radix-cache]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from itemwise import __version__
from itemwise.backends.base import BackendOptions, Warmup

WARM_UP_ROUNDS = 3


def make_body(options: argparse.Namespace, seed: int) -> dict[str, object]:
    random = np.random.default_rng(0 if options.cached else seed)
    return {
        "query": random.integers(0, QWEN3_06B.vocab_size, options.query_tokens).tolist(),
        "items": random.integers(0, QWEN3_06B.vocab_size, (options.items, options.item_tokens)).tolist(),
        "label_token_ids": [1, 2],
        "apply_softmax": True,
    }


def serve(options: argparse.Namespace) -> None:
    """The server's process: measures its engine, writes that down, and opens."""
    from itemwise.backends.load import load_backend
    from itemwise.contract.parse import parse_score_request
    from itemwise.engine.engine import EngineConfig, ScoringEngine
    from itemwise.engine.scheduler import Scheduler, SchedulerOptions
    from itemwise.engine.warmup import warm_up
    from itemwise.server.config import ServerOptions
    from itemwise.server.launch import run_server

    def open_engine() -> ScoringEngine:
        # Several clients make forwards of many sizes, which must not be compiled while they are measured.
        warmup: Warmup = "fast" if options.clients > 1 else "none"
        choice = BackendOptions(options.backend, dtype=options.dtype, warmup=warmup)
        backend = load_backend(random_checkpoint(), choice)
        scheduler = Scheduler(backend, SchedulerOptions(prefix_cache=not options.disable_radix_cache))
        engine = ScoringEngine(EngineConfig("random"), scheduler, None)
        if warmup != "none":
            warm_up(engine)
        seconds, algorithm = [], None
        for seed in range(WARM_UP_ROUNDS + options.rounds):
            request = parse_score_request(make_body(options, seed))
            begin = perf_counter()
            result = engine.score(replace(request, return_debug=seed == 0))
            seconds.append(perf_counter() - begin)
            algorithm = algorithm or (result.debug or {})["algorithm"]
        found = {
            "seconds": median(seconds[WARM_UP_ROUNDS:]),
            "backend": backend.info.name,
            "device": backend.info.device,
            "algorithm": algorithm,
        }
        Path(options.serve).write_text(json.dumps(found), encoding="utf-8")
        return engine

    run_server(ServerOptions(port=options.port, log_level="warning"), open_engine, lambda engine: {})


def wait_until_ready(options: argparse.Namespace, server: subprocess.Popen[bytes]) -> None:
    while True:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}")
        try:
            connection = HTTPConnection("127.0.0.1", options.port)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)


def drive(options: argparse.Namespace, bodies: list[bytes]) -> list[float]:
    """One client: seconds of every request."""
    connection = HTTPConnection("127.0.0.1", options.port)
    found = []
    for body in bodies:
        begin = perf_counter()
        connection.request("POST", "/v1/score", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        found.append(perf_counter() - begin)
        if response.status != 200 or len(json.loads(answer)["scores"]) != options.items:
            sys.exit(f"status {response.status}: {answer[:500]!r}")
    return found


def measure(options: argparse.Namespace) -> float:
    """Items per second of all clients."""
    seeds = iter(range(1000, 1_000_000))

    def bodies(count: int) -> list[bytes]:
        return [json.dumps(make_body(options, next(seeds))).encode() for _ in range(count)]

    drive(options, bodies(WARM_UP_ROUNDS))
    if options.clients == 1:
        return float(options.items / median(drive(options, bodies(options.rounds))))
    work = [bodies(options.rounds) for _ in range(options.clients)]
    with ThreadPoolExecutor(options.clients) as pool:
        list(pool.map(lambda each: drive(options, each[:WARM_UP_ROUNDS]), work))  # sizes that only overlap shows
        begin = perf_counter()
        list(pool.map(lambda each: drive(options, each), work))
    return float(options.clients * options.rounds * options.items / (perf_counter() - begin))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cached", action="store_true", help="one query, and its prefix is kept")
    parser.add_argument("--disable-radix-cache", action="store_true", help="keep no prefix")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--query-tokens", type=int, default=2000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--item-tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=30_098)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.serve:
        serve(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "engine.json"
        command = [sys.executable, "-m", "benchmarks.http_contract", *sys.argv[1:], "--serve", str(written)]
        server = subprocess.Popen(command, env=os.environ)
        try:
            wait_until_ready(options, server)
            engine = json.loads(written.read_text(encoding="utf-8"))
            through_http = measure(options)
        finally:
            server.terminate()
            server.wait()
    through_engine = options.items / engine["seconds"]
    result = {
        "itemwise": __version__,
        "backend": engine["backend"],
        "device": engine["device"],
        "geometry": [options.query_tokens, options.items, options.item_tokens],
        "clients": options.clients,
        "cached": options.cached,
        "algorithm": engine["algorithm"],
        "engine_items_per_second": round(through_engine, 1),
        "http_items_per_second": round(through_http, 1),
        "fraction": round(through_http / through_engine, 4),
    }
    print(
        f"{engine['backend']} on {engine['device']}, {engine['algorithm']}: engine {through_engine:.0f} items/s, "
        f"HTTP with {options.clients} clients {through_http:.0f} items/s, {100 * result['fraction']:.1f} %"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
