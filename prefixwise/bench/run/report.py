"""The report of one artifact, and a folder of artifacts for the server's report page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefixwise.bench.files import parse_artifact, read_bytes
from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.registry import KINDS, ArtifactKind, recognise
from prefixwise.bench.render.document import Report
from prefixwise.bench.render.html import report_html
from prefixwise.contract.errors import ArtifactError

MAX_FILE_BYTES = 64 * 2**20
SAMPLE_FOLDER = Path(__file__).parents[1] / "sample"  # measured with this package
_MAX_DEPTH = 3  # folders within the folder


def report_of(artifact: Artifact, name: str) -> Report:
    """`name`: of its file."""
    kind = next(kind for kind in KINDS if kind.model is type(artifact))
    assert kind.report is not None, f"{kind.name} has no report"
    return kind.report(artifact, name)


class ReportFolder:
    """The artifacts in a folder, or a sample if None. Only files that it lists can be shown."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = (folder or SAMPLE_FOLDER).resolve()
        self._kinds: dict[tuple[Path, int, int], ArtifactKind | None] = {}  # by path, time and size

    def artifacts(self) -> list[dict[str, object]]:
        """All known files, by folder and name. An entry with a `note` has no report: the note says what it is for."""
        return [
            {
                "name": name,
                "folder": str(Path(name).parent),
                "kind": kind.label,
                "bytes": path.stat().st_size,
                "note": kind.note,
            }
            for name, path, kind in self._found()
        ]

    def page(self, name: str) -> str:
        """The report of a file in the folder. Raises ArtifactError."""
        found = {each: (path, kind) for each, path, kind in self._found()}
        if name not in found:
            raise ArtifactError(f"{name} is no artifact in the folder of reports")
        path, kind = found[name]
        if kind.report_of_path is not None:
            return _html(partial(kind.report_of_path, path), name)
        return self.page_of(read_bytes(path), name)

    def page_of(self, content: bytes, name: str) -> str:
        """The report of an uploaded artifact; no other file is read. Raises ArtifactError."""
        top = _read_top(content)
        kind = recognise(top, Path(name).name)
        if kind is None:
            shown = ", ".join(kind.label for kind in KINDS if kind.report is not None)
            raise ArtifactError(f"{name} is none of the artifacts that can be shown: {shown}")
        if kind.report is None:
            raise ArtifactError(f"{name} has no report of its own ({kind.label}): {kind.note}")
        artifact = top if kind.model is None else parse_artifact(content, kind.model, name)
        return _html(partial(kind.report, artifact, name), name)

    def _found(self) -> Iterator[tuple[str, Path, ArtifactKind]]:
        for path in sorted(self._folder.rglob("*.json")):
            name = path.relative_to(self._folder)
            if len(name.parts) <= _MAX_DEPTH + 1 and path.is_file() and path.resolve().is_relative_to(self._folder):
                kind = self._kind(path)
                if kind is not None:
                    yield name.as_posix(), path, kind

    def _kind(self, path: Path) -> ArtifactKind | None:
        """Read once, and again when it has changed."""
        status = path.stat()
        key = (path, status.st_mtime_ns, status.st_size)
        if key not in self._kinds:
            is_small = status.st_size <= MAX_FILE_BYTES
            self._kinds[key] = recognise(_read_top(read_bytes(path)), path.name) if is_small else None
        return self._kinds[key]


def _html(make: Callable[[], Report], name: str) -> str:
    try:
        return report_html(make())
    except ArithmeticError as error:  # of charts and ratios
        raise ArtifactError(f"{name} has numbers too large for a report: {error}") from None


def _read_top(content: bytes) -> Mapping[str, Any]:
    """The object at the top of a JSON file; empty where there is none."""
    try:
        top = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return top if isinstance(top, dict) else {}
