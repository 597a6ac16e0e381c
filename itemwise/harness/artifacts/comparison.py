"""The comparison of two backends."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from itemwise.harness.artifacts.base import Artifact

COMPARISON_VERSION: Literal["cross_backend_comparison_v1"] = "cross_backend_comparison_v1"


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
