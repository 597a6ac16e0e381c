"""The registry of artifact kinds: one row each, which says how a file is recognised, checked and shown.

A new kind is one file beside this one (its model, its check, its report) and one row of KINDS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from prefixwise.bench.kinds.ab import AB_VERSION, AbResult, check_ab
from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.benchmark import benchmark_report
from prefixwise.bench.kinds.comparison.checks import check_comparison
from prefixwise.bench.kinds.comparison.model import COMPARISON_VERSION, Comparison
from prefixwise.bench.kinds.comparison.report import comparison_report, comparison_report_of
from prefixwise.bench.kinds.evaluation import EndpointEvaluation, check_endpoint, evaluation_report
from prefixwise.bench.kinds.extras import extras_report
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.kinds.gate_report import GateReport, check_gate_report
from prefixwise.bench.kinds.load import LOAD_VERSION, LoadResult, check_load
from prefixwise.bench.kinds.model_matrix import MODEL_MATRIX_VERSION, ModelMatrix, check_model_matrix
from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial, check_multi_vs_serial
from prefixwise.bench.kinds.ops import (
    OPS_MATRIX_VERSION,
    OpsMatrix,
    OpsRow,
    OpsRunMetadata,
    check_ops_chunk,
    check_ops_matrix,
    check_ops_metadata,
    ops_matrix_report,
)
from prefixwise.bench.kinds.parity import Parity, check_parity
from prefixwise.bench.kinds.quantization import QUANTIZATION_VERSION, QuantizationCheck, check_quantization
from prefixwise.bench.kinds.score_matrix import MATRIX_VERSION, ScoreMatrix, matrix_report
from prefixwise.bench.kinds.score_matrix_checks import check_score_matrix
from prefixwise.bench.kinds.self_check import SELF_CHECK_VERSION, SelfCheck, check_self_check, self_check_report
from prefixwise.bench.kinds.workload import WORKLOAD_VERSION, Workload, check_workload
from prefixwise.bench.render.document import Report
from prefixwise.contract.errors import ArtifactError

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, kw_only=True)
class ArtifactKind:
    """One kind. A file is of it by its `schema_version`; a file without one by fields that no other kind has.

    These are few, so that a file that lacks the rest is recognised and found invalid, rather than skipped.
    """

    name: str  # for `bench check` and `bench schema`
    label: str  # for the report page
    title: str
    model: type[Artifact] | None = None  # None: no schema and no check; the report takes the JSON
    check: Callable[[Any, Findings], None] | None = None  # adds to the findings
    report: Callable[[Any, str], Report] | None = None  # of an artifact and the name of its file
    report_of_path: Callable[[Path], Report] | None = None  # where it also reads the files that the artifact names
    note: str | None = None  # for the report page, where there is no report
    schema_version: str | None = None
    fields: tuple[frozenset[str], ...] = ()  # any of these sets; of several kinds the larger set decides
    file_name: str | None = None  # a pattern, for a file without fields of its own

    def num_fields(self, document: Mapping[str, Any]) -> int:
        """The size of the largest set of its fields that the document has; 0 for none."""
        return max((len(names) for names in self.fields if names <= document.keys()), default=0)


def _any_of(*sets: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(names.split()) for names in sets)


KINDS = (
    ArtifactKind(
        name="workload",
        label="workload",
        title="the canonical workload",
        model=Workload,
        check=check_workload,
        note="the requests that were sent; the report of a matrix shows their shape",
        schema_version=WORKLOAD_VERSION,
        fields=_any_of("requests checksums", "query_tokens num_items requests"),
    ),
    ArtifactKind(
        name="score-matrix",
        label="matrix",
        title="a sweep over the client's chunk sizes",
        model=ScoreMatrix,
        check=check_score_matrix,
        report=matrix_report,
        schema_version=MATRIX_VERSION,
        fields=_any_of("results evaluation_view", "confirm_results"),
    ),
    ArtifactKind(
        name="ops-matrix",
        label="ops matrix",
        title="a sweep over the server's chunk sizes",
        model=OpsMatrix,
        check=check_ops_matrix,
        report=ops_matrix_report,
        schema_version=OPS_MATRIX_VERSION,
        fields=_any_of("results backend"),
    ),
    ArtifactKind(
        name="ops-chunk",
        label="ops row",
        title="one chunk size of an ops matrix",
        model=OpsRow,
        check=check_ops_chunk,
        note="one chunk size of the sweep, whose report has it as a row",
        fields=_any_of("throughput_items_per_sec", "chunk_size status"),
    ),
    ArtifactKind(
        name="ops-run-metadata",
        label="ops run",
        title="what an ops matrix was run with",
        model=OpsRunMetadata,
        check=check_ops_metadata,
        note="the options of the sweep, with which it can be resumed",
        file_name="run_metadata.json",
    ),
    ArtifactKind(
        name="comparison",
        label="comparison",
        title="two backends side by side",
        model=Comparison,
        check=check_comparison,
        report=comparison_report,
        report_of_path=comparison_report_of,
        schema_version=COMPARISON_VERSION,
        fields=_any_of("portable_view", "best_native_view"),
    ),
    ArtifactKind(
        name="endpoint-evaluation",
        label="evaluation",
        title="isolation and speed of one server",
        model=EndpointEvaluation,
        check=check_endpoint,
        report=evaluation_report,
        fields=_any_of("mode isolation", "mode performance", "url isolation performance"),
    ),
    ArtifactKind(
        name="multi-vs-serial",
        label="multi vs serial",
        title="a multi-item server against a serial one",
        model=MultiVsSerial,
        check=check_multi_vs_serial,
        report=extras_report,
        fields=_any_of("multi_url serial_url", "equivalence", "equivalence_query_plus_delimiter"),
    ),
    ArtifactKind(
        name="parity",
        label="parity",
        title="servers against transformers",
        model=Parity,
        check=check_parity,
        report=extras_report,
        fields=_any_of(*(name for name in Parity.model_fields if "jax" in name)),
    ),
    ArtifactKind(
        name="gate-report",
        label="gates",
        title="the gates, and which of them are passed",
        model=GateReport,
        check=check_gate_report,
        report=extras_report,
        fields=_any_of("checks", "all_pass"),
    ),
    ArtifactKind(
        name="model-matrix",
        label="models",
        title="the gates of several models",
        model=ModelMatrix,
        check=check_model_matrix,
        report=extras_report,
        schema_version=MODEL_MATRIX_VERSION,
        fields=_any_of("models rows"),
    ),
    ArtifactKind(
        name="quantization",
        label="quantization",
        title="a quantised model against a reference",
        model=QuantizationCheck,
        check=check_quantization,
        report=extras_report,
        schema_version=QUANTIZATION_VERSION,
        fields=_any_of("model_server reference_server", "reference metrics requests"),
    ),
    ArtifactKind(
        name="load",
        label="load",
        title="a server under load",
        model=LoadResult,
        check=check_load,
        report=extras_report,
        schema_version=LOAD_VERSION,
        fields=_any_of("geometry measured"),
    ),
    ArtifactKind(
        name="ab",
        label="variants",
        title="variants against each other",
        model=AbResult,
        check=check_ab,
        report=extras_report,
        schema_version=AB_VERSION,
        fields=_any_of("compare variants"),
    ),
    ArtifactKind(
        name="self-check",
        label="self-check",
        title="all of it on this machine's own servers",
        model=SelfCheck,
        check=check_self_check,
        report=self_check_report,
        schema_version=SELF_CHECK_VERSION,
        fields=_any_of("steps all_pass"),
    ),
    # The result of a script under benchmarks/: no model of ours.
    ArtifactKind(
        name="benchmark",
        label="benchmark",
        title="the result of a benchmark",
        report=benchmark_report,
        fields=_any_of("rows command", "runs command", "rows commit"),
    ),
)
MODELED_KINDS = tuple(kind for kind in KINDS if kind.model is not None)


def kind_named(name: str) -> ArtifactKind:
    """A kind with a model. Raises ArtifactError, which lists the names."""
    for kind in MODELED_KINDS:
        if kind.name == name:
            return kind
    names = ", ".join(kind.name for kind in MODELED_KINDS)
    raise ArtifactError(f"no artifact is called {name!r}; expected one of {names}")


def recognise(document: Mapping[str, Any], file_name: str) -> ArtifactKind | None:
    """None for an unknown file. An unknown `schema_version` is no artifact of ours, whatever its fields."""
    version = document.get("schema_version")
    by_name = next((kind for kind in KINDS if kind.file_name and fnmatch(file_name, kind.file_name)), None)
    if version == OPS_MATRIX_VERSION and by_name is not None:
        return by_name  # any file of an ops folder may have version "1.0": the name decides
    if version is not None:
        known = next((kind for kind in KINDS if kind.schema_version == version), None)
        return known or next((kind for kind in KINDS if kind.model is None and kind.num_fields(document)), None)
    by_fields = max(KINDS, key=lambda kind: kind.num_fields(document))
    return by_fields if by_name is None and by_fields.num_fields(document) else by_name


def known_versions() -> list[str]:
    """Every `schema_version` that we read."""
    return [kind.schema_version for kind in KINDS if kind.schema_version is not None]


def json_schema(kind: ArtifactKind) -> dict[str, Any]:
    """Draft 2020-12, with the field names of the file."""
    assert kind.model is not None
    return {"$schema": SCHEMA_DIALECT, **kind.model.model_json_schema(by_alias=True)}
