"""The cases, one after the other: peers are started and prepared, rounds are run, rows are made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from benchmarks.cpu import startup
from benchmarks.cpu.cases import FULL, TINY, Role
from benchmarks.cpu.peer import Round
from benchmarks.cpu.process import PeerFailedError, running
from benchmarks.cpu.targets import FLOAT32_GOALS, GOALS, Goal, make_row, ratio_row, share_row
from benchmarks.goals.cases import Geometry

LLAMA_MISSING = (
    "llama-cpp-python is not installed: pip install --editable '.[bench]' (docs/performance.md has build flags)"
)

Rows = list[dict[str, Any]]
Report = Callable[[str], None]


class Runs(Protocol):
    """What a race asks of a peer."""

    def run(self, seed: int) -> Round: ...


def race(peers: Mapping[str, Runs], rounds: int, report: Report) -> dict[str, list[Round]]:
    """Each round asks all of them for the same request, one at a time; who is first turns from round to round."""
    names = list(peers)
    found: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(peers[name].run(seed=number + 1))
        report(f"round {number + 1}: " + ", ".join(f"{name} {found[name][-1].seconds:.2f} s" for name in names))
    return found


class CpuRun:
    """All that is asked for; what fails costs its own rows and no others."""

    def __init__(self, *, tiny: bool, rounds: int, folder: Path, model_folder: Path | None, report: Report) -> None:
        self._tiny = tiny
        self._scale = TINY if tiny else FULL
        self._rounds = rounds
        self._folder = folder
        self._model_folder = model_folder
        self._report = report
        self._goals: Mapping[str, Goal] = {} if tiny else GOALS
        self.peers: dict[str, dict[str, Any]] = {}  # versions and settings, by case and peer
        self.seconds: dict[str, float] = {}  # of each case, all told
        self.skipped: dict[str, str] = {}
        self.errors: dict[str, str] = {}

    def measure(self, case: str) -> Rows:
        cases: dict[str, Callable[[], Rows]] = {
            "hf": self._hugging_face,
            "llama": self._llama,
            "gemm": lambda: self._gemm("gemm", self._scale.contract),
            "gemm-short": lambda: self._gemm("gemm-short", self._scale.hf),
            "jax": self._jax,
            "score": self._score,
            "serve": self._serve,
        }
        begin = perf_counter()
        try:
            return cases[case]()
        except PeerFailedError as error:
            self.errors[case] = str(error)
            return []
        finally:
            self.seconds[case] = round(perf_counter() - begin, 1)

    @cached_property
    def _random_model(self) -> str:
        """The folder of the random model, written where it is not there. Raises PeerFailedError."""
        folder = self._model_folder or self._folder / "model"
        if not (folder / "config.json").exists():
            self._report(f"writing random weights to {folder}")
            command = [
                sys.executable,
                "-m",
                "benchmarks.random_folder",
                *(["--tiny"] if self._tiny else []),
                str(folder),
            ]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise PeerFailedError(f"random weights cannot be written: {done.stderr.strip()[-1000:]}")
        return str(folder)

    def _hugging_face(self) -> Rows:
        geometry = self._scale.hf
        found = self._race("hf", ("ours", "hf-prefix", "hf-full"), geometry, self._random_model)
        title = f"{geometry.title}, {self._model_title}: over Hugging Face"
        return [
            ratio_row("hf-prefix", f"{title}, prefix cache", found["ours"], found["hf-prefix"], self._goals),
            ratio_row("hf-full", f"{title}, full sequences", found["ours"], found["hf-full"], self._goals),
        ]

    def _llama(self) -> Rows:
        geometry = self._scale.llama
        if find_spec("llama_cpp") is None:
            self.skipped["llama"] = LLAMA_MISSING
            return []
        found = self._race("llama", ("ours", "llama"), geometry, None)
        title = f"{geometry.title}, embedded model: over llama.cpp"
        is_float32 = self.peers["llama: ours"]["settings"]["dtype"] == "float32"
        goals = FLOAT32_GOALS if self._goals and is_float32 else self._goals
        return [ratio_row("llama", title, found["ours"], found["llama"], goals)]

    def _gemm(self, name: str, geometry: Geometry) -> Rows:
        found = self._race(name, ("ours", "gemm"), geometry, self._random_model)
        title = f"{geometry.title}, {self._model_title}: of the GEMM rate"
        flops = geometry.flops(self._scale.model) / geometry.items
        return [share_row(name, title, found["ours"], found["gemm"], flops, self._goals)]

    def _jax(self) -> Rows:
        if find_spec("jax") is None:
            self.skipped["jax"] = "JAX is not installed: pip install --editable '.[jax]'"
            return []
        geometry = self._scale.hf
        found = self._race("jax", ("ours-jax", "gemm-jax"), geometry, self._random_model)
        title = f"{geometry.title}, {self._model_title}, JAX: of XLA's GEMM rate"
        flops = geometry.flops(self._scale.model) / geometry.items
        return [share_row("jax", title, found["ours-jax"], found["gemm-jax"], flops, self._goals)]

    def _score(self) -> Rows:
        values = self._repeat("score", startup.score_seconds)
        return [make_row("score", "`prefixwise score`, embedded model, whole process", values, "s", self._goals)]

    def _serve(self) -> Rows:
        values = self._repeat("serve", lambda: startup.serve_seconds(self._folder))
        return [make_row("serve", "`prefixwise serve`, embedded model, until /health is 200", values, "s", self._goals)]

    @property
    def _model_title(self) -> str:
        return "a tiny model" if self._tiny else "Qwen3-0.6B's shape"

    def _repeat(self, case: str, once: Callable[[], float]) -> list[float]:
        """After one more, which reads from the disk."""
        values = []
        for number in range(self._rounds + 1):
            values.append(once())
            self._report(f"{case}: {'warm-up' if number == 0 else f'round {number}'}: {values[-1]:.2f} s")
        return values[1:]

    def _race(self, case: str, names: Sequence[str], geometry: Geometry, model: str | None) -> dict[str, list[Round]]:
        """All are loaded before the first is prepared, and prepared before the first round."""
        with ExitStack() as stack:
            peers = {}
            for name in names:
                role = Role(name, geometry.shape, model, self._tiny)
                peers[name] = stack.enter_context(running(role, self._folder))
                peers[name].wait_until_loaded()
            for name, peer in peers.items():
                self._report(f"{case}: preparing {name}; it logs to {self._folder / name}.log")
                self.peers[f"{case}: {name}"] = peer.prepare()
            return race(peers, self._rounds, lambda words: self._report(f"{case}: {words}"))
