"""The cross-backend comparison, end to end: workload, targets, four matrices, comparison, report.

Every step writes files, and a step whose files are complete is skipped. To resume an interrupted run, give the same
command line again. A target keeps the rows that it has measured until they are fetched, so a lost connection costs at
most one row. Both targets are checked before anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prefixwise._version import __version__
from prefixwise.bench.files import read_artifact, write_artifact, write_text
from prefixwise.bench.kinds.base import BackendName
from prefixwise.bench.kinds.comparison.inputs import ReportPaths, read_report_inputs
from prefixwise.bench.kinds.comparison.model import Comparison
from prefixwise.bench.kinds.comparison.report import comparison_report, make_report
from prefixwise.bench.kinds.score_matrix import ScoreMatrix
from prefixwise.bench.kinds.workload import Workload
from prefixwise.bench.remote.agent_client import RemoteAgent, answer_field, new_token, released_after
from prefixwise.bench.remote.compare.plan import MATRIX_STEPS, PACKAGES, ComparePlan, MatrixStep, matrix_spec
from prefixwise.bench.remote.compare.state import CompareState
from prefixwise.bench.remote.doctor import require_accelerator
from prefixwise.bench.remote.folders import CANONICAL_WORKLOAD, read_or_set_aside
from prefixwise.bench.remote.on_target.client_matrix import found_matrix, is_done, request_sha256
from prefixwise.bench.remote.spec import ClientMatrixSpec
from prefixwise.bench.remote.sweep import Watcher
from prefixwise.bench.remote.targets.base import OnLine, TargetError
from prefixwise.bench.render.html import report_html
from prefixwise.bench.render.markdown import report_markdown
from prefixwise.bench.rules import Bounds
from prefixwise.bench.run.comparison import compare, read_inputs
from prefixwise.bench.run.workload import make_workload
from prefixwise.bench.tokens import token_facts
from prefixwise.contract.errors import ArtifactError


@dataclass(frozen=True)
class CompareSide:
    """One backend, its target, and its required accelerator; None: any device."""

    backend: BackendName
    agent: RemoteAgent
    accelerator: str | None = None


def check_sides(sides: Sequence[CompareSide], folder: str, model: str, line: OnLine, *, take_over: bool) -> None:
    """Check both targets, after stopping servers of earlier runs, which may occupy the device. Raises TargetError."""
    asked: dict[tuple[str, str], Mapping[str, Any]] = {}  # both sides may be one machine
    for side in sides:
        place = (side.agent.target.name, side.agent.python)
        if place not in asked:
            asked[place] = _ask(side.agent, folder, model, line, take_over=take_over)
        check_facts(side, asked[place])


def _ask(agent: RemoteAgent, folder: str, model: str, line: OnLine, *, take_over: bool) -> Mapping[str, Any]:
    name = agent.target.name
    agent.target.check_reachable()
    agent.call("clean", *(("--take-over", "yes") if take_over else ()), on_line=line)
    facts = agent.call("facts", "--folder", folder, "--model", model, "--port", "0")
    devices, model_note = answer_field(facts, "devices", name), answer_field(facts, "model", name)
    line(f"{name}: prefixwise {answer_field(facts, 'prefixwise', name)}, {', '.join(devices) or 'no device'}")
    if model_note is not None:
        line(f"{name}: {model}: {model_note}")
    return facts


def check_facts(side: CompareSide, facts: Mapping[str, Any]) -> None:
    """Raises TargetError."""
    name, package = side.agent.target.name, PACKAGES[side.backend]
    remedy = f"run prefixwise ops install --target {name}"
    version = answer_field(facts, "prefixwise", name)
    if version != __version__:
        raise TargetError(f"{name}: expected prefixwise {__version__} as here, got {version} ({remedy})")
    if not answer_field(facts, "packages", name).get(package):
        raise TargetError(f"{name}: {package} is not installed for {side.agent.python}: {side.backend} needs it")
    if not answer_field(facts, "is_writable", name):
        raise TargetError(f"{name}: the folder for artifacts cannot be written")
    if side.accelerator is not None:
        try:
            require_accelerator(facts, side.accelerator, package)
        except TargetError as error:
            raise TargetError(f"{name}, for {side.backend}: {error}") from None


COMPARISON = "comparison.json"
COMPARISON_FILES = (COMPARISON, "comparison.md")
REPORT_MARKDOWN, REPORT_HTML = REPORT_FILES = ("report.md", "report.html")


def write_comparison(folder: Path, plan: ComparePlan) -> None:
    """Raises ArtifactError."""
    inputs = read_inputs(
        folder / MatrixStep("jax", "portable").file_name,
        folder / MatrixStep("pytorch", "portable").file_name,
        folder / MatrixStep("jax", "best_native").file_name,
        folder / MatrixStep("pytorch", "best_native").file_name,
    )
    gates = Bounds(plan.correctness_threshold_max_abs, plan.correctness_threshold_mean_abs)
    comparison = compare(inputs, gates)
    write_text(folder / "comparison.md", report_markdown(comparison_report(comparison, COMPARISON)))
    write_artifact(folder / COMPARISON, comparison)


def write_report(folder: Path) -> None:
    """Write the report with the date of the comparison, so that it is reproducible. Raises ArtifactError."""
    markdown, html = folder / REPORT_MARKDOWN, folder / REPORT_HTML
    inputs = read_report_inputs(ReportPaths(folder / COMPARISON, output_report=markdown, output_html=html))
    day = (inputs.comparison.generated_at_utc or "").partition("T")[0]
    report = make_report(inputs, day)
    write_text(markdown, report_markdown(report))
    write_text(html, report_html(report))


NUM_STEPS = 4 + len(MATRIX_STEPS)
_MATRIX_FILES = tuple(step.file_name for step in MATRIX_STEPS)


@dataclass(frozen=True)
class CompareResult:
    """The result of a comparison, and its folder."""

    folder: Path
    comparison: Comparison
    failed: tuple[str, ...]  # matrices without a successful row
    skipped: tuple[str, ...]  # steps that were done already

    @property
    def passed(self) -> bool:
        return not self.failed and bool(self.comparison.correctness["pass"])


@dataclass
class CompareRun:
    """One comparison in one folder. Call `begin`, then the object."""

    plan: ComparePlan
    sides: Mapping[BackendName, CompareSide]
    folder: Path  # here
    target_folder: str  # on both targets
    watcher: Watcher
    take_over: bool = False
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _token: str = field(default_factory=new_token)
    _locked: set[str] = field(default_factory=set)  # names of targets

    def begin(self) -> list[MatrixStep]:
        """Read or make the workload; return the missing matrices. Raises ArtifactError for another run's folder."""
        self._state = CompareState.open(self.folder, self.plan.arguments(), self.watcher.line)
        for backend, side in self.sides.items():
            self._state.check_target(backend, side.agent.target.name)
        path = self.folder / CANONICAL_WORKLOAD
        there = read_or_set_aside(path, Workload, self.watcher.line)
        self._workload = self._new_workload() if there is None else there
        self._missing = [step for step in MATRIX_STEPS if not self._is_here(step)]
        self._check_workload(path)  # last: files of another run must not be touched
        return self._missing

    def __call__(self) -> CompareResult:
        """Run all missing steps. Raises TargetError, ConnectionLostError; completed steps remain."""
        self._check_targets()
        self._write_workload()  # only now: a run that cannot begin leaves no folder
        with ExitStack() as locks:
            for step in MATRIX_STEPS:
                self._measure(step, locks)
        self._compare()
        self._report()
        comparison = read_artifact(self.folder / COMPARISON, Comparison)
        return CompareResult(self.folder, comparison, tuple(self.failed), tuple(self.skipped))

    def _new_workload(self) -> Workload:
        return make_workload(self.plan.workload_options, token_facts(self.plan.model))

    def _check_workload(self, path: Path) -> None:
        if self._state.is_done("workload", (), (CANONICAL_WORKLOAD,)):
            self._skip("canonical workload")
            return
        if path.exists() and request_sha256(self._new_workload()) != request_sha256(self._workload):
            raise ArtifactError(f"{path} contains other requests: expected the same, or no file")
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
            self.watcher.step("targets: nothing left to measure")
            return
        sides = [self.sides[backend] for backend in backends]
        self.watcher.step(f"targets: {', '.join(dict.fromkeys(side.agent.target.name for side in sides))}")
        check_sides(sides, self.target_folder, self.plan.model, self.watcher.line, take_over=self.take_over)

    @property
    def used_targets(self) -> set[str]:
        """The targets on which this comparison was measured, by this call or an earlier one."""
        return set(self._state.targets.values())

    def _measure(self, step: MatrixStep, locks: ExitStack) -> None:
        if step not in self._missing:
            self._skip(step.title)
        else:
            self.watcher.step(step.title)
            self._measure_there(step, locks)
        self._state.record(step.name, (CANONICAL_WORKLOAD,), (step.file_name,))

    def _measure_there(self, step: MatrixStep, locks: ExitStack) -> None:
        agent = self.sides[step.backend].agent
        target, folder = agent.target, self.target_folder
        self._state.record_target(step.backend, target.name)
        made = target.run(["mkdir", "-p", folder])
        if made.status != 0:
            raise TargetError(f"{target.name}: {folder} cannot be created: {made.message}")
        target.upload(self.folder / CANONICAL_WORKLOAD, f"{folder}/{CANONICAL_WORKLOAD}")
        agent.call("matrix", "--spec", self._owned_spec(step, locks).to_line(), on_line=self.watcher.line)
        # The matrix comes last: if it is here, all other files are.
        logs = (f"logs/{step.name}_{what}.log" for what in ("server", "matrix"))
        for name in (*logs, step.markdown_name, step.file_name):
            target.download(f"{folder}/{name}", self.folder / name)
        self._judge(step)

    def _owned_spec(self, step: MatrixStep, locks: ExitStack) -> ClientMatrixSpec:
        """The specification with the run's token. A target is taken over only once, not back from a later run."""
        agent = self.sides[step.backend].agent
        is_first = agent.target.name not in self._locked
        if is_first:
            self._locked.add(agent.target.name)
            locks.enter_context(released_after(agent, self._token))
        return replace(self._spec(step), run=self._token, take_over=self.take_over and is_first)

    def _judge(self, step: MatrixStep) -> None:
        matrix = self._found(step)
        if matrix is None or not matrix.complete:
            raise ArtifactError(f"{self.folder / step.file_name} is not complete: expected all rows")
        if not is_done(matrix):
            self.failed.append(step.name)
            self.watcher.line(f"{step.title}: no chunk size succeeded; the same command measures it again")

    def _compare(self) -> None:
        if self._state.is_done("comparison", _MATRIX_FILES, COMPARISON_FILES):
            self._skip("comparison")
            return
        self.watcher.step("comparison")
        write_comparison(self.folder, self.plan)
        self._state.record("comparison", _MATRIX_FILES, COMPARISON_FILES)

    def _report(self) -> None:
        inputs = (COMPARISON, *_MATRIX_FILES)
        if self._state.is_done("report", inputs, REPORT_FILES):
            self._skip("report")
            return
        self.watcher.step("report")
        write_report(self.folder)
        self._state.record("report", inputs, REPORT_FILES)

    def _skip(self, title: str) -> None:
        self.skipped.append(title)
        self.watcher.step(f"{title}: already done")

    def _is_here(self, step: MatrixStep) -> bool:
        matrix = self._found(step)
        return matrix is not None and is_done(matrix)

    def _found(self, step: MatrixStep) -> ScoreMatrix | None:
        path = self.folder / step.file_name
        return found_matrix(path, self._spec(step), request_sha256(self._workload), self.watcher.line)

    def _spec(self, step: MatrixStep) -> ClientMatrixSpec:
        return matrix_spec(self.plan, step, self._workload, self.target_folder)
