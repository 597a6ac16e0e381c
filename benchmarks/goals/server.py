"""The server's process: loads a model, measures its engine, compiles what will be needed, and opens.

    python -m benchmarks.goals.server SETTINGS-AS-JSON RESULT-FILE

It says on stdout what it does, and logs on stderr as every server does. Where nothing is asked through HTTP it ends
when its engine is measured.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from benchmarks.goals.cases import Settings
from benchmarks.goals.engine_rows import EngineRows, make_engine
from prefixwise.engine.engine import ScoringEngine
from prefixwise.launch.loading import warm_up
from prefixwise.server.config import ServerOptions
from prefixwise.server.launch import run_server


def open_engine(settings: Settings, result: Path) -> ScoringEngine:
    """The engine, when its figures are in the file and nothing is left to compile that will be needed."""

    def report(words: str) -> None:
        print(f"{settings.title}: {words}", flush=True)

    report("loading")
    times = [perf_counter()]
    engine = make_engine(settings)
    times.append(perf_counter())
    rows = EngineRows(engine, settings, report)
    found = {
        "measured": [asdict(row) for row in rows.measure()],
        "gemm_flops": rows.gemm,
        "cold_seconds": rows.cold.seconds,
        "small_seconds": rows.small_seconds() if "small" in settings.cases else None,
        "errors": rows.errors,
    }
    times.append(perf_counter())
    num_programs = 0
    if settings.needs_full_warm_up:
        report("warm-up: all programs")
        num_programs = warm_up(engine)
    times.append(perf_counter())
    spans = zip(("load", "engine", "warm_up"), times, times[1:], strict=False)
    info = engine.backend.info
    found |= {
        "version": version(info.name),
        "device": info.device,
        "dtype": info.dtype,
        "attention": info.attention,
        "programs": num_programs,
        "seconds": {name: round(end - begin, 1) for name, begin, end in spans},
    }
    result.write_text(json.dumps(found), encoding="utf-8")
    return engine


def main() -> None:
    told = json.loads(sys.argv[1])
    settings, result = Settings(**{**told, "cases": tuple(told["cases"])}), Path(sys.argv[2])
    if settings.http_cases:
        run_server(ServerOptions(port=0), lambda: open_engine(settings, result), lambda engine: {})
    else:
        open_engine(settings, result).close()


if __name__ == "__main__":
    main()
