"""`python -m benchmarks.soak`: the run, its verdicts, its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

import benchmarks.soak
from benchmarks.soak.conductor import Conductor, make_plan
from benchmarks.soak.recording import Recording
from benchmarks.soak.report import soak_report
from benchmarks.soak.supervisor import ServerEndedError, write_model
from benchmarks.soak.verdicts import Verdict, judge
from prefixwise import __version__
from prefixwise.bench.files import now_utc, write_text
from prefixwise.bench.processes import ended_by_signals
from prefixwise.bench.render.html import report_html
from prefixwise.host import cpu_name


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=benchmarks.soak.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of traffic (default 60)")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write the report to this file")
    parser.add_argument(
        "--recording", type=Path, metavar="FILE.json", help="write everything that happened to this file"
    )
    parser.add_argument("--render", type=Path, metavar="FILE.json", help="run nothing: judge this recording")
    parser.add_argument("--seed", type=int, default=0, help="of requests and plan (default 0)")
    parser.add_argument("--clients", type=int, default=6, help="requests in flight at most, bursts aside (default 6)")
    parser.add_argument(
        "--pause", type=float, default=0.4, metavar="SECONDS", help="mean pause of a client between requests (0.4)"
    )
    parser.add_argument(
        "--pool", type=int, default=60, metavar="N", help="size of the pool of requests with a reference (default 60)"
    )
    options = parser.parse_args(arguments)
    for name, least in (("minutes", 0.05), ("clients", 1), ("pause", 0.001), ("pool", 6)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least:g}, got {getattr(options, name):g}")
    return options


def describe_run(options: argparse.Namespace) -> Recording:
    """An empty recording, with what it takes to repeat the run."""
    names = ("minutes", "seed", "clients", "pause", "pool")
    return Recording(
        command=" ".join(["python -m benchmarks.soak", *(f"--{name} {getattr(options, name):g}" for name in names)]),
        machine=f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        versions=f"prefixwise {__version__}, Python {platform.python_version()}, PyTorch {version('torch')}",
        date=now_utc(),
    )


def run(options: argparse.Namespace) -> Recording:
    recording = describe_run(options)
    seconds = 60 * options.minutes
    with ended_by_signals(), tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        conductor = Conductor(Path(folder), model, recording, partial(print, file=sys.stderr, flush=True))
        try:
            asyncio.run(
                conductor.run(
                    seconds,
                    seed=options.seed,
                    clients=options.clients,
                    pause=options.pause,
                    num_mixed=options.pool,
                    plan=make_plan(seconds, options.seed),
                )
            )
        except* ServerEndedError as group:
            for error in group.exceptions:
                print(f"ended early: {error}", file=sys.stderr)
    return recording


def print_result(recording: Recording, verdicts: list[Verdict]) -> None:
    for each in verdicts:
        print(f"{'pass' if each.passed else 'FAIL'}  {each.name}: {each.found} ({each.promise})")
        for case in () if each.passed else each.against:
            print(f"      {case}")
    failed = [each.name for each in verdicts if not each.passed]
    print(json.dumps({"seconds": recording.seconds, "requests": recording.num_begun, "failed": failed}))


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    recording = run(options) if options.render is None else Recording.read(options.render)
    if options.recording is not None:
        recording.write(options.recording)
    verdicts = judge(recording)
    if options.report is not None:
        write_text(options.report, report_html(soak_report(recording, verdicts)))
    print_result(recording, verdicts)
    if not all(each.passed for each in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
