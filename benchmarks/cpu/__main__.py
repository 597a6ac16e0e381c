"""`python -m benchmarks.cpu`: one case after the other, then the table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import benchmarks.cpu
from benchmarks.cpu.cases import CASES, FULL, TINY
from benchmarks.cpu.run import CpuRun, Rows
from benchmarks.cpu.table import peer_line, render
from benchmarks.goals.__main__ import commit
from prefixwise import __version__
from prefixwise.bench.files import now_utc, write_text
from prefixwise.bench.processes import ended_by_signals
from prefixwise.host import cpu_features, cpu_name, num_cores


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description=benchmarks.cpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument(
        "--rounds", type=int, help=f"timed rounds of a case (default {FULL.rounds}, tiny: {TINY.rounds})"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON to this file, too")
    parser.add_argument(
        "--model-folder", type=Path, metavar="FOLDER", help="random weights from an earlier run; written where missing"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small requests: a test of this script")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    options.rounds = options.rounds or (TINY if options.tiny else FULL).rounds
    return options


def machine() -> dict[str, Any]:
    """The processor, and how busy it is."""
    return {
        "cpu": cpu_name(),
        "machine": platform.machine(),
        "cores": num_cores(),
        "bf16": sorted(cpu_features() & {"avx512_bf16", "amx_bf16", "bf16"}),
        "load_average": round(os.getloadavg()[0], 2),
    }


def summarise(options: argparse.Namespace, run: CpuRun, rows: Rows, seconds: float) -> dict[str, Any]:
    """What goes into the file."""
    return {
        "prefixwise": __version__,
        "commit": commit(),
        "date": now_utc(),
        "python": platform.python_version(),
        "machine": machine(),
        "tiny": options.tiny,
        "rounds": options.rounds,
        "seconds": {**run.seconds, "all": round(seconds, 1)},
        "peers": run.peers,
        "skipped": run.skipped,
        "errors": run.errors,
        "missed": [row["name"] for row in rows if row["met"] is False],
        "rows": rows,
    }


def print_result(result: dict[str, Any]) -> None:
    print(render(result["rows"]))
    for name, found in result["peers"].items():
        print(peer_line(name, found))
    for case, why in result["skipped"].items():
        print(f"{case} SKIPPED: {why}")
    for case, error in result["errors"].items():
        print(f"{case} FAILED: {error}")
    told = result["machine"]
    units = ", ".join(told["bf16"]) or "no bf16"
    print(f"{told['cpu']}, {told['machine']}, {told['cores']} cores, {units}; load {told['load_average']}")
    met = ", ".join(result["missed"]) or "none"
    print("tiny: no goal is held to anything" if result["tiny"] else f"goals missed: {met}")
    print(json.dumps(result))


def report(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    options = parse_options()
    begin = perf_counter()
    rows: Rows = []
    result: dict[str, Any] = {}
    with ended_by_signals(), tempfile.TemporaryDirectory() as folder:
        run = CpuRun(
            tiny=options.tiny,
            rounds=options.rounds,
            folder=Path(folder),
            model_folder=options.model_folder,
            report=report,
        )
        for case in dict.fromkeys(options.only or CASES):
            rows += run.measure(case)
            result = summarise(options, run, rows, perf_counter() - begin)
            if options.output is not None:  # what there is, should the next one not end
                write_text(options.output, f"{json.dumps(result)}\n")
    print_result(result)
    if result["errors"] or not all(row.get("agrees", True) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
