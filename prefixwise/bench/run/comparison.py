"""The comparison of two backends: row by row, then each backend's best, then which of the two.

PyTorch's scores are the reference: a row of JAX counts only where its scores are near enough to them, and a row of
PyTorch counts as it is. Deltas are JAX's metrics less PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prefixwise.bench.files import now_utc, read_artifact, sha256_of
from prefixwise.bench.kinds.base import BackendName, EvaluationView
from prefixwise.bench.kinds.comparison.model import (
    COMPARED,
    COMPARISON_VERSION,
    MISSING,
    BestNativeView,
    Comparison,
    Correctness,
    PortableRow,
    PortableView,
    QuotedRow,
)
from prefixwise.bench.kinds.comparison.rules import (
    best_of,
    correctness_of,
    deltas_of,
    recommendations,
    winner_of,
)
from prefixwise.bench.kinds.score_matrix import MatrixRow, ScoreMatrix, quoted
from prefixwise.bench.rules import Bounds
from prefixwise.bench.server_facts import hardware_name, is_contradiction, is_other_backend
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

    def row(self, size: int) -> MatrixRow | None:
        """The row of the sweep with this chunk size."""
        return next((row for row in self.matrix.results if row.client_chunk_size == size), None)

    def selected(self) -> MatrixRow | None:
        """The row behind the final recommendation, None where there is none. Raises ArtifactError.

        The matrix quotes it without its scores, which are with the row itself.
        """
        summary = self.matrix.summary
        final, confirmed = summary.final_recommendation.selected, summary.confirm_recommendation.selected
        if final is None:
            return None
        rows = self.matrix.confirm_results if final == confirmed else self.matrix.results
        size = final.client_chunk_size
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
    """Notes where the server reports another backend or setting than the file declares."""
    matrix = file.matrix
    found = [note for note in matrix.notes if is_contradiction(note)]
    reported = _fact(matrix, "backend")
    if is_other_backend(reported, matrix.backend) and not any("declared backend" in note for note in found):
        found.append(f"called {matrix.backend}, but its server said backend = {reported}")
    return [f"{file.name}: {note}" for note in found]


def _differences(files: list[MatrixFile]) -> list[str]:
    """One note for each fact that the files do not share."""
    notes = []
    for fact in ("dtype", "hardware", "model"):
        values = {file.name: _fact(file.matrix, fact) for file in files}
        known = {name: value for name, value in values.items() if value is not None}
        if len(set(map(str, known.values()))) > 1:
            reported = ", ".join(f"{value} for {name}" for name, value in known.items())
            notes.append(f"{fact} differs: {reported}")
    return notes


def _fact(matrix: ScoreMatrix, name: str) -> Any:
    hardware: Mapping[str, Any] = matrix.hardware
    if name == "hardware":
        return hardware_name(hardware)
    if name == "model":
        return matrix.server_config.get("model") or matrix.server_config.get("model_path")
    return hardware.get(name) or matrix.server_config.get(name)


def compare(inputs: ComparisonInputs, options: Bounds) -> Comparison:
    """Raises ArtifactError where a matrix recommends a row that it does not have."""
    portable = _portable_view(inputs, options)
    native = _best_native_view(inputs, options)
    return Comparison(
        schema_version=COMPARISON_VERSION,
        generated_at_utc=now_utc(),
        portable_view=portable,
        best_native_view=native,
        correctness=_all_correctness(portable, native, options),
        recommendations=recommendations(portable, native),
        notes=[*inputs.notes, *_correctness_notes(portable, native)],
        inputs={f"{name}_json": str(file.path) for name, file in inputs.files.items()},
        inputs_sha256={f"{name}_json": file.sha256 for name, file in inputs.files.items()},
    )


def _portable_view(inputs: ComparisonInputs, options: Bounds) -> PortableView:
    jax, pytorch = inputs.jax_portable, inputs.pytorch_portable
    sizes = sorted({row.client_chunk_size for file in (jax, pytorch) for row in file.matrix.results})
    rows = [_portable_row(size, jax.row(size), pytorch.row(size), options) for size in sizes]
    correct = {row.client_chunk_size for row in rows if row.correctness.passed}
    ratio = options.guardrail_ratio
    trusted = [row for row in jax.matrix.results if row.client_chunk_size in correct]
    return PortableView(
        guardrail_ratio=ratio,
        rows=rows,
        backend_best={
            "jax": best_of("jax", trusted, ratio),
            "pytorch": best_of("pytorch", pytorch.matrix.results, ratio),
        },
        winner=winner_of(trusted, pytorch.matrix.results, ratio),
    )


def _portable_row(size: int, jax: MatrixRow | None, pytorch: MatrixRow | None, options: Bounds) -> PortableRow:
    return PortableRow(
        client_chunk_size=size,
        jax=_cited(jax),
        pytorch=_cited(pytorch),
        correctness=correctness_of(jax, pytorch, options),
        deltas=deltas_of(jax, pytorch),
    )


def _cited(row: MatrixRow | None) -> QuotedRow | None:
    return cast("QuotedRow | None", quoted(row))


def _whole(row: MatrixRow | None) -> QuotedRow | None:
    """With its runs and scores, as the earlier system's comparisons have it."""
    return None if row is None else cast("QuotedRow", row.model_dump())


def _best_native_view(inputs: ComparisonInputs, options: Bounds) -> BestNativeView:
    """The chunk sizes may differ: each backend as it is best."""
    jax, pytorch = inputs.jax_best_native.selected(), inputs.pytorch_best_native.selected()
    correctness = correctness_of(jax, pytorch, options)
    ratio = options.guardrail_ratio
    return BestNativeView(
        guardrail_ratio=ratio,
        jax_selected=_whole(jax),
        pytorch_selected=_whole(pytorch),
        correctness=correctness,
        deltas=deltas_of(jax, pytorch),
        winner=winner_of([jax] if jax and correctness.passed else [], [pytorch] if pytorch else [], ratio),
    )


def _all_correctness(portable: PortableView, native: BestNativeView, options: Bounds) -> dict[str, Any]:
    """Of all rows that both backends have, of which there must be some, and of the best-native ones."""
    judged = [row.correctness for row in portable.rows if row.correctness.status != MISSING]
    return {
        "thresholds": {"max_abs_diff": options.max_abs_diff, "mean_abs_diff": options.mean_abs_diff},
        "rows_compared": len(judged),
        "rows_passed": sum(each.passed for each in judged),
        "pass": bool(judged) and all(each.passed for each in judged) and native.correctness.passed,
    }


def _correctness_notes(portable: PortableView, native: BestNativeView) -> list[str]:
    found = [(f"chunk size {row.client_chunk_size}", row.correctness) for row in portable.rows]
    found.append(("best native", native.correctness))
    return [f"correctness, {where}: {_fault(each)}" for where, each in found if not each.passed]


def _fault(found: Correctness) -> str:
    return found.detail or found.status if found.status == COMPARED else f"{found.status}, {found.detail}"
