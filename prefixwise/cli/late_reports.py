"""The report viewer of the server, imported when somebody first asks for a report: a start need not wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from prefixwise.server.reports import ReportSource

NEEDED_PACKAGES = ("pydantic",)  # of the extra `harness`


class LateReports:
    """A `ReportSource` of this folder, or of files that are sent where it is None."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @cached_property
    def _source(self) -> ReportSource:
        from prefixwise.bench.report.viewer import ReportFolder

        return ReportFolder(self._folder)

    def artifacts(self) -> Sequence[Mapping[str, object]]:
        return self._source.artifacts()

    def page(self, name: str) -> str:
        return self._source.page(name)

    def page_of(self, content: bytes, name: str) -> str:
        return self._source.page_of(content, name)
