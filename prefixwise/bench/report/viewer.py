"""The report viewer's files: a folder of artifacts, listed and shown; and any artifact that somebody sends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prefixwise.bench.files import parse_artifact, read_bytes
from prefixwise.bench.report.html import report_html
from prefixwise.bench.report.inputs import ReportPaths, read_report_inputs
from prefixwise.bench.report.kinds import FileKind, kind_of, names_of_shown, read_top
from prefixwise.bench.report.make import make_report
from prefixwise.bench.report.plain import plain_report
from prefixwise.bench.report.single import date_of, report_of
from prefixwise.contract.errors import ArtifactError

MAX_FILE_BYTES = 64 * 2**20
_MAX_DEPTH = 3  # folders within the folder


class ReportFolder:
    """What lies in a folder, if there is one. Only files that it lists can be shown."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder.resolve()
        self._kinds: dict[tuple[Path, int, int], FileKind | None] = {}  # by path, time and size

    def artifacts(self) -> list[dict[str, object]]:
        """All that is known, by folder and name. What has a `note` is no report: the note says what it is for."""
        return [
            {
                "name": name,
                "folder": str(Path(name).parent),
                "kind": kind.name,
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
        if kind.name == "comparison":
            inputs = read_report_inputs(ReportPaths(path))
            return report_html(make_report(inputs, date_of(inputs.comparison)))
        return self.page_of(read_bytes(path), name)

    def page_of(self, content: bytes, name: str) -> str:
        """The report of an artifact that somebody sends; no other file is read. Raises ArtifactError."""
        top = read_top(content)
        kind = kind_of(top)
        if kind is None:
            raise ArtifactError(f"{name} is none of the artifacts that can be shown: {names_of_shown()}")
        if kind.note is not None:
            raise ArtifactError(f"{name} has no report of its own ({kind.name}): {kind.note}")
        if kind.form is None:
            return report_html(plain_report(top, name))
        return report_html(report_of(parse_artifact(content, kind.form, name), name))

    def _found(self) -> Iterator[tuple[str, Path, FileKind]]:
        if self._folder is None:
            return
        for path in sorted(self._folder.rglob("*.json")):
            name = path.relative_to(self._folder)
            if len(name.parts) <= _MAX_DEPTH + 1 and path.is_file() and path.resolve().is_relative_to(self._folder):
                kind = self._kind(path)
                if kind is not None:
                    yield name.as_posix(), path, kind

    def _kind(self, path: Path) -> FileKind | None:
        """Read once, and again when it has changed."""
        status = path.stat()
        key = (path, status.st_mtime_ns, status.st_size)
        if key not in self._kinds:
            self._kinds[key] = kind_of(read_top(read_bytes(path))) if status.st_size <= MAX_FILE_BYTES else None
        return self._kinds[key]
