"""What a step and a request cost the engine's threads, on a device that takes no time, or on a real one.

Measured: CPU microseconds of the scheduler thread (receive, fill, arrays, deliver), the device thread (launch) and the
thread that waits for outputs, for requests of 300 + 10 x 20 tokens, every query new. The requests of a wave are
submitted together and fill as few steps as they fit; the next wave follows at once when all are answered. Preparing
requests, submitting them and reading their scores belong to the callers' threads and are not counted. The limits are
those of an H200: steps of 16,384 tokens, blocks and items in one forward, async scheduling.

    us a step      a, and
    us a request   b, of the line CPU = a * steps + b * requests through the waves of all sizes

CPU time and not the clock, so that other programs disturb it little; the median of --rounds for each size of a wave,
the sizes in turns. The goals are 500 us a step and 60 us a request. The last line is JSON.

`--backend torch` and `--backend jax` run a model with random weights of Qwen3-0.6B's shape, on a GPU if there is one.
The device thread then packs and uploads the integers of a forward and launches it. The waiting thread is shown and not
counted: it may spin until the device is done.

    python -m benchmarks.engine_cost [--backend fake] [--rounds 10] [--in-flight 1 8 32 64] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from benchmarks.contract import random_request
from benchmarks.goals.cases import TINY
from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from benchmarks.text_rows import aligned
from prefixwise import __version__
from prefixwise.backends.fake import FakeBackend, FakeBlock
from prefixwise.backends.load import load_backend
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import Backend, BackendOptions
from prefixwise.forward.batch import ForwardBatch, ForwardOutput, RunningForward
from prefixwise.server.launch import relax_garbage_collection

GEOMETRY = (300, 10, 20)  # query tokens, items, item tokens
VOCABULARY = 50_000
STEP_TOKENS = 16_384
IN_FLIGHT = (1, 8, 32, 64)
WARM_UP_ROUNDS = 3
WAVES = 8  # of a round, one after the other
DEADLINE_SECONDS = 60.0  # of every request, as of a server's
SETTLE_SECONDS = 0.005  # after the last wave, until the threads wait
GOALS = {"us_per_step": 500.0, "us_per_request": 60.0}
THREADS = {"scheduler": "prefixwise-scheduler", "device": "prefixwise-device", "answers": "prefixwise-answers"}


class NoDevice(FakeBackend):
    """The fake backend without its arithmetic: every logit is 0."""

    def __init__(self) -> None:
        super().__init__(
            VOCABULARY, bit_equal=False, step_tokens=STEP_TOKENS, joins_prefill=True, async_scheduling=True
        )
        self._blocks: dict[int, FakeBlock] = {}  # by their tokens

    def start(self, batch: ForwardBatch) -> RunningForward:
        lens = np.diff(batch.segment_starts)[: len(batch.cache_segments)].tolist()
        blocks = tuple(self._block(num_tokens) for num_tokens in lens)
        output = ForwardOutput(np.zeros(batch.label_ids.shape, np.float32), None, blocks)
        return RunningForward(blocks, lambda: output)

    def _block(self, num_tokens: int) -> FakeBlock:
        if num_tokens not in self._blocks:
            self._blocks[num_tokens] = FakeBlock(num_tokens, np.zeros(num_tokens, np.int32))
        return self._blocks[num_tokens]


@dataclass(frozen=True)
class Wave:
    """What a wave has cost, on average over a round."""

    num_requests: int
    num_steps: float
    seconds: dict[str, float]  # of CPU, by the name of a thread
    counted: frozenset[str]  # the threads that `total` is of

    @property
    def total(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name in self.counted)


class Clocks:
    """CPU clocks of the engine's threads."""

    def __init__(self) -> None:
        idents = {thread.name: thread.ident for thread in threading.enumerate()}
        found = {name: idents.get(full) for name, full in THREADS.items()}
        self._clocks = {name: time.pthread_getcpuclockid(ident) for name, ident in found.items() if ident is not None}

    def read(self) -> dict[str, float]:
        return {name: time.clock_gettime(clock) for name, clock in self._clocks.items()}


