"""`python -m benchmarks.goals`: one backend after the other, then the table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import benchmarks.goals
from benchmarks.goals.cases import CASES, FP8_CASES, FULL, HTTP_CASES, TINY, Settings
from benchmarks.goals.http_rows import HttpRows, report_figures
from benchmarks.goals.process import ServerFailedError, running
from benchmarks.goals.table import backend_line, render
from benchmarks.goals.targets import GOALS, Measured, judge, missed
from prefixwise import __version__
from prefixwise.bench.files import now_utc, write_text
from prefixwise.bench.processes import ended_by_signals


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goals",
        description=benchmarks.goals.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=("jax", "torch", "both"), default="both")
    parser.add_argument("--only", action="append", choices=CASES, metavar="CASE", help="cold is measured in any case")
    parser.add_argument(
        "--rounds", type=int, help=f"timed rounds of a case (default {FULL.rounds}, tiny: {TINY.rounds})"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON to this file, too")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small requests: a test of this script")
    parser.add_argument("--serve", action="store_true", help="HTTP cases ask `prefixwise serve`, with these flags:")
    parser.add_argument(
        "--model-folder", metavar="DIR", help="the random model of --serve, written where it is not there"
    )
    parser.add_argument(
        "--prefix-attention-dtype", choices=["auto", "fp8"], default="auto", help="of the FP8 cases (default auto)"
    )
    parser.add_argument("flags", nargs="*", help="of `prefixwise serve`, after --; they imply --serve")
    options = parser.parse_args(arguments)
    options.serve = options.serve or bool(options.flags)
    options.only = options.only or (HTTP_CASES if options.serve else CASES)
    if options.serve and not set(options.only) <= set(HTTP_CASES):
        parser.error(f"--serve measures {', '.join(HTTP_CASES)}, got --only {' '.join(options.only)}")
    if options.model_folder is not None and not options.serve:
        parser.error("--model-folder is for --serve: other servers have their weights in memory")
    has_fp8_run = options.backend != "jax" and not options.serve and not options.tiny
    if options.prefix_attention_dtype != "auto" and not (has_fp8_run and set(options.only) & set(FP8_CASES)):
        parser.error(f"--prefix-attention-dtype is for {', '.join(FP8_CASES)} of torch, and none of them runs")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    options.rounds = options.rounds or (TINY if options.tiny else FULL).rounds
    return options


def measure_backend(settings: Settings) -> tuple[list[Measured], dict[str, Any]]:
    """All figures of a backend, and what was found beside them."""

    def report(words: str) -> None:
        print(f"{settings.title}: {words}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder, running(settings, Path(folder)) as server:
        found = server.found
        rows = [Measured(**each) for each in found.pop("measured")]
        report_figures(rows, report)
        begin = perf_counter()
        if server.url is not None:
            rows += HttpRows(server.url, settings, found, report).measure()
        found["seconds"]["http"] = round(perf_counter() - begin, 1)
    if settings.quantization is not None:  # beside bfloat16's rate of GEMMs its own FLOP/s would mislead
        rows = [replace(row, name=f"{settings.quantization} {row.name}", flops=None, bound=None) for row in rows]
    return rows, found


def runs_of(settings: Settings) -> list[Settings]:
    """The run of the backend's own dtype, and that of FP8; each where it has cases."""
    first = [settings] if set(settings.cases) - set(FP8_CASES) else []
    quantised = settings.quantised()
    return first if quantised is None else [*first, quantised]


def commit() -> str | None:
    """Of the working tree, which may have changes; None outside of one."""
    try:
        told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()


def summarise(
    options: argparse.Namespace, found: dict[str, list[Measured]], beside: dict[str, dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """What goes into the file."""
    gemm = {backend: beside.get(backend, {}).get("gemm_flops", {}) for backend in found}
    rows = judge(found, gemm, () if options.tiny else GOALS)
    return {
        "prefixwise": __version__,
        "commit": commit(),
        "date": now_utc(),
        "tiny": options.tiny,
        "rounds": options.rounds,
        "fp8_prefix_attention_dtype": options.prefix_attention_dtype,
        "seconds": round(seconds, 1),
        "backends": beside,
        "missed": missed(rows),
        "rows": rows,
    }


def print_result(result: dict[str, Any]) -> None:
    print(render(result["rows"]))
    for backend, each in result["backends"].items():
        if "device" in each:
            print(backend_line(backend, each))
        for case, error in each["errors"].items():
            print(f"{backend}, {case} FAILED: {error}")
    met = ", ".join(result["missed"]) or "none"
    print("tiny: no goal is held to anything" if result["tiny"] else f"goals missed: {met}")
    print(json.dumps(result))


def main() -> None:
    options = parse_options()
    begin = perf_counter()
    backends = ("jax", "torch") if options.backend == "both" else (options.backend,)
    found: dict[str, list[Measured]] = {}
    beside: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {}
    with ended_by_signals():
        for backend in backends:
            flags = tuple(options.flags) if options.serve else None
            only = tuple(options.only)
            settings = Settings(
                backend,
                only,
                options.rounds,
                options.tiny,
                flags,
                options.model_folder,
                prefix_attention_dtype=options.prefix_attention_dtype,
            )
            for run in runs_of(settings):
                try:
                    rows, beside[run.title] = measure_backend(run)
                    found[backend] = [*found.get(backend, []), *rows]
                except ServerFailedError as error:
                    beside[run.title] = {"errors": {"server": str(error)}}
            result = summarise(options, found, beside, perf_counter() - begin)
            if options.output is not None:  # what there is, should the next one not end
                write_text(options.output, f"{json.dumps(result)}\n")
    print_result(result)
    if any(each["errors"] for each in beside.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
