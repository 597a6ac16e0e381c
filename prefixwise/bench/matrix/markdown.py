"""A score matrix for people, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prefixwise.bench.artifacts import MatrixRow, MatrixSummary, ScoreMatrix

_NONE = "-"


def matrix_markdown(matrix: ScoreMatrix) -> str:
    """What was measured, every row, what is recommended, what went wrong."""
    shape = matrix.workload
    parts = [
        f"# Score matrix: {matrix.backend}, {matrix.evaluation_view} view",
        f"{shape.num_items} items of {shape.item_tokens} tokens after {shape.query_tokens} query tokens, "
        f"model `{shape.model}`, request `{matrix.workload_ref.request_id}`, {matrix.generated_at_utc}."
        + ("" if matrix.complete else " **The sweep is not finished.**"),
        _recommendation(matrix.summary),
        "## Sweep",
        _rows_table(matrix.results),
    ]
    if matrix.confirm_results:
        parts += ["## Confirmed", _rows_table(matrix.confirm_results)]
    parts += _section("Failures", _failures([*matrix.results, *matrix.confirm_results]))
    parts += ["## Server", _facts_table({**matrix.hardware, **matrix.server_config})]
    parts += _section("Notes", matrix.notes)
    return "\n\n".join(parts) + "\n"


def number(value: float | None, digits: int = 1) -> str:
    """A dash where there is none."""
    return _NONE if value is None else f"{value:,.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, figures to the right. A bar in a cell would end it."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _recommendation(summary: MatrixSummary) -> str:
    row = summary.final_recommendation
    if row is None:
        those = "none" if summary.sweep_recommendation is None else "of those measured again none"
        return f"**No chunk size can be recommended: {those} worked in every run.**"
    return (
        f"**Recommended: chunk size {row['client_chunk_size']}**, {number(row['throughput_items_sec'])} items/s, "
        f"p95 {number(row['p95_total_e2e_ms'])} ms."
    )


def _rows_table(rows: Sequence[MatrixRow]) -> str:
    header = ("chunk size", "chunks", "runs ok", "items/s", "p50 ms", "p95 ms", "call ms", "first run", "items/USD")
    return table(header, map(_cells, rows))


def _cells(row: MatrixRow) -> list[str]:
    return [
        str(row.client_chunk_size),
        str(row.num_chunks),
        f"{row.successful_runs}/{row.timed_runs}",
        number(row.throughput_items_sec),
        number(row.p50_total_e2e_ms),
        number(row.p95_total_e2e_ms),
        number(row.mean_chunk_call_ms),
        _NONE if row.first_run_penalty_ratio is None else f"{row.first_run_penalty_ratio:.2f}x",
        number(row.items_per_usd, 0),
    ]


def _failures(rows: Sequence[MatrixRow]) -> list[str]:
    """One line for each row that had some, with the words of its first one."""
    lines = []
    for row in rows:
        details = [record.failure_detail for record in row.run_records if record.failure_detail]
        if details:
            counts = ", ".join(f"{count} x {reason}" for reason, count in row.failure_reason_counts.items())
            lines.append(f"chunk size {row.client_chunk_size}: {counts}; {details[0]}")
    return lines


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {' '.join(line.split())}" for line in lines)] if lines else []


def _facts_table(facts: Mapping[str, Any]) -> str:
    """Nested ones as they are: they are for those who look."""
    return table(("fact", "value"), ([key, f"`{value}`"] for key, value in sorted(facts.items())))
