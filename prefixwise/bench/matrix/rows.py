"""Rows of a score matrix, from the records of their runs; and what the rows recommend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prefixwise.bench.artifacts import CorrectnessThresholds, MatrixRow, MatrixSummary, RowStatus, RunRecord, Scores
from prefixwise.bench.rules import (
    GUARDRAIL_RATIO,
    MAX_ABS_DIFF,
    MEAN_ABS_DIFF,
    confirm_sizes,
    first_run_penalty,
    mean,
    percentile,
    select_winner,
)

_MS_PER_HOUR = 3_600_000.0
BULKY_FIELDS = frozenset({"run_records", "reference_scores"})  # left out where a row is quoted


def num_chunks(num_items: int, chunk_size: int) -> int:
    """A chunk that is larger than the workload holds all of it."""
    return -(-num_items // chunk_size)


def make_row(
    chunk_size: int,
    num_items: int,
    records: Sequence[RunRecord],
    reference_scores: Scores | None,
    usd_per_hour: float | None = None,
) -> MatrixRow:
    """Figures are of the runs that succeeded. `reference_scores`: those of the first of them."""
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
        throughput_items_sec=num_items / (mean_total / 1000) if mean_total else None,
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
    """A row as others cite it: its figures, without records and scores."""
    return None if row is None else row.model_dump(exclude=set(BULKY_FIELDS))


def summarise(results: Sequence[MatrixRow], confirm_results: Sequence[MatrixRow], *, confirms: bool) -> MatrixSummary:
    """`confirms`: whether the confirm phase is due: it was asked for, and the sweep that it follows from is done.

    What it found counts for more than the sweep once all of it is there, also where it found that nothing works.
    """
    swept, confirmed = select_winner(results), select_winner(confirm_results)
    measured_again = [row.client_chunk_size for row in confirm_results]
    sizes = confirm_sizes(results, swept) if confirms else measured_again
    is_confirmed = bool(sizes) and set(sizes) <= set(measured_again)
    return MatrixSummary(
        guardrail_ratio=GUARDRAIL_RATIO,
        sweep_recommendation=quoted(swept),
        confirm_chunk_sizes=sizes,
        confirm_recommendation=quoted(confirmed),
        final_recommendation=quoted(confirmed if is_confirmed else swept),
        correctness_thresholds=CorrectnessThresholds(max_abs_diff=MAX_ABS_DIFF, mean_abs_diff=MEAN_ABS_DIFF),
    )
