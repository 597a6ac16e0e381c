"""The score matrix: a sweep over the client's chunk sizes. Its model, the rules for its rows, its report.

throughput        items / mean total time
first-run penalty the first timed run over the mean of the rest
eligible          success rate 1.0, and p95 and throughput exist (in a comparison its correctness gate passes, too)
guardrail         p95 within 1.25 x the best eligible p95
winner            highest throughput within the guardrail; on a tie the smaller chunk
confirm           chunk 1, the winner, and its two neighbours among the sizes that worked
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from prefixwise.bench.kinds.base import (
    BACKEND_NAMES,
    VIEW_NAMES,
    Artifact,
    BackendName,
    EvaluationView,
    FailureReason,
    RowStatus,
    Scores,
    date_of,
)
from prefixwise.bench.kinds.chunk_size_charts import SizePoint, p95_of, throughput_of
from prefixwise.bench.render.document import NONE, Block, Card, Cell, Charts, Report, Section, bullets, table
from prefixwise.bench.render.numbers import milliseconds, ratio, short_number
from prefixwise.bench.rules import DEFAULT_BOUNDS, GUARDRAIL_RATIO, Bounds, first_run_penalty, mean, percentile

MATRIX_VERSION: Literal["score_matrix_v1"] = "score_matrix_v1"


Milliseconds = Annotated[float, Field(ge=0)]


class RunRecord(Artifact):
    """One run of a row: all chunks of the workload, one after the other."""

    run_index: int
    ok: bool
    total_e2e_ms: Milliseconds | None
    call_latencies_ms: list[Milliseconds]
    failure_reason: FailureReason | None
    failure_detail: str | None


class MatrixRow(Artifact):
    """One chunk size. Metrics are None where no run succeeded."""

    client_chunk_size: int = Field(ge=1)
    num_chunks: int = Field(ge=1)
    timed_runs: int = Field(ge=1)
    successful_runs: int = Field(ge=0)
    success_rate: float = Field(ge=0, le=1)
    status: RowStatus
    p50_total_e2e_ms: Milliseconds | None
    p95_total_e2e_ms: Milliseconds | None
    mean_total_e2e_ms: Milliseconds | None
    mean_chunk_call_ms: Milliseconds | None
    p95_chunk_call_ms: Milliseconds | None
    throughput_items_sec: float | None = Field(ge=0)
    first_run_penalty_ratio: float | None
    failure_reason_counts: dict[str, int]
    usd_per_run: float | None
    items_per_usd: float | None
    reference_scores: Scores | None
    run_records: list[RunRecord]


class WorkloadRef(Artifact):
    """Which workload it was."""

    path: str
    sha256: str
    request_id: str
    request_sha256: str | None = None  # stays when the same workload is made again, as the file's own does not


class WorkloadShape(Artifact):
    """Its geometry."""

    model: str
    query_tokens: int
    num_items: int = Field(ge=1)
    item_tokens: int
    label_token_ids: list[int]


class CorrectnessThresholds(Artifact):
    """How far scores may be from the reference."""

    max_abs_diff: float = Field(ge=0)
    mean_abs_diff: float = Field(ge=0)


class SelectedRow(Artifact):
    """The row that a phase recommends, with the metrics that decide."""

    client_chunk_size: int = Field(ge=1)
    throughput_items_sec: float | None = Field(default=None, ge=0)
    p95_total_e2e_ms: Milliseconds | None = None
    success_rate: float | None = Field(default=None, ge=0, le=1)


class Recommendation(Artifact):
    """What a phase recommends. `selected` is None where no row is eligible."""

    eligible_count: int | None = None
    guardrail_ratio: float | None = None
    guardrail_p95_ms: Milliseconds | None = None  # the highest p95 that may win
    selected: SelectedRow | None
    notes: list[str] = Field(default_factory=list)


def _nested(found: object) -> object:
    """The recommendation of a matrix of prefixwise 0.1, which was the row alone, or None."""
    if found is None:
        return {"selected": None}
    is_row = isinstance(found, Mapping) and "selected" not in found and "client_chunk_size" in found
    return {"selected": found} if is_row else found


AnyRecommendation = Annotated[
    Recommendation, BeforeValidator(_nested, json_schema_input_type=Recommendation | SelectedRow | None)
]


class MatrixSummary(Artifact):
    """What the sweep and the confirm phase recommend, and which of the two counts."""

    guardrail_ratio: float = Field(ge=1)  # below 1 not even the row with the best p95 would be within it
    sweep_recommendation: AnyRecommendation
    confirm_chunk_sizes: list[int]
    confirm_recommendation: AnyRecommendation
    final_recommendation: AnyRecommendation
    correctness_thresholds: CorrectnessThresholds


class ScoreMatrix(Artifact):
    """`*_matrix.json`."""

    schema_version: Literal["score_matrix_v1"]
    generated_at_utc: str
    backend: BackendName
    evaluation_view: EvaluationView
    hardware: dict[str, Any]
    server_config: dict[str, Any]
    workload_ref: WorkloadRef
    workload: WorkloadShape
    results: list[MatrixRow]
    confirm_results: list[MatrixRow]
    summary: MatrixSummary
    notes: list[str]
    arguments: dict[str, Any] | None = None  # of the sweep, so that only the same one is resumed
    complete: bool = True  # False while rows are missing


CONFIRM_RUNS = 7


def is_eligible(row: MatrixRow) -> bool:
    """May it be recommended?"""
    return row.success_rate == 1.0 and row.p95_total_e2e_ms is not None and row.throughput_items_sec is not None


def select_winner(
    rows: Iterable[MatrixRow],
    guardrail_ratio: float = GUARDRAIL_RATIO,
    is_correct: Callable[[MatrixRow], bool] | None = None,
) -> MatrixRow | None:
    """The row to recommend, None where none is eligible. `is_correct`: the gate of a comparison."""
    return select(rows, guardrail_ratio, is_correct).row


@dataclass(frozen=True)
class Selection:
    """The row to recommend, and what it was chosen from."""

    row: MatrixRow | None
    eligible_count: int
    guardrail_p95_ms: float | None  # None where no row is eligible


def select(
    rows: Iterable[MatrixRow],
    guardrail_ratio: float = GUARDRAIL_RATIO,
    is_correct: Callable[[MatrixRow], bool] | None = None,
) -> Selection:
    """Select the row with the highest throughput within the guardrail."""
    eligible = [row for row in rows if is_eligible(row) and (is_correct is None or is_correct(row))]
    if not eligible:
        return Selection(None, 0, None)
    limit = min(guardrail_ratio * min(row.p95_total_e2e_ms or 0.0 for row in eligible), sys.float_info.max)
    within = [row for row in eligible if (row.p95_total_e2e_ms or 0.0) <= limit]
    best = min(within, key=lambda row: (-(row.throughput_items_sec or 0.0), row.client_chunk_size))
    return Selection(best, len(eligible), limit)


def confirm_sizes(rows: Sequence[MatrixRow], winner: MatrixRow | None) -> list[int]:
    """The chunk sizes to measure again, ascending; empty without a winner."""
    if winner is None:
        return []
    worked = sorted({row.client_chunk_size for row in rows if row.success_rate == 1.0})
    place = worked.index(winner.client_chunk_size)
    neighbours = worked[max(0, place - 1) : place + 2]
    return sorted({*neighbours, *(size for size in worked if size == 1)})


_MS_PER_HOUR = 3_600_000.0
_SHORTEST_MS = 1e-9  # of a run: a shorter one, in a file, is none


BULKY_FIELDS = frozenset({"run_records", "reference_scores"})  # left out where a row is quoted


def num_chunks(num_items: int, chunk_size: int) -> int:
    """The number of chunks; a chunk larger than the workload holds all of it."""
    return -(-num_items // chunk_size)


def make_row(
    chunk_size: int,
    num_items: int,
    records: Sequence[RunRecord],
    reference_scores: Scores | None,
    usd_per_hour: float | None = None,
) -> MatrixRow:
    """A row from its records: metrics of the successful runs. `reference_scores`: of the first of them."""
    good = [record for record in records if record.ok]
    totals = [record.total_e2e_ms for record in good if record.total_e2e_ms is not None]
    calls = [latency for record in good for latency in record.call_latencies_ms]
    mean_total = mean(totals) if totals else None
    usd = mean_total / _MS_PER_HOUR * usd_per_hour if mean_total is not None and usd_per_hour is not None else None
    return MatrixRow(
        client_chunk_size=chunk_size,
        num_chunks=num_chunks(num_items, chunk_size),
        timed_runs=len(records),
        successful_runs=len(good),
        success_rate=len(good) / len(records),
        status=_status(len(good), len(records)),
        p50_total_e2e_ms=percentile(totals, 50) if totals else None,
        p95_total_e2e_ms=percentile(totals, 95) if totals else None,
        mean_total_e2e_ms=mean_total,
        mean_chunk_call_ms=mean(calls) if calls else None,
        p95_chunk_call_ms=percentile(calls, 95) if calls else None,
        throughput_items_sec=num_items / (mean_total / 1000) if mean_total and mean_total > _SHORTEST_MS else None,
        # Of a first run that failed nothing is known, and the second one is not the first.
        first_run_penalty_ratio=first_run_penalty(totals) if records[0].ok else None,
        failure_reason_counts=dict(sorted(Counter(r.failure_reason for r in records if r.failure_reason).items())),
        usd_per_run=usd,
        items_per_usd=num_items / usd if usd else None,
        reference_scores=reference_scores,
        run_records=list(records),
    )


def _status(successful: int, runs: int) -> RowStatus:
    if successful == runs:
        return "ok"
    return "partial_failure" if successful else "failed"


def quoted(row: MatrixRow | None) -> dict[str, Any] | None:
    """A row as others cite it: its metrics, without records and scores."""
    return None if row is None else row.model_dump(exclude=set(BULKY_FIELDS))


def summarise(
    results: Sequence[MatrixRow],
    confirm_results: Sequence[MatrixRow],
    *,
    confirms: bool,
    bounds: Bounds = DEFAULT_BOUNDS,
) -> MatrixSummary:
    """The summary of a sweep. `confirms`: the confirm phase was requested, and the sweep is done.

    What it found counts for more than the sweep once all of it is there, also where it found that nothing works.
    """
    ratio = bounds.guardrail_ratio
    swept, confirmed = recommend(results, ratio), recommend(confirm_results, ratio)
    measured_again = [row.client_chunk_size for row in confirm_results]
    sizes = confirm_sizes(results, select_winner(results, ratio)) if confirms else measured_again
    is_confirmed = bool(sizes) and set(sizes) <= set(measured_again)
    return MatrixSummary(
        guardrail_ratio=ratio,
        sweep_recommendation=swept,
        confirm_chunk_sizes=sizes,
        confirm_recommendation=confirmed,
        final_recommendation=confirmed if is_confirmed else swept,
        correctness_thresholds=CorrectnessThresholds(
            max_abs_diff=bounds.max_abs_diff, mean_abs_diff=bounds.mean_abs_diff
        ),
    )


def recommend(rows: Sequence[MatrixRow], guardrail_ratio: float = GUARDRAIL_RATIO) -> Recommendation:
    """The recommendation of a phase; a note says why there is none."""
    found = select(rows, guardrail_ratio)
    row = found.row
    metrics: dict[str, Any] = {name: getattr(row, name, None) for name in SelectedRow.model_fields}
    return Recommendation(
        eligible_count=found.eligible_count,
        guardrail_ratio=guardrail_ratio,
        guardrail_p95_ms=found.guardrail_p95_ms,
        selected=None if row is None else SelectedRow(**metrics),
        notes=["no chunk size worked in every run"] if rows and row is None else [],
    )


THROUGHPUT = "throughput_items_sec"


P50 = "p50_total_e2e_ms"


P95 = "p95_total_e2e_ms"


def matrix_points(rows: Iterable[MatrixRow], metric: str) -> list[SizePoint]:
    """The points of one backend's matrix, by chunk size."""
    return [
        SizePoint(
            row.client_chunk_size,
            getattr(row, metric),
            row.success_rate == 1.0,
            _reasons(row),
        )
        for row in sorted(rows, key=lambda each: each.client_chunk_size)
    ]


