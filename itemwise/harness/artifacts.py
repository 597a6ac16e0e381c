"""The artifacts, field by field: what every program here writes and reads, and what others' tools read, too.

Field names are a contract with the programs of the earlier system. Fields that are not named here are allowed and kept.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

WORKLOAD_VERSION: Literal["canonical_score_workload_v1"] = "canonical_score_workload_v1"
MATRIX_VERSION: Literal["score_matrix_v1"] = "score_matrix_v1"
OPS_MATRIX_VERSION: Literal["1.0"] = "1.0"
COMPARISON_VERSION: Literal["cross_backend_comparison_v1"] = "cross_backend_comparison_v1"
SELF_CHECK_VERSION: Literal["score_self_check_v1"] = "score_self_check_v1"
MODEL_MATRIX_VERSION: Literal["model_matrix_v1"] = "model_matrix_v1"
LOAD_VERSION: Literal["score_load_v1"] = "score_load_v1"
AB_VERSION: Literal["score_ab_v1"] = "score_ab_v1"

BackendName = Literal["jax", "pytorch"]
EvaluationView = Literal["portable", "best_native"]
RowStatus = Literal["ok", "partial_failure", "failed"]
FailureReason = Literal["timeout", "http_error", "bad_json", "bad_response", "oom"]
Scores = list[list[float]]


class Artifact(BaseModel):
    """What all have in common: unknown fields stay, wrong types are errors."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


# The canonical workload


class TokenizerFacts(Artifact):
    """Where the token pool comes from."""

    name_or_path: str
    vocab_size: int = Field(ge=1)
    special_token_ids: list[int]


class WorkloadRequest(Artifact):
    """One request to `/v1/score`, in token ids."""

    request_id: str
    query_token_ids: list[int] = Field(min_length=1)
    items_token_ids: list[list[int]] = Field(min_length=1)
    label_token_ids: list[int] = Field(min_length=1)
    apply_softmax: bool
    item_first: bool


class Workload(Artifact):
    """`canonical_workload.json`: the same arguments give the same requests and checksums."""

    schema_version: Literal["canonical_score_workload_v1"]
    generated_at_utc: str
    model: str
    query_tokens: int = Field(ge=1)
    num_items: int = Field(ge=1)
    item_tokens: int = Field(ge=0)
    delimiter_token_id: int = Field(ge=0)
    label_token_ids: list[int] = Field(min_length=1)
    tokenizer: TokenizerFacts
    safe_token_pool: dict[str, Any] | list[int]
    requests: list[WorkloadRequest] = Field(min_length=1)
    checksums: dict[str, str]
    # Of ours; workloads of the earlier system do without.
    seed: int | None = None
    tokenizer_source: str | None = None  # in words: its own files, or what is known of the model
    notes: list[str] = Field(default_factory=list)


# The score matrix: a sweep over the client's chunk sizes


class RunRecord(Artifact):
    """One run of a row: all chunks of the workload, one after the other."""

    run_index: int
    ok: bool
    total_e2e_ms: float | None
    call_latencies_ms: list[float]
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
    p50_total_e2e_ms: float | None
    p95_total_e2e_ms: float | None
    mean_total_e2e_ms: float | None
    mean_chunk_call_ms: float | None
    p95_chunk_call_ms: float | None
    throughput_items_sec: float | None
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
    num_items: int
    item_tokens: int
    label_token_ids: list[int]


class CorrectnessThresholds(Artifact):
    """How far scores may be from the reference."""

    max_abs_diff: float
    mean_abs_diff: float


class MatrixSummary(Artifact):
    """What the sweep recommends: rows without their records, or None where no row is eligible."""

    guardrail_ratio: float
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


# The ops matrix: a sweep over the server's chunk sizes


class OpsRow(Artifact):
    """One chunk size of the server."""

    chunk_size: int = Field(ge=0)
    throughput_items_per_sec: float | None
    latency_p50_ms: float | None
    latency_p99_ms: float | None
    memory_peak_mb: float | None
    status: str
    error: str | None


class OpsServerConfig(Artifact):
    """How the servers were started."""

    model: str
    multi_item_mask_impl: str
    multi_item_segment_fallback_threshold: int


class OpsSummary(Artifact):
    """The best of it."""

    best_chunk_size: int | None
    best_throughput: float | None
    total_configs_tested: int
    successful_configs: int


class OpsMatrix(Artifact):
    """`matrix_results.json`."""

    schema_version: Literal["1.0"]
    backend: str
    hardware: str
    server_config: OpsServerConfig
    workload_ref: str
    results: list[OpsRow]
    summary: OpsSummary


class OpsRunMetadata(Artifact):
    """`run_metadata.json`: what it was run with; the earlier system does not say which of these it has."""

    model: str | None = None
    backend: str | None = None
    hardware: str | None = None
    workload_ref: str | None = None
    server_config: dict[str, Any] | None = None
    chunk_sizes: list[int] | None = None


