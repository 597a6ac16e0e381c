"""The comparison of two backends, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from prefixwise.bench.kinds.base import Artifact

COMPARISON_VERSION: Literal["cross_backend_comparison_v1"] = "cross_backend_comparison_v1"


Count = Annotated[int, Field(ge=0)]


ChunkSize = Annotated[int, Field(ge=1)]


NumberOrNone = Annotated[float, Field(ge=0)] | None


class Correctness(Artifact):
    """Scores of one backend against the other's, which are the reference."""

    status: str
    max_abs_diff: float | None
    mean_abs_diff: float | None
    num_compared: int
    passed: bool = Field(alias="pass")
    detail: str | None

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, populate_by_name=True)


@with_config(ConfigDict(extra="allow", strict=True, allow_inf_nan=False))
class QuotedRow(TypedDict, total=False):
    """A row of a matrix as it is cited: a mapping of which nothing need be there, but what is there can be drawn.

    Other tools cite fewer metrics, or more.
    """

    client_chunk_size: ChunkSize
    num_chunks: Count
    timed_runs: Count
    successful_runs: Count
    success_rate: NumberOrNone
    status: str
    p50_total_e2e_ms: NumberOrNone
    p95_total_e2e_ms: NumberOrNone
    mean_total_e2e_ms: NumberOrNone
    mean_chunk_call_ms: NumberOrNone
    p95_chunk_call_ms: NumberOrNone
    throughput_items_sec: NumberOrNone
    first_run_penalty_ratio: NumberOrNone
    failure_reason_counts: dict[str, Count]
    usd_per_run: NumberOrNone
    items_per_usd: NumberOrNone


class PortableRow(Artifact):
    """One chunk size, side by side; None where a backend has no such row."""

    client_chunk_size: ChunkSize
    jax: QuotedRow | None
    pytorch: QuotedRow | None
    correctness: Correctness
    deltas: dict[str, Any] | None = None  # JAX's metrics against PyTorch's, None where one has none


class PortableView(Artifact):
    """The same client, the same chunks."""

    guardrail_ratio: float = Field(ge=1)
    rows: list[PortableRow]
    backend_best: dict[str, QuotedRow | None]
    winner: dict[str, Any]


class BestNativeView(Artifact):
    """Each backend with its own settings."""

    jax_selected: QuotedRow | None
    pytorch_selected: QuotedRow | None
    correctness: Correctness
    winner: dict[str, Any]
    deltas: dict[str, Any] | None = None  # as in a portable row


class Comparison(Artifact):
    """`comparison.json`."""

    schema_version: Literal["cross_backend_comparison_v1"]
    generated_at_utc: str | None = None
    portable_view: PortableView
    best_native_view: BestNativeView
    correctness: dict[str, Any]
    recommendations: dict[str, Any]
    notes: list[str]
    inputs: dict[str, Any]
