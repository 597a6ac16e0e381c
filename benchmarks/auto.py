"""Is `auto` the fastest algorithm? All of them on ten geometries in turns; exit status 1 if `auto` is over 5 % slower.

Measured: `ScoringEngine.run` from the prepared request to its logits: CPU seconds of the process on a CPU, where other
programs disturb the clock, else seconds. The lower quartile of the rounds after a warm-up round counts, as other
programs make a run slower and never faster, also in CPU seconds (caches, hyperthreads). Every request has a new query,
except in the rows "again", whose prefix may be cached. An algorithm that takes more than twice as long as another one
in the warm-up round is not run again. `auto` runs what it chooses, so its runs and those of that algorithm are one
sample. The last line is JSON.

    python -m benchmarks.auto [--backend torch] [--device cuda --random] [--rounds 15] [--only 3+5x3]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter, process_time

from benchmarks.contract import random_request
from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise import __version__
from prefixwise.backends.load import load_backend
from prefixwise.contract.request import Algorithm
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import BackendOptions, Warmup
from prefixwise.launch.loading import load_engine, warm_up
from prefixwise.launch.options import EngineOptions

ALGORITHMS: tuple[Algorithm, ...] = ("prefill_extend", "packed", "serial")
MOST = 1.05  # times the best
HOPELESS = 2.0  # times the best of the warm-up round


@dataclass(frozen=True)
class Geometry:
    """Requests of one shape."""

    query_tokens: int
    items: int
    item_tokens: int
    is_again: bool = False  # the same query every time

    @property
    def title(self) -> str:
        return f"{self.query_tokens}+{self.items}x{self.item_tokens}" + " again" * self.is_again


CPU_GEOMETRIES = (
    Geometry(3, 5, 3),
    Geometry(10, 10, 20),
    Geometry(40, 1, 10),
    Geometry(100, 1, 20),
    Geometry(100, 12, 5),
    Geometry(100, 12, 5, is_again=True),
    Geometry(150, 2, 10),
    Geometry(150, 2, 10, is_again=True),
    Geometry(300, 5, 20),
    Geometry(30, 20, 20),
)
ACCELERATOR_GEOMETRIES = (
    Geometry(3, 5, 3),
    Geometry(10, 10, 20),
    Geometry(100, 1, 20),
    Geometry(100, 100, 20),
    Geometry(100, 100, 20, is_again=True),
    Geometry(120, 10, 180),
    Geometry(300, 10, 20),
    Geometry(300, 10, 20, is_again=True),
    Geometry(2000, 1, 20),
    Geometry(2000, 500, 20),
)


@dataclass
class Row:
    """What was measured of a geometry."""

    geometry: Geometry
    chosen: str  # by `auto`, most of the time
    seconds: dict[str, float]  # lower quartiles by algorithm

    @property
    def ratio(self) -> float:
        """What `auto` takes, over the best."""
        return self.seconds[self.chosen] / min(self.seconds.values())

    @property
    def is_good(self) -> bool:
        return self.ratio <= MOST


def lower_quartile(found: Sequence[float]) -> float:
    return sorted(found)[len(found) // 4]


def measure(
    engine: ScoringEngine, geometry: Geometry, rounds: int, clock: Callable[[], float], seeds: Iterator[int]
) -> Row:
    """`seeds`: of queries, never the same twice. One query of several geometries would be cached after the first."""
    seconds: dict[str, list[float]] = defaultdict(list)
    choices: Counter[str] = Counter()
    seed_again = next(seeds)

    def run(algorithm: Algorithm) -> tuple[str, float]:
        seed = seed_again if geometry.is_again else next(seeds)
        shape = (geometry.query_tokens, geometry.items, geometry.item_tokens)
        prepared = engine.prepare(random_request(engine.backend.config, *shape, seed=seed, algorithm=algorithm))
        begin = clock()
        state = engine.run(prepared)
        taken = clock() - begin
        if state.error is not None:
            raise state.error
        assert prepared.plan is not None
        return prepared.plan.algorithm, taken

    if geometry.is_again:
        run("prefill_extend")
    first = {algorithm: run(algorithm)[1] for algorithm in ALGORITHMS}
    worth = [algorithm for algorithm in ALGORITHMS if first[algorithm] <= HOPELESS * min(first.values())]
    contenders: Sequence[Algorithm] = (*worth, "auto")
    for number in range(rounds):
        for index in range(len(contenders)):
            asked = contenders[(index + number) % len(contenders)]
            ran, taken = run(asked)
            seconds[ran].append(taken)
            choices[ran] += asked == "auto"
    return Row(geometry, choices.most_common(1)[0][0], {name: lower_quartile(found) for name, found in seconds.items()})


@contextmanager
def engine_of(options: argparse.Namespace) -> Iterator[ScoringEngine]:
    """A warm engine: of a model, or of random weights of Qwen3-0.6B's shape."""
    warmup: Warmup = options.warmup
    if not options.random:
        engine = load_engine(
            EngineOptions(options.model, options.backend, options.device, options.dtype, warmup=warmup)
        )
    else:
        backend = BackendOptions(options.backend, options.device, options.dtype, warmup=warmup)
        scheduler = Scheduler(load_backend(random_checkpoint(QWEN3_06B), backend))
        engine = ScoringEngine(EngineConfig("random"), scheduler, None)
        warm_up(engine)
    try:
        yield engine
    finally:
        engine.close()


HEADER = f"{'':16}" + "".join(f"{name:>16}" for name in ALGORITHMS) + f"  {'auto':<16}  over the best"


def render(row: Row) -> str:
    figures = [f"{1000 * row.seconds[name]:.1f} ms" if name in row.seconds else "-" for name in ALGORITHMS]
    verdict = f"{row.ratio:.3f}" + ("" if row.is_good else f"  above {MOST}")
    return f"{row.geometry.title:16}" + "".join(f"{each:>16}" for each in figures) + f"  {row.chosen:<16}  {verdict}"


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, .gguf file or hub id; the embedded model when absent")
    parser.add_argument("--random", action="store_true", help="random weights of Qwen3-0.6B's shape instead")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--warmup", choices=("full", "fast"), default="full")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", action="append", metavar="GEOMETRY", help='as the table names it: "100+12x5 again"')
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    with engine_of(options) as engine:
        info = engine.backend.info
        geometries = CPU_GEOMETRIES if info.device_kind == "cpu" else ACCELERATOR_GEOMETRIES
        chosen = [each for each in geometries if not options.only or each.title in options.only]
        clock = process_time if info.device_kind == "cpu" else perf_counter
        print(f"{engine.config.model_name} on {info.device}, {info.dtype}, {info.name}\n{HEADER}", flush=True)
        rows, seeds = [], count()
        for geometry in chosen:
            rows.append(measure(engine, geometry, options.rounds, clock, seeds))
            print(render(rows[-1]), flush=True)
        costs = vars(engine.scheduler.costs.model)
    figures = [
        {"geometry": row.geometry.title, "auto": row.chosen, "ratio": row.ratio, "seconds": row.seconds} for row in rows
    ]
    print(json.dumps({"prefixwise": __version__, "device": info.device, "costs": costs, "rows": figures}))
    sys.exit(0 if all(row.is_good for row in rows) else 1)


if __name__ == "__main__":
    main()
