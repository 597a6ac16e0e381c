"""What a JSON file is, by the fields at its top: an artifact with a report, a part of another, or nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixwise.bench.artifacts import (
    AbResult,
    Artifact,
    Comparison,
    EndpointEvaluation,
    GateReport,
    LoadResult,
    ModelMatrix,
    MultiVsSerial,
    OpsMatrix,
    Parity,
    ScoreMatrix,
    SelfCheck,
)


@dataclass(frozen=True)
class FileKind:
    """`form` is None where the file is shown as it is, or not at all; then `note` says what it is for."""

    name: str
    fields: frozenset[str]
    form: type[Artifact] | None = None
    note: str | None = None


def _shown(name: str, form: type[Artifact] | None, *fields: str) -> FileKind:
    return FileKind(name, frozenset(fields), form)


def _part(name: str, note: str, *fields: str) -> FileKind:
    return FileKind(name, frozenset(fields), note=note)


# The first that fits: a benchmark's result has few fields, so it comes after those that have more.
KINDS = (
    _shown("comparison", Comparison, "portable_view", "best_native_view"),
    _shown("matrix", ScoreMatrix, "evaluation_view", "results", "workload_ref"),
    _shown("evaluation", EndpointEvaluation, "mode", "isolation", "performance", "url"),
    _shown("multi vs serial", MultiVsSerial, "equivalence", "performance", "multi_url"),
    _shown("parity", Parity, "max_abs_diff_jax_serial_vs_torch_serial"),
    _shown("gates", GateReport, "checks", "all_pass"),
    _shown("variants", AbResult, "variants", "rounds"),
    _shown("load", LoadResult, "measured", "geometry"),
    _shown("models", ModelMatrix, "models", "rows", "all_pass"),
    _shown("ops matrix", OpsMatrix, "backend", "results", "server_config", "summary"),
    _shown("self-check", SelfCheck, "steps", "backends", "all_pass"),
    _part("workload", "the requests that were sent; the report of a matrix tells their shape", "requests", "checksums"),
    _part("ops row", "one chunk size of the sweep, whose report has it as a row", "chunk_size", "latency_p99_ms"),
    _part("ops run", "what the sweep was asked for, so that it can be gone on with", "spec", "started_at_utc"),
    _shown("benchmark", None, "rows", "command"),
    _shown("benchmark", None, "runs", "command"),
    _shown("benchmark", None, "rows", "commit"),
)


def read_top(content: bytes) -> Mapping[str, Any]:
    """What is at the top of a JSON file; nothing where that is no object."""
    try:
        top = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return top if isinstance(top, dict) else {}


def kind_of(top: Mapping[str, Any]) -> FileKind | None:
    """None for what is nothing of ours."""
    return next((kind for kind in KINDS if kind.fields <= top.keys()), None)


def names_of_shown() -> str:
    """In words, each once."""
    return ", ".join(dict.fromkeys(kind.name for kind in KINDS if kind.note is None))
