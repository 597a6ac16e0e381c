"""Workloads, rows and matrices to work with: small, and with metrics one can check in one's head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefixwise.bench.files import now_utc, read_artifact, write_artifact
from prefixwise.bench.kinds.base import FailureReason, Scores
from prefixwise.bench.kinds.score_matrix import MatrixRow, RunRecord, ScoreMatrix, make_row, summarise
from prefixwise.bench.kinds.workload import (
    WORKLOAD_VERSION,
    TokenizerFacts,
    Workload,
    WorkloadRequest,
    checksum_key,
    request_checksum,
)
from prefixwise.bench.run.matrix import SweepOptions, choose_request, new_matrix

NUM_ITEMS = 6
SCORES: Scores = [[0.5, 0.5]] * NUM_ITEMS


def good_run(index: int, total_ms: float, calls: Sequence[float] = ()) -> RunRecord:
    return RunRecord(
        run_index=index,
        ok=True,
        total_e2e_ms=total_ms,
        call_latencies_ms=list(calls) or [total_ms],
        failure_reason=None,
        failure_detail=None,
    )


def bad_run(index: int, reason: FailureReason = "timeout", detail: str = "chunk 1 of 3: too late") -> RunRecord:
    return RunRecord(
        run_index=index,
        ok=False,
        total_e2e_ms=None,
        call_latencies_ms=[],
        failure_reason=reason,
        failure_detail=detail,
    )


def good_row(size: int, total_ms: float, scores: Scores | None = SCORES) -> MatrixRow:
    """Every run took the same time, so p50, p95 and mean are all `total_ms`."""
    return make_row(size, NUM_ITEMS, [good_run(0, total_ms), good_run(1, total_ms)], scores)


def bad_row(size: int) -> MatrixRow:
    return make_row(size, NUM_ITEMS, [bad_run(0), bad_run(1)], None)


def shifted(amount: float) -> Scores:
    return [[score + amount for score in row] for row in SCORES]


def small_workload(num_items: int = NUM_ITEMS, labels: Sequence[int] = (3, 5), first_token: int = 10) -> Workload:
    request = WorkloadRequest(
        request_id="canonical_score_request_000",
        query_token_ids=[7, 8, 9],
        items_token_ids=[[first_token + index, 20 + index] for index in range(num_items)],
        label_token_ids=list(labels),
        apply_softmax=True,
        item_first=False,
    )
    return Workload(
        schema_version=WORKLOAD_VERSION,
        generated_at_utc=now_utc(),
        model="fake-model",
        query_tokens=3,
        num_items=num_items,
        item_tokens=2,
        delimiter_token_id=1,
        label_token_ids=list(labels),
        tokenizer=TokenizerFacts(name_or_path="fake-model", vocab_size=512, special_token_ids=[0, 1]),
        safe_token_pool=[],
        requests=[request],
        checksums={checksum_key(request.request_id): request_checksum(request.model_dump())},
    )


def write_workload(path: Path, **how: Any) -> Path:
    write_artifact(path, small_workload(**how))
    return path


def begun_matrix(workload_path: Path, options: SweepOptions) -> ScoreMatrix:
    """Without rows."""

    workload = read_artifact(workload_path, Workload)
    return new_matrix(workload_path, workload, choose_request(workload, None), options)


def write_matrix(
    path: Path,
    options: SweepOptions,
    rows: Sequence[MatrixRow],
    confirmed: Sequence[MatrixRow] = (),
    *,
    hardware: dict[str, Any] | None = None,
    first_token: int = 10,
) -> Path:
    """A finished one; those with the same `first_token` are of the same workload."""
    workload = write_workload(path.with_suffix(".workload.json"), first_token=first_token)
    matrix = begun_matrix(workload, options)
    summary = summarise(rows, confirmed, confirms=bool(confirmed))
    update = {"results": list(rows), "confirm_results": list(confirmed), "summary": summary, "complete": True}
    write_artifact(path, matrix.model_copy(update={**update, "hardware": hardware or {}}))
    return path
