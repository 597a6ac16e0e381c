"""The score matrix: a sweep over the client's chunk sizes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from prefixwise.bench.artifacts.base import Artifact, BackendName, EvaluationView, FailureReason, RowStatus, Scores

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
    """One chunk size. Figures are None where no run succeeded."""

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


class MatrixSummary(Artifact):
    """What the sweep recommends: rows without their records, or None where no row is eligible."""

    guardrail_ratio: float = Field(ge=1)  # below 1 not even the row with the best p95 would be within it
    sweep_recommendation: dict[str, Any] | None
    confirm_chunk_sizes: list[int]
    confirm_recommendation: dict[str, Any] | None
    final_recommendation: dict[str, Any] | None
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
