"""The cross-backend runbook from here, end to end: workload, targets, four matrices, comparison, report.

Every step leaves files, and a step whose files are there is not done again: a run that was cut short is given the same
command line once more. Rows that a target has measured stay there until they are fetched, so a lost connection costs
one row at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from prefixwise.bench.artifacts import BackendName, Comparison, ScoreMatrix, Workload
from prefixwise.bench.files import read_artifact, write_artifact
from prefixwise.bench.remote.compare.files import (
    COMPARISON,
    COMPARISON_FILES,
    REPORT_FILES,
    write_comparison,
    write_report,
)
from prefixwise.bench.remote.compare.plan import MATRIX_STEPS, ComparePlan, MatrixStep, matrix_spec
from prefixwise.bench.remote.compare.preflight import CompareSide, check_sides
from prefixwise.bench.remote.compare.state import CompareState
from prefixwise.bench.remote.folders import CANONICAL_WORKLOAD, read_or_set_aside
from prefixwise.bench.remote.on_target.client_matrix import found_matrix, is_done, request_sha256
from prefixwise.bench.remote.spec import ClientMatrixSpec
from prefixwise.bench.remote.sweep import Watcher, new_token, released_after
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.token_facts import token_facts
from prefixwise.bench.workload import make_workload
from prefixwise.contract.errors import ArtifactError

NUM_STEPS = 4 + len(MATRIX_STEPS)
_MATRIX_FILES = tuple(step.file_name for step in MATRIX_STEPS)


@dataclass(frozen=True)
class CompareResult:
    """Where everything is, and what came out."""

    folder: Path
    comparison: Comparison
    failed: tuple[str, ...]  # matrices in which no row worked
    kept: tuple[str, ...]  # steps that were not done again

    @property
    def passed(self) -> bool:
        return not self.failed and bool(self.comparison.correctness["pass"])


@dataclass
class CompareRun:
    """One comparison in one folder. `begin`, then the call."""

    plan: ComparePlan
    sides: Mapping[BackendName, CompareSide]
    folder: Path  # here
    target_folder: str  # on both targets
    watcher: Watcher
    take_over: bool = False
    kept: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _token: str = field(default_factory=new_token)
    _locked: set[str] = field(default_factory=set)  # names of targets

    def begin(self) -> list[MatrixStep]:
        """The workload, and which matrices are missing. Raises ArtifactError where the folder is another run's."""
        self._state = CompareState.open(self.folder, self.plan.arguments(), self.watcher.line)
        for backend, side in self.sides.items():
            self._state.check_target(backend, side.agent.target.name)
        path = self.folder / CANONICAL_WORKLOAD
        there = read_or_set_aside(path, Workload, self.watcher.line)
        self._workload = self._new_workload() if there is None else there
        self._missing = [step for step in MATRIX_STEPS if not self._is_here(step)]
        self._check_workload(path)  # not before: what is another run's stays as it is
        return self._missing

    def __call__(self) -> CompareResult:
        """After `begin`. Raises TargetError, ConnectionLostError; what was done stays."""
        self._check_targets()
        self._write_workload()  # not before: a run that cannot begin leaves no folder
        with ExitStack() as locks:
            for step in MATRIX_STEPS:
                self._measure(step, locks)
        self._compare()
        self._report()
        comparison = read_artifact(self.folder / COMPARISON, Comparison)
        return CompareResult(self.folder, comparison, tuple(self.failed), tuple(self.kept))

    def _new_workload(self) -> Workload:
        return make_workload(self.plan.workload_options, token_facts(self.plan.model))

    def _check_workload(self, path: Path) -> None:
        if self._state.is_done("workload", (), (CANONICAL_WORKLOAD,)):
            self._keep("canonical workload")
            return
        if path.exists() and request_sha256(self._new_workload()) != request_sha256(self._workload):
            raise ArtifactError(f"{path} is of other requests than these: expected none, or the same")
        self.watcher.step("canonical workload")
        for note in self._workload.notes:
            self.watcher.line(f"note: {note}")

    def _write_workload(self) -> None:
        path = self.folder / CANONICAL_WORKLOAD
        if not path.exists():
            write_artifact(path, self._workload)
        self._state.record("workload", (), (CANONICAL_WORKLOAD,))

    def _check_targets(self) -> None:
        backends = dict.fromkeys(step.backend for step in self._missing)
        if not backends:
            self.watcher.step("targets: nothing is left to measure on them")
            return
        sides = [self.sides[backend] for backend in backends]
        self.watcher.step(f"targets: {', '.join(dict.fromkeys(side.agent.target.name for side in sides))}")
        check_sides(sides, self.target_folder, self.plan.model, self.watcher.line, take_over=self.take_over)

    @property
    def used_targets(self) -> set[str]:
        """Where matrices of this comparison were measured, by this call or an earlier one."""
        return set(self._state.targets.values())

    def _measure(self, step: MatrixStep, locks: ExitStack) -> None:
        if step not in self._missing:
            self._keep(step.title)
        else:
            self.watcher.step(step.title)
            self._measure_there(step, locks)
        self._state.record(step.name, (CANONICAL_WORKLOAD,), (step.file_name,))

    def _measure_there(self, step: MatrixStep, locks: ExitStack) -> None:
        agent = self.sides[step.backend].agent
        target, folder = agent.target, self.target_folder
        self._state.settle_target(step.backend, target.name)
        made = target.run(["mkdir", "-p", folder])
        if made.status != 0:
            raise TargetError(f"{target.name}: {folder} cannot be made: {made.words}")
        target.upload(self.folder / CANONICAL_WORKLOAD, f"{folder}/{CANONICAL_WORKLOAD}")
        agent.call("matrix", "--spec", self._owned_spec(step, locks).to_line(), on_line=self.watcher.line)
        # The matrix comes last: where it is, the others are.
        logs = (f"logs/{step.name}_{what}.log" for what in ("server", "matrix"))
        for name in (*logs, step.markdown_name, step.file_name):
            target.download(f"{folder}/{name}", self.folder / name)
        self._judge(step)

    def _owned_spec(self, step: MatrixStep, locks: ExitStack) -> ClientMatrixSpec:
        """A target is taken over once: where somebody takes it from us later, that is for us to respect."""
        agent = self.sides[step.backend].agent
        is_first = agent.target.name not in self._locked
        if is_first:
            self._locked.add(agent.target.name)
            locks.enter_context(released_after(agent, self._token))
        return replace(self._spec(step), run=self._token, take_over=self.take_over and is_first)

    def _judge(self, step: MatrixStep) -> None:
        matrix = self._found(step)
        if matrix is None or not matrix.complete:
            raise ArtifactError(f"{self.folder / step.file_name} is not complete: expected all that was measured")
        if not is_done(matrix):
            self.failed.append(step.name)
            self.watcher.line(f"{step.title}: no chunk size worked; the same command measures it again")

    def _compare(self) -> None:
        if self._state.is_done("comparison", _MATRIX_FILES, COMPARISON_FILES):
            self._keep("comparison")
            return
        self.watcher.step("comparison")
        write_comparison(self.folder, self.plan)
        self._state.record("comparison", _MATRIX_FILES, COMPARISON_FILES)

    def _report(self) -> None:
        inputs = (COMPARISON, *_MATRIX_FILES)
        if self._state.is_done("report", inputs, REPORT_FILES):
            self._keep("report")
            return
        self.watcher.step("report")
        write_report(self.folder)
        self._state.record("report", inputs, REPORT_FILES)

    def _keep(self, title: str) -> None:
        self.kept.append(title)
        self.watcher.step(f"{title}: kept")

    def _is_here(self, step: MatrixStep) -> bool:
        matrix = self._found(step)
        return matrix is not None and is_done(matrix)

    def _found(self, step: MatrixStep) -> ScoreMatrix | None:
        path = self.folder / step.file_name
        return found_matrix(path, self._spec(step), request_sha256(self._workload), self.watcher.line)

    def _spec(self, step: MatrixStep) -> ClientMatrixSpec:
        return matrix_spec(self.plan, step, self._workload, self.target_folder)