# The comparison of two backends


class Correctness(Artifact):
    """Scores of one backend against the other's, which are the reference."""

    status: str
    max_abs_diff: float | None
    mean_abs_diff: float | None
    num_compared: int
    passed: bool = Field(alias="pass")
    detail: str | None

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, populate_by_name=True)


class PortableRow(Artifact):
    """One chunk size, side by side; None where a backend has no such row."""

    client_chunk_size: int
    jax: dict[str, Any] | None
    pytorch: dict[str, Any] | None
    correctness: Correctness
    deltas: dict[str, Any] | None = None  # JAX's figures against PyTorch's, None where one has none


class PortableView(Artifact):
    """The same client, the same chunks."""

    guardrail_ratio: float
    rows: list[PortableRow]
    backend_best: dict[str, Any]
    winner: dict[str, Any]


class BestNativeView(Artifact):
    """Each backend with its own settings."""

    jax_selected: dict[str, Any] | None
    pytorch_selected: dict[str, Any] | None
    correctness: Correctness
    winner: dict[str, Any]
    deltas: dict[str, Any] | None = None  # as in a portable row


class Comparison(Artifact):
    """`comparison.json`."""

    schema_version: Literal["cross_backend_comparison_v1"]
    generated_at_utc: str
    portable_view: PortableView
    best_native_view: BestNativeView
    correctness: dict[str, Any]
    recommendations: dict[str, Any]
    notes: list[str]
    inputs: dict[str, Any]


# The evaluation of an endpoint


class Mutation(Artifact):
    """One item changed: what became of the others."""

    mutated_index: int
    mutated_item_ids: list[list[int]]
    scores: Scores
    unchanged_item_abs_diffs: list[float]
    max_abs_diff_unchanged: float
    mean_abs_diff_unchanged: float


class Isolation(Artifact):
    """The same items, one of them changed."""

    query_ids: list[int]
    item_ids: list[list[int]]
    base_scores: Scores
    same_length_mutation: Mutation
    changed_length_mutation: Mutation


class CountPerformance(Artifact):
    """So many items at a time."""

    latencies_sec: list[float]
    p50_sec: float
    p95_sec: float
    items_per_sec_p50: float
    items_per_sec_p95: float


class SemanticAlignment(Artifact):
    """What a serial server says to the prompt that a multi-item server makes: query, delimiter, item."""

    query_plus_delimiter_ids: list[int]
    base_scores_query_plus_delimiter: Scores


class EndpointEvaluation(Artifact):
    """`validate endpoint`."""

    mode: Literal["multi", "serial"]
    url: str
    model: str
    labels: list[int]
    delimiter: int
    isolation: Isolation
    performance: dict[str, CountPerformance]
    semantic_alignment: SemanticAlignment | None = None
    generated_at_utc: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # what the inputs and runs follow from
    server_config: dict[str, Any] = Field(default_factory=dict)  # as the server tells it


class Equivalence(Artifact):
    """Two servers' scores of the same items."""

    max_abs_diff: float
    mean_abs_diff: float
    num_compared: int | None = None


class IsolationSummary(Artifact):
    """Of the multi-item server."""

    same_length_mutation_max_abs_diff: float
    changed_length_mutation_max_abs_diff: float
    same_length_mutation_mean_abs_diff: float | None = None
    changed_length_mutation_mean_abs_diff: float | None = None


class Speedup(Artifact):
    """So many items at a time, against one by one."""

    speedup_vs_serial_p50: float
    multi_p50_sec: float
    serial_p50_sec: float
    speedup_vs_serial_p95: float | None = None
    multi_items_per_sec_p50: float | None = None
    serial_items_per_sec_p50: float | None = None


class MultiVsSerial(Artifact):
    """`validate combine`, the first half."""

    model: str
    multi_url: str
    serial_url: str
    labels: list[int]
    equivalence: Equivalence
    equivalence_query_plus_delimiter: Equivalence
    isolation: IsolationSummary
    performance: dict[str, Speedup]
    generated_at_utc: str | None = None
    delimiter: int | None = None


class Parity(Artifact):
    """`validate combine`, the second half: against transformers on the same checkpoint."""

    model: str
    max_abs_diff_jax_serial_vs_torch_serial: float
    max_abs_diff_jax_multi_vs_torch_serial: float
    max_abs_diff_jax_multi_vs_torch_multi_semantic: float
    mean_abs_diff_jax_serial_vs_torch_serial: float | None = None
    mean_abs_diff_jax_multi_vs_torch_multi_semantic: float | None = None
    generated_at_utc: str | None = None
    labels: list[int] | None = None
    # The vectors behind the figures: what the two servers said, and what the reference says.
    jax_serial_scores: Scores | None = None
    jax_multi_scores: Scores | None = None
    torch_serial_scores: Scores | None = None
    torch_multi_semantic_scores: Scores | None = None
    reference: dict[str, Any] = Field(default_factory=dict)


