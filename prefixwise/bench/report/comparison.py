"""The heart of the report: the verdict, and the two backends side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixwise.bench.artifacts import Comparison, Correctness, PortableRow
from prefixwise.bench.report.agreement import (
    agreement_card,
    agreement_sentence,
    correctness_state,
    judged_scores,
)
from prefixwise.bench.report.document import NONE, Block, Card, Cell, Paragraph, table
from prefixwise.bench.report.inputs import ReportInputs
from prefixwise.bench.report.numbers import change_percent, difference, figure, percent
from prefixwise.bench.report.races import THROUGHPUT, race_card, race_sentence, races

P50 = "p50_total_e2e_ms"
P95 = "p95_total_e2e_ms"
METRICS = {THROUGHPUT: ("throughput", "items/s"), P50: ("p50 latency", "ms"), P95: ("p95 latency", "ms")}


def statements(inputs: ReportInputs) -> tuple[str, ...]:
    """What the comparison comes to, in plain words."""
    comparison = inputs.comparison
    return (*map(race_sentence, races(inputs)), agreement_sentence(comparison), _reliability(comparison))


def _reliability(comparison: Comparison) -> str:
    good, runs = run_counts(comparison)
    if good == runs:
        return f"All {runs} timed runs of the sweep worked."
    return f"{runs - good} of {runs} timed runs of the sweep failed; the rows they belong to cannot win."


def run_counts(comparison: Comparison) -> tuple[int, int]:
    """Runs of the portable sweep that worked, and all of them."""
    rows = [row for each in comparison.portable_view.rows for row in (each.jax, each.pytorch) if row]
    return sum(row.get("successful_runs", 0) for row in rows), sum(row.get("timed_runs", 0) for row in rows)


def selected(comparison: Comparison) -> dict[str, Any]:
    """The best-native rows by backend."""
    native = comparison.best_native_view
    return {"jax": native.jax_selected, "pytorch": native.pytorch_selected}


def cards(inputs: ReportInputs) -> tuple[Card, ...]:
    """What people look for first."""
    portable, native = races(inputs)
    good, runs = run_counts(inputs.comparison)
    return (
        race_card("Same client", portable),
        race_card("Each at its best", native),
        agreement_card(inputs.comparison),
        Card(
            "Runs that worked",
            f"{good / runs:.0%}" if runs else NONE,
            f"{good} of {runs} timed runs",
            "plain" if good == runs else "bad",
        ),
    )


def portable_table(comparison: Comparison) -> tuple[Block, ...]:
    """A row for each chunk size."""
    header = ["chunk size (items)"]
    for unit, name in (("items/s", "items/s"), ("p50 (ms)", "p50"), ("p95 (ms)", "p95")):
        header += [f"JAX {unit}", f"PyTorch {unit}", f"{name} change"]
    header += ["max score diff", "mean score diff", "scores"]
    rows = [_portable_cells(row) for row in comparison.portable_view.rows]
    sides = [side for row in comparison.portable_view.rows for side in (row.jax, row.pytorch) if side]
    partial = any(side.get("status") == "partial_failure" for side in sides)
    caption = "Portable view: the same client, the same chunks. Change is JAX against PyTorch."
    caption += " (4/5): of 4 runs of 5, the others failed." if partial else ""
    return table(caption, header, rows)


def _portable_cells(row: PortableRow) -> list[Cell | str]:
    jax: Mapping[str, Any] = row.jax or {}
    pytorch: Mapping[str, Any] = row.pytorch or {}
    cells: list[Cell | str] = [str(row.client_chunk_size)]
    for metric in METRICS:
        for side in (jax, pytorch):
            cells.append(_throughput(side) if metric == THROUGHPUT else figure(side.get(metric)))
        cells.append(percent(change_percent(jax.get(metric), pytorch.get(metric))))
    return [
        *cells,
        difference(row.correctness.max_abs_diff),
        difference(row.correctness.mean_abs_diff),
        judged_scores(row.correctness),
    ]


def _throughput(row: Mapping[str, Any]) -> Cell | str:
    """With how many runs it is of, where some failed."""
    if row.get("status") == "failed":
        return Cell("failed", "bad")
    if row.get("status") == "partial_failure":
        return f"{figure(row.get(THROUGHPUT))} ({row.get('successful_runs')}/{row.get('timed_runs')})"
    return figure(row.get(THROUGHPUT))


def native_table(comparison: Comparison) -> tuple[Block, ...]:
    """Each backend at its best."""
    rows = selected(comparison)
    jax: Mapping[str, Any] = rows["jax"] or {}
    pytorch: Mapping[str, Any] = rows["pytorch"] or {}
    sizes = [str(row.get("client_chunk_size", NONE)) for row in (jax, pytorch)]
    lines = [["chunk size (items)", *sizes, NONE]]
    for metric, (name, unit) in METRICS.items():
        values = (jax.get(metric), pytorch.get(metric))
        lines.append([f"{name} ({unit})", *map(figure, values), percent(change_percent(*values))])
    if jax.get("usd_per_run") is not None or pytorch.get("usd_per_run") is not None:
        values = (jax.get("items_per_usd"), pytorch.get("items_per_usd"))
        lines.append(["items per USD", *map(figure, values), percent(change_percent(*values))])
    block = table("Best native view: each backend with its own settings.", ("", "JAX", "PyTorch", "change"), lines)
    return (*block, Paragraph(f"Scores of the two selected rows: {_words(comparison.best_native_view.correctness)}."))


def _words(found: Correctness) -> str:
    state = {"agree": "pass", "differ": "FAIL", "not compared": "not compared"}[correctness_state(found)]
    return f"{state}, {found.detail or found.status}"
