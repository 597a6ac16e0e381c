"""The matrices of a comparison: which files, whether they belong together, and what about them differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixwise.bench.artifacts import BackendName, EvaluationView, MatrixRow, ScoreMatrix
from prefixwise.bench.files import read_artifact, sha256_of
from prefixwise.bench.hardware import hardware_name
from prefixwise.bench.server_config import is_contradiction, is_other_backend
from prefixwise.contract.errors import ArtifactError


@dataclass(frozen=True, eq=False)
class MatrixFile:
    """A score matrix and where it is from."""

    path: Path
    sha256: str
    matrix: ScoreMatrix

    @property
    def name(self) -> str:
        return f"{self.matrix.backend} {self.matrix.evaluation_view} ({self.path.name})"

    def describe(self) -> dict[str, str]:
        """For the artifact."""
        return {"path": str(self.path), "sha256": self.sha256}

    def row(self, size: int) -> MatrixRow | None:
        """Of the sweep."""
        return next((row for row in self.matrix.results if row.client_chunk_size == size), None)

    def selected(self) -> MatrixRow | None:
        """The row behind the final recommendation, None where there is none. Raises ArtifactError.

        The matrix quotes it without its scores, which are with the row itself.
        """
        summary = self.matrix.summary
        if summary.final_recommendation is None:
            return None
        is_confirmed = summary.final_recommendation == summary.confirm_recommendation
        rows = self.matrix.confirm_results if is_confirmed else self.matrix.results
        size = summary.final_recommendation.get("client_chunk_size")
        for row in rows:
            if row.client_chunk_size == size:
                return row
        raise ArtifactError(f"{self.path} recommends chunk size {size}, but has no such row")


@dataclass(frozen=True)
class ComparisonInputs:
    """One matrix of each backend in each view; a portable one may stand in for its best-native one."""

    jax_portable: MatrixFile
    pytorch_portable: MatrixFile
    jax_best_native: MatrixFile
    pytorch_best_native: MatrixFile
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, MatrixFile]:
        names = ("jax_portable", "pytorch_portable", "jax_best_native", "pytorch_best_native")
        return {name: getattr(self, name) for name in names}


def read_inputs(
    jax_portable: Path, pytorch_portable: Path, jax_best_native: Path | None, pytorch_best_native: Path | None
) -> ComparisonInputs:
    """Raises ArtifactError where a file is no matrix, of the wrong backend, or of another workload than the first."""
    notes: list[str] = []
    jax = _read(jax_portable, "jax", "portable", notes)
    pytorch = _read(pytorch_portable, "pytorch", "portable", notes)
    jax_native = _read(jax_best_native, "jax", "best_native", notes) if jax_best_native else jax
    pytorch_native = _read(pytorch_best_native, "pytorch", "best_native", notes) if pytorch_best_native else pytorch
    for native, portable in ((jax_native, jax), (pytorch_native, pytorch)):
        if native is portable:
            backend = portable.matrix.backend
            notes.append(f"no best-native matrix of {backend} was given: its portable one stands in for it")
    files = list(dict.fromkeys((jax, pytorch, jax_native, pytorch_native)))
    for file in files[1:]:
        _check_same_workload(jax, file)
    notes.extend(note for file in files for note in _contradictions(file))
    notes.extend(_differences(files))
    return ComparisonInputs(jax, pytorch, jax_native, pytorch_native, tuple(notes))


def _read(path: Path, backend: BackendName, view: EvaluationView, notes: list[str]) -> MatrixFile:
    matrix = read_artifact(path, ScoreMatrix)
    if matrix.backend != backend:
        raise ArtifactError(f"{path}: expected a matrix of {backend}, got one of {matrix.backend}")
    file = MatrixFile(path, sha256_of(path), matrix)
    if matrix.evaluation_view != view:
        notes.append(f"{path.name} was measured as {matrix.evaluation_view} and is used as {view}")
    if not matrix.complete:
        notes.append(f"the sweep of {file.name} is not finished")
    return file


def _check_same_workload(first: MatrixFile, other: MatrixFile) -> None:
    """By the request's own checksum where both have it: the file's changes with the time at which it was made."""
    one, two = first.matrix.workload_ref, other.matrix.workload_ref
    both_know = one.request_sha256 is not None and two.request_sha256 is not None
    before, now = (one.request_sha256, two.request_sha256) if both_know else (one.sha256, two.sha256)
    if before != now:
        raise ArtifactError(
            f"{first.path} and {other.path} are of different workloads and cannot be compared: sha256 {before} "
            f"({one.path}, {one.request_id}) and {now} ({two.path}, {two.request_id})"
        )


def _contradictions(file: MatrixFile) -> list[str]:
    """Where the server said something else than what it was called; a label alone proves nothing."""
    matrix = file.matrix
    found = [note for note in matrix.notes if is_contradiction(note)]
    told = _fact(matrix, "backend")
    if is_other_backend(told, matrix.backend) and not any("declared backend" in note for note in found):
        found.append(f"called {matrix.backend}, but its server said backend = {told}")
    return [f"{file.name}: {note}" for note in found]


def _differences(files: list[MatrixFile]) -> list[str]:
    """One note for each fact that the files do not share."""
    notes = []
    for fact in ("dtype", "hardware", "model"):
        values = {file.name: _fact(file.matrix, fact) for file in files}
        known = {name: value for name, value in values.items() if value is not None}
        if len(set(map(str, known.values()))) > 1:
            told = ", ".join(f"{value} for {name}" for name, value in known.items())
            notes.append(f"{fact} differs: {told}")
    return notes


def _fact(matrix: ScoreMatrix, name: str) -> Any:
    hardware: Mapping[str, Any] = matrix.hardware
    if name == "hardware":
        return hardware_name(hardware)
    if name == "model":
        return matrix.server_config.get("model") or matrix.server_config.get("model_path")
    return hardware.get(name) or matrix.server_config.get(name)