class GateCheck(Artifact):
    """One figure against its bound; None where there is no figure."""

    field: str
    value: float | None
    comparison: Literal["<=", ">="]
    bound: float
    passed: bool = Field(alias="pass")
    detail: str | None

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, populate_by_name=True)


class GateReport(Artifact):
    """`validate gate`."""

    checks: dict[str, GateCheck]
    all_pass: bool


class ModelRow(Artifact):
    """One model of `validate models`: its figures, or why it has none."""

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


# A server under load


class LoadGeometry(Artifact):
    """What every request looks like."""

    query_tokens: int = Field(ge=1)
    num_items: int = Field(ge=1)
    item_tokens: int = Field(ge=0)
    label_token_ids: list[int] = Field(min_length=1)
    vocab_size: int = Field(ge=1)
    distinct_queries: int = Field(ge=0)  # 0: every request has its own


class Spread(Artifact):
    """How times are spread, in milliseconds."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    mean_ms: float


class Goodput(Artifact):
    """What was answered in time. An arrival that was dropped or failed is as one that came too late."""

    p99_bound_ms: float = Field(gt=0)
    requests_per_sec: float
    items_per_sec: float
    share_within_bound: float = Field(ge=0, le=1)  # of all arrivals
    bound_met: bool  # by the p99 of all arrivals


class LoadPhase(Artifact):
    """All arrivals of one phase, and what became of them. Figures are None where nothing was answered."""

    arrivals: int = Field(ge=0)
    sent: int = Field(ge=0)
    dropped: int = Field(ge=0)  # there were `max_in_flight` in flight already
    answered: int = Field(ge=0)
    errors_by_code: dict[str, int]
    send_sec: float = Field(ge=0)  # how long requests arrived
    wall_sec: float = Field(ge=0)  # until the last of them was answered, too
    qps_offered: float
    qps_sent: float
    qps_answered: float
    items_per_sec: float
    latency: Spread | None  # from the intended send time
    service_latency: Spread | None  # from the actual send
    sender_late: Spread | None  # from the intended send time to the actual one
    goodput: Goodput | None


class RateProbe(Artifact):
    """One rate of a search."""

    rate_qps: float
    p99_ms: float | None
    share_within_bound: float
    bound_met: bool


class LoadResult(Artifact):
    """`bench load`."""

    schema_version: Literal["score_load_v1"]
    generated_at_utc: str
    url: str
    server_config: dict[str, Any]
    geometry: LoadGeometry
    mode: Literal["open", "closed"]
    rate_qps: float | None
    concurrency: int | None
    seed: int
    timeout_sec: float
    max_in_flight: int
    client_overhead: Spread  # a call to a server that answers at once
    warmup: LoadPhase | None
    measured: LoadPhase
    rate_search: list[RateProbe]
    notes: list[str]


# Variants against each other on one machine


class ScoreDifferences(Artifact):
    """A variant's scores of the requests that the first variant scored, too."""

    max_abs_diff: float
    mean_abs_diff: float
    num_compared: int


class SpeedRatio(Artifact):
    """The first variant's time over this one's, paired by round: 2.0 is twice as fast. The interval is None with
    one round."""

    ratio: float
    low: float | None
    high: float | None
    confidence: float
    num_rounds: int


class AbRun(Artifact):
    """One timed run."""

    round_index: int
    place: int  # in the order of its round
    seconds: float


class AbVariant(Artifact):
    """One of those compared. Figures are None where it failed."""

    name: str
    server_flags: list[str]
    request_fields: dict[str, Any]
    server_config: dict[str, Any]
    status: Literal["ok", "failed"]
    failure: str | None
    median_ms: float | None
    p95_ms: float | None
    items_per_sec: float | None
    speed_vs_first: SpeedRatio | None
    scores_vs_first: ScoreDifferences | None
    scores_agree: bool
    runs: list[AbRun]


class AbResult(Artifact):
    """`bench ab`."""

    schema_version: Literal["score_ab_v1"]
    generated_at_utc: str
    model: str | None  # None: the embedded one
    compare: str
    geometry: LoadGeometry
    cached: bool
    rounds: int
    runs_per_round: int
    warmup_runs: int
    seed: int
    correctness_thresholds: CorrectnessThresholds
    variants: list[AbVariant]
    notes: list[str]


# The self-check


class SelfCheckStep(Artifact):
    """One command, and how it ended."""

    title: str
    command: str
    status: int  # of the process; 0: done
    seconds: float
    detail: str | None


class SelfCheck(Artifact):
    """`self_check.json`: everything above on this machine's own servers."""

    schema_version: Literal["score_self_check_v1"]
    generated_at_utc: str
    model: str
    backends: list[str]
    steps: list[SelfCheckStep]
    all_pass: bool