def matrix_report(matrix: ScoreMatrix, name: str = "") -> Report:
    """The recommendation, every row, the failures, the server."""
    shape, backend = matrix.workload, matrix.backend
    points = {metric: {backend: matrix_points(matrix.results, metric)} for metric in (THROUGHPUT, P95)}
    best = [point.value for point in points[P95][backend] if point.value is not None and point.complete]
    guardrail = matrix.summary.guardrail_ratio
    rails = {backend: guardrail * min(best) if best else None}
    charts = Charts((throughput_of(points[THROUGHPUT]), p95_of(points[P95], rails, guardrail)))
    failures = failure_lines([*matrix.results, *matrix.confirm_results])
    facts = [(key, Cell(str(value), "code")) for key, value in {**matrix.hardware, **matrix.server_config}.items()]
    confirmed = rows_table("Measured again", matrix.confirm_results)
    sections = [
        Section("Sweep", (charts, *rows_table("Every chunk size", matrix.results))),
        *([Section("Confirmed", confirmed)] if confirmed else []),
        *([Section("Failures", bullets(failures))] if failures else []),
        *([Section("Notes", bullets(matrix.notes))] if matrix.notes else []),
        Section("Server", table("As it was started", ("setting", "value"), facts, numeric=False)),
    ]
    title = f"Score matrix: {BACKEND_NAMES[backend]}, {VIEW_NAMES[matrix.evaluation_view]} view"
    measured = (
        f"{shape.num_items:,} items of {shape.item_tokens:,} tokens after {shape.query_tokens:,} query tokens, "
        f"model {shape.model}, request {matrix.workload_ref.request_id}."
    )
    unfinished = () if matrix.complete else ("The sweep is not finished.",)
    passed = None if matrix.summary.final_recommendation.selected is None else True
    statements = (measured, *unfinished, _recommendation(matrix.summary))
    return Report(title, date_of(matrix), passed, statements, _matrix_cards(matrix), tuple(sections))