class Waves:
    """Runs rounds of waves through one engine."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self._clocks = Clocks()
        is_fake = isinstance(engine.backend, NoDevice)
        self._counted = frozenset(THREADS) if is_fake else frozenset(THREADS) - {"answers"}
        self._seed = 0

    def run(self, num_requests: int) -> Wave:
        engine, done = self._engine, SimpleQueue[None]()
        waves = [[self._next_state(done) for _ in range(num_requests)] for _ in range(WAVES)]
        steps, before = engine.scheduler.stats().steps, self._clocks.read()
        for states in waves:
            engine.submit_all(states)
            while not all(state.is_done for state in states):
                done.get()
        time.sleep(SETTLE_SECONDS)
        after = self._clocks.read()
        failed = [state.error for states in waves for state in states if state.error is not None]
        assert not failed, failed
        seconds = {name: (after[name] - before[name]) / WAVES for name in before}
        return Wave(num_requests, (engine.scheduler.stats().steps - steps) / WAVES, seconds, self._counted)

    def _next_state(self, done: SimpleQueue[None]) -> RequestState:
        self._seed += 1
        prepared = self._engine.prepare(random_request(self._engine.backend.config, *GEOMETRY, seed=self._seed))
        deadline = time.monotonic() + DEADLINE_SECONDS
        return self._engine.state_of(prepared, deadline=deadline, on_change=lambda: done.put(None))


def fit(waves: Sequence[Wave]) -> dict[str, float]:
    """The line through the waves: microseconds a step and a request."""
    sizes = np.array([[wave.num_steps, wave.num_requests] for wave in waves], float)
    (per_step, per_request), *_ = np.linalg.lstsq(sizes, 1e6 * np.array([wave.total for wave in waves]), rcond=None)
    return {"us_per_step": round(float(per_step), 1), "us_per_request": round(float(per_request), 1)}


def middle(waves: Sequence[Wave]) -> Wave:
    """The wave whose cost is the median."""
    return sorted(waves, key=lambda wave: wave.total)[len(waves) // 2]


def make_backend(name: str, *, tiny: bool) -> Backend:
    if name == "fake":
        return NoDevice()
    return load_backend(random_checkpoint(TINY.model if tiny else QWEN3_06B), BackendOptions(name))


def measure(backend: Backend, in_flight: Sequence[int], rounds: int) -> list[Wave]:
    """The median wave of each size."""
    engine = ScoringEngine(EngineConfig("random"), Scheduler(backend), None)
    try:
        waves = Waves(engine)
        for size in [*in_flight] * WARM_UP_ROUNDS:  # real backends compile or capture a program for each
            waves.run(size)
        relax_garbage_collection()  # as a server does after its warm-up
        turns = [[waves.run(size) for size in in_flight] for _ in range(rounds)]
    finally:
        engine.close()
    return [middle(each) for each in zip(*turns, strict=True)]


def row_of(wave: Wave) -> dict[str, float]:
    parts = {f"{name}_us": round(1e6 * seconds / wave.num_steps, 1) for name, seconds in wave.seconds.items()}
    return {
        "in_flight": wave.num_requests,
        "steps": wave.num_steps,
        "us_per_step": round(1e6 * wave.total / wave.num_steps, 1),
        "us_per_request": round(1e6 * wave.total / wave.num_requests, 1),
        **parts,  # of a step
    }


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=("fake", "torch", "jax"), default="fake")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: a test of this script")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--in-flight", type=int, nargs="+", default=list(IN_FLIGHT), help="requests of a wave")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or min(options.in_flight) < 1 or len(set(options.in_flight)) < 2:
        parser.error(f"--rounds and --in-flight are at least 1, with two sizes of waves, got {arguments}")
    return options


def main() -> None:
    options = parse_options()
    backend = make_backend(options.backend, tiny=options.tiny)
    device = backend.info.device
    waves = measure(backend, options.in_flight, options.rounds)
    rows, fitted = [row_of(wave) for wave in waves], fit(waves)
    print(aligned([list(rows[0]), *([f"{value:g}" for value in row.values()] for row in rows)], left=()))
    for name, goal in GOALS.items():
        print(f"{name.replace('_', ' ')}: {fitted[name]:g} (goal {goal:g})")
    settings = {"prefixwise": __version__, "backend": options.backend, "device": device, "rounds": options.rounds}
    print(json.dumps({**settings, **fitted, "goals": GOALS, "waves": rows}))


if __name__ == "__main__":
    main()
