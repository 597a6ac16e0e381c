"""The kinds of artifacts, one row each: how a file is recognised, and its JSON Schema.

Whoever adds a kind adds its row to KINDS, and, where there is more to check than the schema, its rules to RULES of
`check.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from prefixwise.bench import artifacts
from prefixwise.contract.errors import ArtifactError

DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class ArtifactKind:
    """One kind. A file is of it by its `schema_version`, or, where it has none, by fields that no other kind has."""

    name: str
    title: str
    model: type[artifacts.Artifact]
    schema_version: str | None = None
    fields: frozenset[str] = frozenset()
    file_name: str | None = None  # a pattern, for what has no field of its own


KINDS = (
    ArtifactKind("workload", "the canonical workload", artifacts.Workload, schema_version=artifacts.WORKLOAD_VERSION),
    ArtifactKind(
        "score-matrix",
        "a sweep over the client's chunk sizes",
        artifacts.ScoreMatrix,
        schema_version=artifacts.MATRIX_VERSION,
    ),
    ArtifactKind(
        "ops-matrix",
        "a sweep over the server's chunk sizes",
        artifacts.OpsMatrix,
        schema_version=artifacts.OPS_MATRIX_VERSION,
    ),
    ArtifactKind(
        "ops-chunk",
        "one chunk size of an ops matrix",
        artifacts.OpsRow,
        fields=frozenset({"chunk_size", "throughput_items_per_sec"}),
    ),
    ArtifactKind(
        "ops-run-metadata",
        "what an ops matrix was run with",
        artifacts.OpsRunMetadata,
        file_name="run_metadata.json",
    ),
    ArtifactKind(
        "comparison",
        "two backends side by side",
        artifacts.Comparison,
        schema_version=artifacts.COMPARISON_VERSION,
    ),
    ArtifactKind(
        "endpoint-evaluation",
        "isolation and speed of one server",
        artifacts.EndpointEvaluation,
        fields=frozenset({"mode", "isolation", "performance"}),
    ),
    ArtifactKind(
        "multi-vs-serial",
        "a multi-item server against a serial one",
        artifacts.MultiVsSerial,
        fields=frozenset({"equivalence_query_plus_delimiter"}),
    ),
    ArtifactKind(
        "parity",
        "servers against transformers",
        artifacts.Parity,
        fields=frozenset({"max_abs_diff_jax_serial_vs_torch_serial"}),
    ),
    ArtifactKind(
        "gate-report",
        "the gates, and which of them are passed",
        artifacts.GateReport,
        fields=frozenset({"checks", "all_pass"}),
    ),
    ArtifactKind(
        "model-matrix",
        "the gates of several models",
        artifacts.ModelMatrix,
        schema_version=artifacts.MODEL_MATRIX_VERSION,
    ),
    ArtifactKind("load", "a server under load", artifacts.LoadResult, schema_version=artifacts.LOAD_VERSION),
    ArtifactKind("ab", "variants against each other", artifacts.AbResult, schema_version=artifacts.AB_VERSION),
    ArtifactKind(
        "self-check",
        "all of it on this machine's own servers",
        artifacts.SelfCheck,
        schema_version=artifacts.SELF_CHECK_VERSION,
    ),
)


def kind_named(name: str) -> ArtifactKind:
    """Raises ArtifactError, which lists the names."""
    for kind in KINDS:
        if kind.name == name:
            return kind
    raise ArtifactError(f"no artifact is called {name!r}; expected one of {', '.join(kind.name for kind in KINDS)}")


def recognise(document: Mapping[str, Any], file_name: str) -> ArtifactKind | None:
    """None where it is nothing of ours. A version that we do not know is nothing of ours, whatever the fields."""
    version = document.get("schema_version")
    by_name = next((kind for kind in KINDS if kind.file_name and fnmatch(file_name, kind.file_name)), None)
    if version == artifacts.OPS_MATRIX_VERSION and by_name is not None:
        return by_name  # "1.0" may stand in any file of an ops folder, and the name tells them apart
    if version is not None:
        return next((kind for kind in KINDS if kind.schema_version == version), None)
    return next((kind for kind in KINDS if kind.fields and kind.fields <= document.keys()), by_name)


def known_versions() -> list[str]:
    """Every `schema_version` that we read."""
    return [kind.schema_version for kind in KINDS if kind.schema_version is not None]


def json_schema(kind: ArtifactKind) -> dict[str, Any]:
    """Draft 2020-12, under the names that stand in the file."""
    return {"$schema": DIALECT, **kind.model.model_json_schema(by_alias=True)}