def _recommendation(summary: MatrixSummary) -> str:
    row = summary.final_recommendation.selected
    if row is None:
        those = "none" if summary.sweep_recommendation.selected is None else "of those measured again none"
        return f"No chunk size can be recommended: {those} worked in every run."
    speed, p95 = f"{short_number(row.throughput_items_sec)} items/s", milliseconds(row.p95_total_e2e_ms)
    return f"Chunks of {row.client_chunk_size} are recommended: {speed}, p95 {p95}."


def _matrix_cards(matrix: ScoreMatrix) -> tuple[Card, ...]:
    row = matrix.summary.final_recommendation.selected
    if row is None:
        return ()
    chunk = f"in chunks of {row.client_chunk_size}"
    return (
        Card("Throughput", f"{short_number(row.throughput_items_sec)} items/s", chunk),
        Card("p95 latency", milliseconds(row.p95_total_e2e_ms), chunk),
    )


def rows_table(caption: str, rows: Sequence[MatrixRow]) -> tuple[Block, ...]:
    """Every row; costs and failures only where a row has some. Empty without rows."""
    columns: dict[str, list[Cell | str]] = {
        "chunk size": [str(row.client_chunk_size) for row in rows],
        "chunks": [str(row.num_chunks) for row in rows],
        "runs ok": [f"{row.successful_runs}/{row.timed_runs}" for row in rows],
        "items/s": [short_number(row.throughput_items_sec) for row in rows],
        "p50 (ms)": [short_number(row.p50_total_e2e_ms) for row in rows],
        "p95 (ms)": [short_number(row.p95_total_e2e_ms) for row in rows],
        "a call (ms)": [short_number(row.mean_chunk_call_ms) for row in rows],
        "first run": [ratio(row.first_run_penalty_ratio) for row in rows],
    }
    if any(row.items_per_usd is not None for row in rows):
        columns["items/USD"] = [short_number(row.items_per_usd) for row in rows]
    if any(row.failure_reason_counts for row in rows):
        columns["failures"] = [Cell(reasons, "bad") if (reasons := _reasons(row)) else NONE for row in rows]
    return table(caption, tuple(columns), list(zip(*columns.values(), strict=True)))


def _reasons(row: MatrixRow) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in row.failure_reason_counts.items())


def failure_lines(rows: Sequence[MatrixRow]) -> list[str]:
    """One line for each row with a failed run, with the message of its first one."""
    lines = []
    for row in rows:
        detail = next((run.failure_detail for run in row.run_records if run.failure_detail), None)
        if detail is not None:
            lines.append(f"chunk size {row.client_chunk_size}: {_reasons(row)}; {detail}")
    return lines
