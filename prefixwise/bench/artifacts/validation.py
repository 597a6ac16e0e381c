"""What validation finds: an endpoint's evaluation, multi vs serial, parity, gates, many models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from prefixwise.bench.artifacts.base import Artifact, Scores

MODEL_MATRIX_VERSION: Literal["model_matrix_v1"] = "model_matrix_v1"


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
    failures: dict[str, str] = Field(default_factory=dict)  # item counts that have no performance, and why


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

    model: str | None = None
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
