"""`python -m benchmarks.cluster_simulation`: one case after the other, a table for each, then JSON."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import benchmarks.cluster_simulation
from benchmarks.cluster_simulation.cases import CASES, FULL, TINY, Row, Scale
from benchmarks.cluster_simulation.figures import P99_BOUND_SECONDS
from benchmarks.goals.__main__ import commit
from benchmarks.text_rows import aligned
from prefixwise import __version__
from prefixwise.bench.files import write_text


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster_simulation",
        description=benchmarks.cluster_simulation.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON to this file, too")
    parser.add_argument("--tiny", action="store_true", help="small clusters and short runs: a test of this script")
    return parser.parse_args(arguments)


def describe(scale: Scale) -> dict[str, Any]:
    """What all cases start from."""
    return {
        "replicas": scale.setup.replicas,
        "fronts": scale.setup.fronts,
        "device": asdict(scale.setup.device),
        "traffic": asdict(scale.contract),
        "p99_bound_ms": 1000 * P99_BOUND_SECONDS,
    }


def table(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[name.replace("_", " ") for name in names]]
    lines += [[_cell(row.get(name)) for name in names] for row in rows]
    return aligned(lines, left=[place for place, name in enumerate(names) if isinstance(rows[0].get(name), str)])


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "NO", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.0f}"
    return str(value)


def main() -> None:
    options = parse_options()
    scale = replace(TINY if options.tiny else FULL, seed=options.seed)
    found: dict[str, list[Row]] = {}
    begin = perf_counter()
    for name in options.only or CASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = CASES[name](scale)
        print(f"{name}: {CASES[name].__doc__}\n\n{table(found[name])}\n", flush=True)
    result = {
        "prefixwise": __version__,
        "commit": commit(),
        "tiny": options.tiny,
        "seed": options.seed,
        **describe(scale),
        "cases": found,
    }
    print(f"{perf_counter() - begin:.0f} s", file=sys.stderr)
    if options.output is not None:
        write_text(options.output, f"{json.dumps(result)}\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
