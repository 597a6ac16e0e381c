"""Checking artifacts: is a file what it says it is, down to the figures that follow from others?

    file -> JSON -> kind (schemas.KINDS) -> types (its model) -> rules (RULES)

What breaks the contract is an error, what is only odd is a warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prefixwise.bench.checks import (
    comparison,
    evaluations,
    gate_reports,
    ops_folder,
    score_matrix,
    speed_runs,
    workload_file,
)
from prefixwise.bench.checks.findings import Finding, Findings
from prefixwise.bench.checks.reading import parse_json
from prefixwise.bench.files import read_bytes
from prefixwise.bench.schemas import ArtifactKind, known_versions, recognise
from prefixwise.contract.errors import ArtifactError

# By the name of the kind. Each takes the artifact as its model, and adds to the findings.
RULES: dict[str, Callable[[Any, Findings], None]] = {
    "workload": workload_file.check_workload,
    "score-matrix": score_matrix.check_score_matrix,
    "ops-matrix": ops_folder.check_ops_matrix,
    "ops-chunk": ops_folder.check_ops_chunk,
    "ops-run-metadata": ops_folder.check_ops_metadata,
    "comparison": comparison.check_comparison,
    "endpoint-evaluation": evaluations.check_endpoint,
    "multi-vs-serial": evaluations.check_multi_vs_serial,
    "parity": evaluations.check_parity,
    "gate-report": gate_reports.check_gate_report,
    "model-matrix": gate_reports.check_model_matrix,
    "self-check": gate_reports.check_self_check,
    "load": speed_runs.check_load,
    "ab": speed_runs.check_ab,
}


@dataclass(frozen=True)
class FileReport:
    """What was found in one file. `kind` is None where it is nothing that we know."""

    path: Path
    kind: str | None
    errors: tuple[Finding, ...]
    warnings: tuple[Finding, ...]

    @property
    def is_valid(self) -> bool:
        return not self.errors


def check_file(path: Path, expected_kinds: Sequence[str] = ()) -> FileReport:
    """`expected_kinds`: what the caller takes it for; empty: anything that we know. Raises ArtifactError for no file.

    A JSON file that is nothing of ours is only odd where nothing is expected of it.
    """
    found = Findings(path, {})
    kind: ArtifactKind | None = None
    try:
        content = read_bytes(path)
        document = parse_json(content)
    except ArtifactError as error:
        if not path.exists():
            raise
        found.fail("the file", "one that can be read", error)
    except ValueError as error:
        found.fail("the file", "JSON", error)
    else:
        kind = _check_document(document, content, found, expected_kinds)
    return FileReport(path, None if kind is None else kind.name, tuple(found.errors), tuple(found.warnings))


def _check_document(
    document: object, content: bytes, found: Findings, expected_kinds: Sequence[str]
) -> ArtifactKind | None:
    kind = recognise(document, found.path.name) if isinstance(document, dict) else None
    if kind is None or not isinstance(document, dict):
        _tell_unknown(document, found, expected_kinds)
        return None
    if expected_kinds and kind.name not in expected_kinds:
        found.fail("the file", f"an artifact of kind {' or '.join(expected_kinds)}", kind.name)
        return kind
    found.document = document
    try:
        artifact = kind.model.model_validate_json(content)
    except ValidationError as error:
        found.add_schema_errors(error)
        return kind
    if kind.name in RULES:
        _apply(RULES[kind.name], artifact, found)
    return kind


def _apply(rule: Callable[[Any, Findings], None], artifact: Any, found: Findings) -> None:
    """What a rule does not expect makes this file invalid, and is no reason to leave the others unread."""
    try:
        rule(artifact, found)
    except Exception as error:
        found.fail("the file", "fields that can be checked", f"{type(error).__name__}: {error}")


def _tell_unknown(document: object, found: Findings, expected_kinds: Sequence[str]) -> None:
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version is not None:
        found.fail("schema_version", f"one of {', '.join(known_versions())}", json.dumps(version))
    elif expected_kinds:
        found.fail("the file", f"an artifact of kind {' or '.join(expected_kinds)}", "one that is not known")
    else:
        found.warn("the file", "an artifact", "JSON of another kind, which was not checked")


def json_files(folder: Path) -> Iterator[Path]:
    """All of a folder and the folders in it, by name; what is hidden is some program's own."""
    found = (path for path in folder.rglob("*.json") if path.is_file())
    yield from sorted(path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts))
