"""The tables of a comparison's report: both backends side by side, gates, stability, where JAX is better and worse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwise.bench.kinds.base import BACKEND_NAMES, BACKENDS, VIEW_NAMES
from prefixwise.bench.kinds.comparison.inputs import ReportInputs
from prefixwise.bench.kinds.comparison.model import COMPARED, Comparison, Correctness, PortableRow, QuotedRow
from prefixwise.bench.kinds.comparison.verdict import (
    Agreement,
    agreement,
    agreement_card,
    agreement_sentence,
    correctness_state,
    judged_scores,
    race_card,
    race_sentence,
    races,
    thresholds,
)
from prefixwise.bench.kinds.score_matrix import P50, P95, THROUGHPUT, MatrixRow
from prefixwise.bench.render.document import NONE, Block, Card, Cell, Paragraph, table
from prefixwise.bench.render.numbers import change_percent, difference, percent, ratio, share, short_number
from prefixwise.bench.run.comparison import MatrixFile

METRICS = {THROUGHPUT: ("throughput", "items/s"), P50: ("p50 latency", "ms"), P95: ("p95 latency", "ms")}
_COLUMNS = {THROUGHPUT: ("items/s", "items/s"), P50: ("p50 (ms)", "p50"), P95: ("p95 (ms)", "p95")}


def statements(inputs: ReportInputs) -> tuple[str, ...]:
    """The verdict of the comparison as sentences."""
    comparison = inputs.comparison
    return (*map(race_sentence, races(inputs)), agreement_sentence(comparison), _reliability(comparison))


def _reliability(comparison: Comparison) -> str:
    good, runs = run_counts(comparison)
    if not runs:
        return f"{_row_counts(comparison)} of the sweep worked in every run."
    if good == runs:
        return f"All {runs} timed runs of the sweep worked."
    return f"{runs - good} of {runs} timed runs of the sweep failed; the rows they belong to cannot win."


def run_counts(comparison: Comparison) -> tuple[int, int]:
    """Runs of the portable sweep that worked, and all of them."""
    rows = [row for each in comparison.portable_view.rows for row in (each.jax, each.pytorch) if row]
    return sum(row.get("successful_runs", 0) for row in rows), sum(row.get("timed_runs", 0) for row in rows)


def _row_counts(comparison: Comparison) -> str:
    """For a comparison of the earlier system, which quotes success rates and no counts."""
    rows = [row for each in comparison.portable_view.rows for row in (each.jax, each.pytorch) if row]
    return f"{sum(row.get('success_rate') == 1.0 for row in rows)} of {len(rows)} rows"


def selected(comparison: Comparison) -> dict[str, Any]:
    """The best-native rows by backend."""
    native = comparison.best_native_view
    return {"jax": native.jax_selected, "pytorch": native.pytorch_selected}


def cards(inputs: ReportInputs) -> tuple[Card, ...]:
    """The main results."""
    portable, native = races(inputs)
    good, runs = run_counts(inputs.comparison)
    return (
        race_card("Same client", portable),
        race_card("Each at its best", native),
        agreement_card(inputs.comparison),
        Card(
            "Runs that worked",
            f"{good / runs:.0%}" if runs else NONE,
            f"{good} of {runs} timed runs" if runs else f"{_row_counts(inputs.comparison)} without a failure",
            "plain" if good == runs else "bad",
        ),
    )


def portable_table(comparison: Comparison, metrics: Sequence[str] = tuple(METRICS)) -> tuple[Block, ...]:
    """A row for each chunk size."""
    header = ["chunk size (items)"]
    for column, name in (_COLUMNS[metric] for metric in metrics):
        header += [f"JAX {column}", f"PyTorch {column}", f"{name} change"]
    header += ["max score diff", "mean score diff", "scores"]
    rows = [_portable_cells(row, metrics) for row in comparison.portable_view.rows]
    sides = [side for row in comparison.portable_view.rows for side in (row.jax, row.pytorch) if side]
    partial = any(side.get("status") == "partial_failure" for side in sides)
    caption = "Portable view: the same client, the same chunks. Change is JAX against PyTorch."
    caption += " (4/5): of 4 runs of 5, the rest failed." if partial else ""
    return table(caption, header, rows)


def _portable_cells(row: PortableRow, metrics: Sequence[str]) -> list[Cell | str]:
    jax: Mapping[str, Any] = row.jax or {}
    pytorch: Mapping[str, Any] = row.pytorch or {}
    cells: list[Cell | str] = [str(row.client_chunk_size)]
    for metric in metrics:
        for side in (jax, pytorch):
            cells.append(_throughput_cell(side) if metric == THROUGHPUT else short_number(side.get(metric)))
        cells.append(percent(change_percent(jax.get(metric), pytorch.get(metric))))
    return [
        *cells,
        difference(row.correctness.max_abs_diff),
        difference(row.correctness.mean_abs_diff),
        judged_scores(row.correctness),
    ]


def _throughput_cell(row: Mapping[str, Any]) -> Cell | str:
    """The throughput; with the number of successful runs where some failed."""
    if row.get("status") == "failed":
        return Cell("failed", "bad")
    if row.get("status") == "partial_failure":
        return f"{short_number(row.get(THROUGHPUT))} ({row.get('successful_runs')}/{row.get('timed_runs')})"
    return short_number(row.get(THROUGHPUT))


def native_table(comparison: Comparison) -> tuple[Block, ...]:
    """Each backend at its best."""
    rows = selected(comparison)
    jax: Mapping[str, Any] = rows["jax"] or {}
    pytorch: Mapping[str, Any] = rows["pytorch"] or {}
    sizes = [str(row.get("client_chunk_size", NONE)) for row in (jax, pytorch)]
    lines = [["chunk size (items)", *sizes, NONE]]
    for metric, (name, unit) in METRICS.items():
        values = (jax.get(metric), pytorch.get(metric))
        lines.append([f"{name} ({unit})", *map(short_number, values), percent(change_percent(*values))])
    if jax.get("usd_per_run") is not None or pytorch.get("usd_per_run") is not None:
        values = (jax.get("items_per_usd"), pytorch.get("items_per_usd"))
        lines.append(["items per USD", *map(short_number, values), percent(change_percent(*values))])
    block = table("Best native view: each backend with its own settings.", ("", "JAX", "PyTorch", "change"), lines)
    return (*block, Paragraph(f"Scores of the two selected rows: {_phrase(comparison.best_native_view.correctness)}."))


def _phrase(found: Correctness) -> str:
    state = {"agree": "pass", "differ": "FAIL", "not compared": "not compared"}[correctness_state(found)]
    return f"{state}, {found.detail or found.status}"


_EQUAL = 0.05  # percent


_REMARKS = {"differ": "scores are not within bounds", "not compared": "scores were not compared"}


@dataclass(frozen=True)
class Finding:
    """One metric at one place, of both backends."""

    where: str
    metric: str
    jax: float
    pytorch: float
    remark: str

    @property
    def change(self) -> float:
        return change_percent(self.jax, self.pytorch) or 0.0

    @property
    def gain(self) -> float:
        """Positive where JAX is better: more throughput, or less latency."""
        return self.change if self.metric == THROUGHPUT else -self.change

    def cells(self) -> tuple[str, ...]:
        name, unit = METRICS[self.metric]
        metrics = (f"{short_number(self.jax)} {unit}", f"{short_number(self.pytorch)} {unit}", percent(self.change))
        return (self.where, name, *metrics, self.remark or NONE)


def findings(comparison: Comparison) -> list[Finding]:
    """Every metric that both have, largest difference first."""
    found = [each for row in comparison.portable_view.rows for each in _of_row(row)]
    native = selected(comparison)
    found += _pairs("best native", native["jax"], native["pytorch"], comparison.best_native_view.correctness)
    return sorted(found, key=lambda each: -abs(each.change))


def _of_row(row: PortableRow) -> Iterator[Finding]:
    yield from _pairs(f"chunk size {row.client_chunk_size}", row.jax, row.pytorch, row.correctness)


def _pairs(
    where: str, jax: Mapping[str, Any] | None, pytorch: Mapping[str, Any] | None, scores: Correctness
) -> list[Finding]:
    """Metrics of both backends; the remark says why one does not count."""
    jax, pytorch = jax or {}, pytorch or {}
    remarks = [_REMARKS[state]] if (state := correctness_state(scores)) in _REMARKS else []
    for backend, row in zip(BACKENDS, (jax, pytorch), strict=True):
        if row and row.get("status", "ok") != "ok":
            remarks.append(f"some runs of {BACKEND_NAMES[backend]} failed")
    return [
        Finding(where, metric, jax[metric], pytorch[metric], "; ".join(remarks))
        for metric in METRICS
        if jax.get(metric) is not None and pytorch.get(metric)
    ]


def better_and_worse(comparison: Comparison) -> tuple[Block, ...]:
    """Tables of the metrics in which JAX is better and worse."""
    found = [each for each in findings(comparison) if abs(each.change) >= _EQUAL]
    better = [each for each in found if each.gain > 0]
    worse = [each for each in found if each.gain < 0]
    header = ("where", "metric", "JAX", "PyTorch", "change", "remark")
    phrase = (
        f"Of {len(found)} metrics that differ, JAX is better in {len(better)} and worse in {len(worse)}. "
        "Largest difference first; more throughput is better, less latency is better."
    )
    return (
        Paragraph(phrase if found else "The two differ in no metric."),
        *table("Where JAX is better", header, [each.cells() for each in better], numeric=False),
        *table("Where JAX is worse", header, [each.cells() for each in worse], numeric=False),
    )


_STEADY_PERCENT = 10.0


_GATE: Mapping[Agreement, str] = {
    "agree": "The gate passed.",
    "differ": "The gate FAILED.",
    "not compared": "The gate is open: a view has no scores of both backends.",
}


def correctness_gates(comparison: Comparison) -> tuple[Block, ...]:
    """A table of each row's score differences against the bounds."""
    largest, mean = (NONE if bound is None else f"{bound:g}" for bound in thresholds(comparison))
    rows = [
        _gate_cells(f"chunk size {row.client_chunk_size}", row.correctness) for row in comparison.portable_view.rows
    ]
    rows.append(_gate_cells("best native", comparison.best_native_view.correctness))
    phrase = (
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
    return (Paragraph(phrase), *table("Correctness gates: |JAX - PyTorch|", header, rows))


def _gate_cells(where: str, found: Correctness) -> list[Cell | str]:
    detail = NONE if found.status == COMPARED else found.detail or NONE
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
    """From the matrices, which have the server's messages; else from what the comparison quotes."""
    rows = [cells for file in inputs.distinct_matrices() for cells in _failures_of(file)]
    if not inputs.matrices:
        rows = list(_quoted_failures(inputs.comparison))
    if not rows:
        return (Paragraph("No timed run failed."),)
    return table("Failures by row", ("row", "reasons", "first of them, the server's message"), rows, numeric=False)


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
    """Rows that were measured twice, side by side."""
    rows = [[where, *_twice(before, again)] for where, before, again in _measured_twice(files)]
    header = ("row", "sweep items/s", "confirm items/s", "change", "sweep p95 (ms)", "confirm p95 (ms)", "change")
    return table("Confirm phase against the sweep", header, rows)


def unsteady(files: Iterable[MatrixFile]) -> str:
    """A sentence where the confirm phase has a very different throughput than the sweep; else empty."""
    changes = [
        (change, where)
        for where, before, again in _measured_twice(files)
        if (change := change_percent(again.throughput_items_sec, before.throughput_items_sec)) is not None
    ]
    change, where = max(changes, key=lambda each: abs(each[0]), default=(0.0, ""))
    if abs(change) <= _STEADY_PERCENT:
        return ""
    return (
        f"Take the metrics with care: measured again, {where} had {percent(change)} throughput, so the machine was "
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
        cells += [short_number(old), short_number(new), percent(change_percent(new, old))]
    return cells


def _name(file: MatrixFile) -> str:
    return f"{BACKEND_NAMES[file.matrix.backend]} {VIEW_NAMES[file.matrix.evaluation_view]}"
