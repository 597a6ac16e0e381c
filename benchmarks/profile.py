"""Where a request's time goes on a GPU: the kernels of the contract workload (or another geometry), by name.

Measured: `--rounds` requests through `ScoringEngine.score` under the framework's own profiler; per kernel its calls and
milliseconds in one request, then the sum, the device's idle time between the first kernel and the last, and the wall
clock of a request without the profiler. The last line is JSON.

    python -m benchmarks.profile --backend jax [--cached] [--query-tokens 300 --items 10 --item-tokens 20]
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contract import add_request_options, make_engine, make_request, measure

Kernels = list[tuple[str, float, float]]  # name, start and length in microseconds


def jax_kernels(run: Callable[[], None]) -> Kernels:
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return device_events(events)


def device_events(events: list[dict[str, Any]]) -> Kernels:
    """Of a trace in Chrome's format: what ran on the device's streams."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}

    def is_kernel(event: dict[str, Any]) -> bool:
        thread = threads.get((event["pid"], event.get("tid")), "")
        return "GPU" in processes.get(event["pid"], "") and thread.startswith("Stream")

    return [(e["name"], e["ts"], e["dur"]) for e in events if e.get("ph") == "X" and is_kernel(e)]


def torch_kernels(run: Callable[[], None]) -> Kernels:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = []
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            found.append((event.name, event.time_range.start, event.time_range.elapsed_us()))
    return found


def group(kernels: Kernels, rounds: int) -> list[dict[str, Any]]:
    """Kernels that differ in a number only are one; the longest first."""
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, _, length in kernels:
        short = re.sub(r"\d+", "#", name)[:90]
        total[short] += length
        calls[short] += 1
    rows = [
        {"kernel": name, "calls": calls[name] / rounds, "milliseconds": round(total[name] / rounds / 1000, 3)}
        for name in total
    ]
    return sorted(rows, key=lambda row: -float(row["milliseconds"]))


def idle(kernels: Kernels, rounds: int) -> float:
    """Milliseconds per request in which no kernel ran, gaps of more than a millisecond (between requests) left out."""
    spans = sorted((start, start + length) for _, start, length in kernels)
    gaps, end = 0.0, spans[0][1]
    for start, stop in spans[1:]:
        if 0 < start - end < 1000:
            gaps += start - end
        end = max(end, stop)
    return gaps / rounds / 1000


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_request_options(parser)
    parser.add_argument("--rows", type=int, default=25, help="kernels to show")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    engine, request = make_engine(options), make_request(options)
    seconds = measure(engine, request, options.rounds)

    def run() -> None:
        for _ in range(options.rounds):
            engine.score(request)

    kernels = (jax_kernels if engine.backend.info.name == "jax" else torch_kernels)(run)
    rows = group(kernels, options.rounds)
    print(f"{'ms':>8} {'calls':>7}  kernel")
    for row in rows[: options.rows]:
        print(f"{row['milliseconds']:>8.3f} {row['calls']:>7.1f}  {row['kernel']}")
    busy = sum(row["milliseconds"] for row in rows)
    result = {
        "backend": engine.backend.info.name,
        "device": engine.backend.info.device,
        "milliseconds": round(1000 * seconds, 3),
        "kernel_milliseconds": round(busy, 3),
        "idle_milliseconds": round(idle(kernels, options.rounds), 3),
        "kernels": rows[: options.rows],
    }
    print(
        f"request {result['milliseconds']} ms; kernels {busy:.2f} ms, idle between them {result['idle_milliseconds']}"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
