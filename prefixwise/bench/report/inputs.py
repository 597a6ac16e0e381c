"""What a report is made from: the comparison, the matrices behind it as far as they can be found, and what else is
given. A matrix that is missing costs some of the report, not all of it: a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefixwise.bench.artifacts import (
    AbResult,
    BackendName,
    Comparison,
    EvaluationView,
    GateReport,
    LoadResult,
    MatrixRow,
    ModelMatrix,
    MultiVsSerial,
    Parity,
    ScoreMatrix,
    Workload,
)
from prefixwise.bench.comparison.inputs import MatrixFile
from prefixwise.bench.files import read_artifact, sha256_of
from prefixwise.bench.report.named import Named, backend_of_load, backend_of_variants, read_distinct, read_named
from prefixwise.contract.errors import ArtifactError

BACKENDS: tuple[BackendName, ...] = ("jax", "pytorch")
BACKEND_NAMES: Mapping[BackendName, str] = {"jax": "JAX", "pytorch": "PyTorch"}
VIEW_NAMES: Mapping[EvaluationView, str] = {"portable": "portable", "best_native": "best native"}


@dataclass(frozen=True)
class ReportPaths:
    """What the caller gives."""

    comparison: Path
    multi_vs_serial: tuple[Path, ...] = ()
    parity: tuple[Path, ...] = ()
    gate: tuple[Path, ...] = ()
    ab: tuple[Path, ...] = ()
    load: tuple[Path, ...] = ()
    model_matrix: tuple[Path, ...] = ()
    output_report: Path | None = None
    output_html: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ExtraInputs:
    """What may be given beside a comparison, or shown without one."""

    multi_vs_serial: Sequence[Named[MultiVsSerial]] = ()
    parity: Sequence[Named[Parity]] = ()
    gate: Sequence[Named[GateReport]] = ()
    ab: Sequence[Named[AbResult]] = ()
    load: Sequence[Named[LoadResult]] = ()
    model_matrix: Sequence[Named[ModelMatrix]] = ()


@dataclass(frozen=True, kw_only=True)
class ReportInputs(ExtraInputs):
    """All of it, read. `matrices` has those that could be: by backend and view, `jax_portable` and so on."""

    paths: ReportPaths
    comparison: Comparison
    matrices: Mapping[str, MatrixFile]
    workload: Workload | None = None
    notes: list[str] = field(default_factory=list)

    def matrix(self, backend: BackendName, view: EvaluationView) -> MatrixFile | None:
        return self.matrices.get(f"{backend}_{view}")

    def distinct_matrices(self) -> list[MatrixFile]:
        """A portable one that stands in for the best-native one counts once."""
        return list({file.path: file for file in self.matrices.values()}.values())

    def selected(self, backend: BackendName) -> MatrixRow | None:
        """With its runs: the row that is this backend's best."""
        file = self.matrix(backend, "best_native") or self.matrix(backend, "portable")
        try:
            return None if file is None else file.selected()
        except ArtifactError:
            return None

    def is_confirmed(self, backend: BackendName) -> bool:
        """Is the row that is this backend's best one of the confirm phase?"""
        file, row = self.matrix(backend, "best_native"), self.selected(backend)
        return file is not None and any(each is row for each in file.matrix.confirm_results)


def read_report_inputs(paths: ReportPaths) -> ReportInputs:
    """Raises ArtifactError for what the caller names; what only the comparison names may be missing."""
    comparison = read_artifact(paths.comparison, Comparison)
    notes: list[str] = []
    matrices = _read_matrices(comparison, paths.comparison.parent, notes)
    return ReportInputs(
        paths=paths,
        comparison=comparison,
        matrices=matrices,
        workload=_read_workload(matrices, paths.comparison.parent, notes),
        multi_vs_serial=read_distinct(paths.multi_vs_serial, MultiVsSerial),
        parity=read_distinct(paths.parity, Parity),
        gate=read_distinct(paths.gate, GateReport),
        ab=read_named(paths.ab, AbResult, backend_of_variants),
        load=read_named(paths.load, LoadResult, backend_of_load),
        model_matrix=read_named(paths.model_matrix, ModelMatrix),
        notes=notes,
    )


def _read_matrices(comparison: Comparison, folder: Path, notes: list[str]) -> dict[str, MatrixFile]:
    found: dict[str, MatrixFile] = {}
    for name in (f"{backend}_{view}" for view in VIEW_NAMES for backend in BACKENDS):
        entry = comparison.inputs.get(name)
        recorded = entry.get("path") if isinstance(entry, Mapping) else entry
        if not isinstance(recorded, str):
            notes.append(f"the comparison does not say which matrix is {name}: its runs and set-up are not shown")
            continue
        path = find_file(recorded, folder)
        try:
            if path is None:
                raise ArtifactError(f"{recorded} is neither in {folder} nor where the comparison says")
            found[name] = MatrixFile(path, sha256_of(path), read_artifact(path, ScoreMatrix))
        except ArtifactError as error:
            notes.append(f"{name}: {error}; its runs and set-up are not shown")
        else:
            notes.extend(_changed(found[name], entry))
    return found


def _changed(file: MatrixFile, entry: Any) -> list[str]:
    before = entry.get("sha256") if isinstance(entry, Mapping) else None
    if before in (None, file.sha256):
        return []
    return [f"{file.path.name} has changed since it was compared: its sha256 was {before} and is {file.sha256}"]


def _read_workload(matrices: Mapping[str, MatrixFile], folder: Path, notes: list[str]) -> Workload | None:
    """Only the commands need it: how it was made is in no other file."""
    for file in matrices.values():
        path = find_file(file.matrix.workload_ref.path, folder)
        if path is None:
            notes.append(
                f"the workload {file.matrix.workload_ref.path} was not found: the command for it lacks its seed"
            )
            return None
        try:
            return read_artifact(path, Workload)
        except ArtifactError as error:
            notes.append(str(error))
            return None
    return None


def find_file(recorded: str, folder: Path) -> Path | None:
    """As recorded from the working directory, or beside the comparison, where a folder that was moved has it."""
    name = Path(recorded)
    candidates = (folder / name, name, folder / name.name)
    return next((path for path in candidates if path.is_file()), None)
