"""The gates of several models: `validate models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.gate_report import GateReport, check_gate_report
from prefixwise.bench.render.document import Block, Cell, bullets, judged, table

MODEL_MATRIX_VERSION: Literal["model_matrix_v1"] = "model_matrix_v1"


class ModelRow(Artifact):
    """One model of `validate models`: its metrics, or why it has none."""

    model: str
    status: Literal["pass", "fail", "error"]
    reason: str | None
    same_length_isolation_max: float | None = None
    changed_length_isolation_max: float | None = None
    delimiter_aligned_equivalence_max: float | None = None
    jax_serial_vs_torch_serial_max: float | None = None
    jax_multi_vs_torch_multi_semantic_max: float | None = None
    speedups: dict[str, float] = Field(default_factory=dict)
    gate: GateReport | None = None
    artifacts: dict[str, str] = Field(default_factory=dict)


class ModelMatrix(Artifact):
    """`validate models`: rows are added as models are done, so a short list is that of a run that was cut short."""

    schema_version: Literal["model_matrix_v1"]
    generated_at_utc: str
    models: list[str]
    rows: list[ModelRow]
    all_pass: bool


def check_model_matrix(matrix: ModelMatrix, found: Findings) -> None:
    """Every model has a row, and every row the status of its gates."""
    for index, row in enumerate(matrix.rows):
        _check_row(row, f"rows[{index}]", found)
        if row.model not in matrix.models:
            found.fail(f"rows[{index}].model", f"one of {', '.join(matrix.models)}", row.model)
    missing = [model for model in matrix.models if model not in {row.model for row in matrix.rows}]
    if missing:
        found.warn("rows", "a row for every model", f"none for {', '.join(missing)}")
    if matrix.all_pass:
        failed = [row.model for row in matrix.rows if row.status != "pass"]
        found.same("all_pass", not (failed or missing), True, f"not passed: {', '.join(failed + missing) or 'none'}")


def _check_row(row: ModelRow, where: str, found: Findings) -> None:
    if row.gate is not None:
        check_gate_report(row.gate, found, f"{where}.gate.")
        found.same(f"{where}.status", "pass" if row.gate.all_pass else "fail", row.status, "by its gates")
    if row.status != "pass":
        found.warn(f"{where}.status", "pass", f"{row.status}: {row.reason}")


_SHOWN_COUNTS = ("8", "32", "128")  # of the report; where none of them was measured, whatever was


_NOTHING = "-"


def table_headers(rows: Sequence[ModelRow]) -> list[str]:
    """The column headers; between the model and the result there are metrics."""
    return [
        "Model",
        "Same-len isolation max",
        "Changed-len isolation max",
        "Delimiter-aligned equiv max",
        "JAX serial vs torch serial max",
        "JAX multi vs torch multi-sem max",
        *(f"Speedup N={count}" for count in _counts(rows)),
        "Result",
    ]


def table_cells(rows: Sequence[ModelRow]) -> list[list[str]]:
    """The cells of each model."""
    counts = _counts(rows)
    return [[row.model, *_metrics(row), *_speedups(row, counts), row.status] for row in rows]


def _counts(rows: Sequence[ModelRow]) -> list[str]:
    measured = sorted({count for row in rows for count in row.speedups}, key=int)
    return [count for count in measured if count in _SHOWN_COUNTS] or measured


def _metrics(row: ModelRow) -> list[str]:
    metrics = (
        row.same_length_isolation_max,
        row.changed_length_isolation_max,
        row.delimiter_aligned_equivalence_max,
        row.jax_serial_vs_torch_serial_max,
        row.jax_multi_vs_torch_multi_semantic_max,
    )
    return [_NOTHING if metric is None else _difference(metric) for metric in metrics]


def _difference(metric: float) -> str:
    """Four digits as in the earlier report; small differences in exponent notation."""
    return f"{metric:.1e}" if 0 < metric < 0.00005 else f"{metric:.4f}"


def _speedups(row: ModelRow, counts: Sequence[str]) -> list[str]:
    return [f"{row.speedups[count]:.2f}x" if count in row.speedups else _NOTHING for count in counts]


def model_blocks(matrix: ModelMatrix) -> tuple[Block, ...]:
    """The table of `validate models`, and why a model failed."""
    reached = {row.model for row in matrix.rows}
    reasons = [f"{row.model}: {row.status}: {row.reason}" for row in matrix.rows if row.reason]
    reasons += [f"{model}: not run" for model in matrix.models if model not in reached]
    return (*models_table(matrix), *bullets(reasons))


def models_table(matrix: ModelMatrix) -> tuple[Block, ...]:
    """A row for each model."""
    rows: list[tuple[Cell | str, ...]] = [
        (*cells, judged(row.status == "pass", bad=row.status.upper()))
        for row, (*cells, _) in zip(matrix.rows, table_cells(matrix.rows), strict=True)
    ]
    return table("Models, each against its own bounds", table_headers(matrix.rows), rows)
