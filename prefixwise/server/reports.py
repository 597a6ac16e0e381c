"""Where reports come from, as the server sees it. Whoever launches the server knows what is behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class ReportSource(Protocol):
    """Artifacts of the harness as HTML. Its functions raise ArtifactError."""

    def artifacts(self) -> Sequence[Mapping[str, object]]:
        """All that can be shown by name."""

    def page(self, name: str) -> str:
        """One of them."""

    def page_of(self, content: bytes, name: str) -> str:
        """One that somebody sends."""
