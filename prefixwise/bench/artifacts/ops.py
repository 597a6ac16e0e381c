"""The ops matrix: a sweep over the server's chunk sizes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from prefixwise.bench.artifacts.base import Artifact

OPS_MATRIX_VERSION: Literal["1.0"] = "1.0"


class OpsRow(Artifact):
    """One chunk size of the server."""

    chunk_size: int = Field(ge=0)
    throughput_items_per_sec: float | None
    latency_p50_ms: float | None
    latency_p99_ms: float | None
    memory_peak_mb: float | None
    status: str
    error: str | None
    # Of ours: what the figures are of, and the drawer of the failure.
    latencies_ms: list[float] | None = None
    failure_reason: str | None = None


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
    # Of ours: the whole of what was asked for, so that only the same sweep is gone on with.
    spec: dict[str, Any] | None = None
    started_at_utc: str | None = None
    prefixwise: str | None = None
