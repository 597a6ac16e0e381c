"""The report viewer's files: a folder of artifacts, listed and shown; and any artifact that somebody sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from itemwise.contract.errors import ArtifactError
from itemwise.harness.artifacts import (
    AbResult,
    Artifact,
    Comparison,
    EndpointEvaluation,
    GateReport,
    LoadResult,
    ModelMatrix,
    MultiVsSerial,
    Parity,
    ScoreMatrix,
)
from itemwise.harness.files import parse_artifact, read_bytes
from itemwise.harness.report.html import report_html
from itemwise.harness.report.inputs import ReportPaths, read_report_inputs
from itemwise.harness.report.make import make_report
from itemwise.harness.report.single import date_of, report_of

MAX_FILE_BYTES = 64 * 2**20
_MAX_DEPTH = 3  # folders within the folder

# By what their JSON has at its top: the words of a file's kind, its class, and the fields that tell it.
_KINDS: tuple[tuple[str, type[Artifact], frozenset[str]], ...] = (
    ("comparison", Comparison, frozenset({"portable_view", "best_native_view"})),
    ("matrix", ScoreMatrix, frozenset({"evaluation_view", "results", "workload_ref"})),
    ("evaluation", EndpointEvaluation, frozenset({"mode", "isolation", "performance", "url"})),
    ("multi vs serial", MultiVsSerial, frozenset({"equivalence", "performance", "multi_url"})),
    ("parity", Parity, frozenset({"max_abs_diff_jax_serial_vs_torch_serial"})),
    ("gates", GateReport, frozenset({"checks", "all_pass"})),
    ("variants", AbResult, frozenset({"variants", "rounds"})),
    ("load", LoadResult, frozenset({"measured", "geometry"})),
    ("models", ModelMatrix, frozenset({"models", "rows", "all_pass"})),
)


class ReportFolder:
    """What lies in a folder, if there is one. Only files that it lists can be shown."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder.resolve()
        self._kinds: dict[tuple[Path, int, int], str | None] = {}  # by path, time and size

    def artifacts(self) -> list[dict[str, object]]:
        """All that can be shown, by folder and name."""
        return [
            {"name": name, "folder": str(Path(name).parent), "kind": kind, "bytes": path.stat().st_size}
            for name, path, kind in self._found()
        ]

    def page(self, name: str) -> str:
        """The report of a file in the folder. Raises ArtifactError."""
        found = {each: (path, kind) for each, path, kind in self._found()}
        if name not in found:
            raise ArtifactError(f"{name} is no artifact in the folder of reports")
        path, kind = found[name]
        if kind == "comparison":
            inputs = read_report_inputs(ReportPaths(path))
            return report_html(make_report(inputs, date_of(inputs.comparison)))
        return self.page_of(read_bytes(path), name)

    def page_of(self, content: bytes, name: str) -> str:
        """The report of an artifact that somebody sends; no other file is read. Raises ArtifactError."""
        kind = _kind_of(content)
        if kind is None:
            known = ", ".join(each for each, _, _ in _KINDS)
            raise ArtifactError(f"{name} is none of the artifacts that can be shown: {known}")
        form = next(form for each, form, _ in _KINDS if each == kind)
        return report_html(report_of(parse_artifact(content, form, name), name))

    def _found(self) -> Iterator[tuple[str, Path, str]]:
        if self._folder is None:
            return
        for path in sorted(self._folder.rglob("*.json")):
            name = path.relative_to(self._folder)
            if len(name.parts) <= _MAX_DEPTH + 1 and path.is_file() and path.resolve().is_relative_to(self._folder):
                kind = self._kind(path)
                if kind is not None:
                    yield name.as_posix(), path, kind

    def _kind(self, path: Path) -> str | None:
        """Read once, and again when it has changed."""
        status = path.stat()
        key = (path, status.st_mtime_ns, status.st_size)
        if key not in self._kinds:
            self._kinds[key] = _kind_of(read_bytes(path)) if status.st_size <= MAX_FILE_BYTES else None
        return self._kinds[key]


def _kind_of(content: bytes) -> str | None:
    """None for what is no artifact of ours."""
    try:
        top = json.loads(content)
    except (ValueError, RecursionError):
        return None
    keys = set(top) if isinstance(top, dict) else set()
    return next((name for name, _, fields in _KINDS if fields <= keys), None)
