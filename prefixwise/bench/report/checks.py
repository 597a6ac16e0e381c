"""Can the figures be trusted? The correctness gates, and how steady the runs were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prefixwise.bench.artifacts import Comparison, Correctness, MatrixRow, PortableRow, QuotedRow
from prefixwise.bench.comparison.inputs import MatrixFile
from prefixwise.bench.report.agreement import Agreement, agreement, judged_scores, thresholds
from prefixwise.bench.report.comparison import P95
from prefixwise.bench.report.document import NONE, Block, Cell, Paragraph, table
from prefixwise.bench.report.inputs import BACKEND_NAMES, BACKENDS, VIEW_NAMES, ReportInputs
from prefixwise.bench.report.numbers import change_percent, difference, figure, percent, ratio, share
from prefixwise.bench.report.races import THROUGHPUT

_STEADY_PERCENT = 10.0
_GATE: Mapping[Agreement, str] = {
    "agree": "The gate passed.",
    "differ": "The gate FAILED.",
    "not compared": "The gate is open: a view has no scores of both backends.",
}


def correctness_gates(comparison: Comparison) -> tuple[Block, ...]:
    """Each row against the bounds."""
    largest, mean = (NONE if bound is None else f"{bound:g}" for bound in thresholds(comparison))
    rows = [
        _gate_cells(f"chunk size {row.client_chunk_size}", row.correctness) for row in comparison.portable_view.rows
    ]
    rows.append(_gate_cells("best native", comparison.best_native_view.correctness))
    words = (
        f"{_GATE[agreement(comparison)]} PyTorch's scores are the reference; a score may be "
        f"at most {largest} from it, and all of a row at most {mean} on average."
    )
    header = (
        "row",
        f"max diff (at most {largest})",
        f"mean diff (at most {mean})",
        "scores compared",
        "gate",
        "detail",
    )
    return (Paragraph(words), *table("Correctness gates: |JAX - PyTorch|", header, rows))


def _gate_cells(where: str, found: Correctness) -> list[Cell | str]:
    detail = NONE if found.status == "compared" else found.detail or NONE
    gate = judged_scores(found)
    return [
        where,
        difference(found.max_abs_diff),
        difference(found.mean_abs_diff),
        f"{found.num_compared:,}",
        gate,
        detail,
    ]


def stability(inputs: ReportInputs) -> tuple[Block, ...]:
    """Which runs worked, what failed and why, first runs, and whether the confirm phase found the same."""
    rows = inputs.comparison.portable_view.rows
    header = ("chunk size (items)", "JAX runs ok", "PyTorch runs ok", "JAX first run", "PyTorch first run")
    steady = [[str(row.client_chunk_size), *_steady(row)] for row in rows]
    return (
        Paragraph("First run: the time of the first timed run over the mean of the others; 1.00x is no penalty."),
        *table("Runs of the portable sweep", header, steady),
        *_failures(inputs),
        *_confirmations(inputs.distinct_matrices()),
    )


def _steady(row: PortableRow) -> list[Cell | str]:
    sides: list[QuotedRow] = [side or {} for side in (row.jax, row.pytorch)]
    return [*map(_success, sides), *(ratio(side.get("first_run_penalty_ratio")) for side in sides)]


def _success(row: QuotedRow) -> Cell | str:
    if "timed_runs" not in row:
        return NONE
    good, runs = row.get("successful_runs", 0), row["timed_runs"]
    return Cell(share(good, runs), "plain" if good == runs else "bad")


def _failures(inputs: ReportInputs) -> tuple[Block, ...]:
    """From the matrices, which have the server's own words; else from what the comparison quotes."""
    rows = [cells for file in inputs.distinct_matrices() for cells in _failures_of(file)]
    if not inputs.matrices:
        rows = list(_quoted_failures(inputs.comparison))
    if not rows:
        return (Paragraph("No timed run failed."),)
    return table("Failures by row", ("row", "reasons", "first of them, in the server's words"), rows, numeric=False)


def _failures_of(file: MatrixFile) -> Iterable[tuple[str, str, str]]:
    for phase, rows in (("", file.matrix.results), (", confirm", file.matrix.confirm_results)):
        for row in rows:
            if row.failure_reason_counts:
                detail = next((run.failure_detail for run in row.run_records if run.failure_detail), None)
                where = f"{_name(file)}{phase}, chunk size {row.client_chunk_size}"
                yield where, _reasons(row.failure_reason_counts), detail or NONE


def _quoted_failures(comparison: Comparison) -> Iterable[tuple[str, str, str]]:
    for row in comparison.portable_view.rows:
        for backend, side in zip(BACKENDS, (row.jax, row.pytorch), strict=True):
            if side and side.get("failure_reason_counts"):
                where = f"{BACKEND_NAMES[backend]} portable, chunk size {row.client_chunk_size}"
                yield where, _reasons(side["failure_reason_counts"]), NONE


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {reason.replace('_', ' ')}" for reason, count in counts.items())


def _confirmations(files: Iterable[MatrixFile]) -> tuple[Block, ...]:
    """The same size, measured twice: how far apart?"""
    rows = [[where, *_twice(before, again)] for where, before, again in _measured_twice(files)]
    header = ("row", "sweep items/s", "confirm items/s", "change", "sweep p95 (ms)", "confirm p95 (ms)", "change")
    return table("Confirm phase against the sweep", header, rows)


def unsteady(files: Iterable[MatrixFile]) -> str:
    """A sentence where the confirm phase found quite another throughput than the sweep, else nothing."""
    changes = [
        (change, where)
        for where, before, again in _measured_twice(files)
        if (change := change_percent(again.throughput_items_sec, before.throughput_items_sec)) is not None
    ]
    change, where = max(changes, key=lambda each: abs(each[0]), default=(0.0, ""))
    if abs(change) <= _STEADY_PERCENT:
        return ""
    return (
        f"Take the figures with care: measured again, {where} had {percent(change)} throughput, so the machine was "
        "not steady."
    )


def _measured_twice(files: Iterable[MatrixFile]) -> Iterator[tuple[str, MatrixRow, MatrixRow]]:
    for file in files:
        for again in file.matrix.confirm_results:
            before = file.row(again.client_chunk_size)
            if before is not None:
                yield f"{_name(file)}, chunk size {again.client_chunk_size}", before, again


def _twice(before: MatrixRow, again: MatrixRow) -> list[str]:
    cells = []
    for metric in (THROUGHPUT, P95):
        old, new = getattr(before, metric), getattr(again, metric)
        cells += [figure(old), figure(new), percent(change_percent(new, old))]
    return cells


def _name(file: MatrixFile) -> str:
    return f"{BACKEND_NAMES[file.matrix.backend]} {VIEW_NAMES[file.matrix.evaluation_view]}"
