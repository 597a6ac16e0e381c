"""Checks artifacts: is a file what it says it is, down to the metrics that follow from others?

    file -> JSON -> kind (registry.KINDS) -> types (its model) -> rules (its check)

What breaks the contract is an error, what is only odd is a warning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from prefixwise.bench.files import Kind, read_artifact, read_bytes
from prefixwise.bench.kinds.findings import Finding, Findings, parse_json
from prefixwise.bench.kinds.registry import ArtifactKind, known_versions, recognise
from prefixwise.contract.errors import ArtifactError


@dataclass(frozen=True)
class FileReport:
    """The findings of one file; `kind` is None for an unknown file."""

    path: Path
    kind: str | None
    errors: tuple[Finding, ...]
    warnings: tuple[Finding, ...]

    @property
    def is_valid(self) -> bool:
        return not self.errors


def check_file(path: Path, expected_kinds: Sequence[str] = (), *, is_artifact: bool = False) -> FileReport:
    """Check a file. `expected_kinds`: empty accepts every known kind. Raises ArtifactError where there is no file.

    A JSON file that is nothing of ours is only odd, unless a kind is expected or the caller says that it `is_artifact`.
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
        kind = _check_document(document, content, found, expected_kinds, is_artifact=is_artifact)
    return FileReport(path, None if kind is None else kind.name, tuple(found.errors), tuple(found.warnings))


def read_checked(path: Path, kind: str, model: type[Kind]) -> Kind:
    """An artifact of this kind without an error. Raises ArtifactError, which says the first one."""
    report = check_file(path, (kind,))
    if report.errors:
        more = f" (and {len(report.errors) - 1} more)" if len(report.errors) > 1 else ""
        raise ArtifactError(f"{path} cannot be judged: {report.errors[0]}{more}; `bench check` says more")
    return read_artifact(path, model)


def _check_document(
    document: object, content: bytes, found: Findings, expected_kinds: Sequence[str], *, is_artifact: bool
) -> ArtifactKind | None:
    kind = recognise(document, found.path.name) if isinstance(document, dict) else None
    if kind is None or kind.model is None or not isinstance(document, dict):
        _report_unknown(document, found, expected_kinds, is_artifact=is_artifact and kind is None)
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
    if kind.check is not None:
        kind.check(artifact, found)
    return kind


def _report_unknown(document: object, found: Findings, expected_kinds: Sequence[str], *, is_artifact: bool) -> None:
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version is not None:
        found.fail("schema_version", f"one of {', '.join(known_versions())}", json.dumps(version))
    elif expected_kinds:
        found.fail("the file", f"an artifact of kind {' or '.join(expected_kinds)}", "one that is not known")
    else:
        add = found.fail if is_artifact else found.warn
        add("the file", "an artifact", "JSON of another kind, which was not checked")


def json_files(folder: Path) -> Iterator[Path]:
    """The JSON files below a folder, sorted; hidden files and folders are skipped."""
    found = (path for path in folder.rglob("*.json") if path.is_file())
    yield from sorted(path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts))
