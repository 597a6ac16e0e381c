"""The inputs of a comparison's report: the comparison, the matrices behind it as far as they are found, and extras.

A missing matrix costs some of the report, not all of it: a note reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prefixwise.bench.files import read_artifact, sha256_of
from prefixwise.bench.kinds.ab import AbResult, backend_of_variants
from prefixwise.bench.kinds.base import BACKENDS, VIEW_NAMES, BackendName, EvaluationView
from prefixwise.bench.kinds.comparison.model import Comparison
from prefixwise.bench.kinds.extras import ExtraInputs
from prefixwise.bench.kinds.gate_report import GateReport
from prefixwise.bench.kinds.load import LoadResult, backend_of_load
from prefixwise.bench.kinds.model_matrix import ModelMatrix
from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial
from prefixwise.bench.kinds.named import read_distinct, read_named
from prefixwise.bench.kinds.parity import Parity
from prefixwise.bench.kinds.quantization import QuantizationCheck
from prefixwise.bench.kinds.score_matrix import MatrixRow, ScoreMatrix
from prefixwise.bench.kinds.workload import Workload
from prefixwise.bench.run.comparison import MatrixFile
from prefixwise.contract.errors import ArtifactError


@dataclass(frozen=True)
class ReportPaths:
    """The files that the caller names."""

    comparison: Path
    multi_vs_serial: tuple[Path, ...] = ()
    parity: tuple[Path, ...] = ()
    gate: tuple[Path, ...] = ()
    ab: tuple[Path, ...] = ()
    load: tuple[Path, ...] = ()
    model_matrix: tuple[Path, ...] = ()
    quantization: tuple[Path, ...] = ()
    output_report: Path | None = None
    output_html: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ReportInputs(ExtraInputs):
    """All inputs, read. `matrices`: those that were found, by backend and view, like `jax_portable`."""

    paths: ReportPaths
    comparison: Comparison
    matrices: Mapping[str, MatrixFile]
    workload: Workload | None = None
    notes: list[str] = field(default_factory=list)

    def matrix(self, backend: BackendName, view: EvaluationView) -> MatrixFile | None:
        return self.matrices.get(f"{backend}_{view}")

    def distinct_matrices(self) -> list[MatrixFile]:
        """The matrices, each once: a portable one may stand in for the best-native one."""
        return list({file.path: file for file in self.matrices.values()}.values())

    def selected(self, backend: BackendName) -> MatrixRow | None:
        """The best row of this backend, with its runs."""
        file = self.matrix(backend, "best_native") or self.matrix(backend, "portable")
        try:
            return None if file is None else file.selected()
        except ArtifactError:
            return None

    def is_confirmed(self, backend: BackendName) -> bool:
        """Is the best row of this backend one of the confirm phase?"""
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
        quantization=read_named(paths.quantization, QuantizationCheck),
        notes=notes,
    )


def _read_matrices(comparison: Comparison, folder: Path, notes: list[str]) -> dict[str, MatrixFile]:
    found: dict[str, MatrixFile] = {}
    recorded = comparison.input_files()
    for name in (f"{backend}_{view}" for view in VIEW_NAMES for backend in BACKENDS):
        entry = recorded.get(name)
        if entry is None:
            notes.append(f"the comparison does not say which matrix is {name}: its runs and set-up are not shown")
            continue
        path = find_file(entry.path, folder)
        try:
            if path is None:
                raise ArtifactError(f"{entry.path} is neither in {folder} nor where the comparison says")
            found[name] = MatrixFile(path, sha256_of(path), read_artifact(path, ScoreMatrix))
        except ArtifactError as error:
            notes.append(f"{name}: {error}; its runs and set-up are not shown")
        else:
            notes.extend(_changed(found[name], entry.sha256))
    return found


def _changed(file: MatrixFile, before: str | None) -> list[str]:
    if before in (None, file.sha256):
        return []
    return [f"{file.path.name} has changed since it was compared: its sha256 was {before} and is {file.sha256}"]


def _read_workload(matrices: Mapping[str, MatrixFile], folder: Path, notes: list[str]) -> Workload | None:
    """The workload, whose seed the commands need; None where it is not found."""
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
    """The recorded path, or a file of that name beside the comparison; None where there is neither."""
    name = Path(recorded)
    candidates = (folder / name, name, folder / name.name)
    return next((path for path in candidates if path.is_file()), None)
