"""This machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from prefixwise.bench.remote.targets.base import CommandResult, OnLine
from prefixwise.bench.remote.targets.processes import run_streamed
from prefixwise.bench.remote.targets.transfer import copy_whole


class LocalTarget:
    """Commands are processes of this machine."""

    name = "local"
    default_python = sys.executable

    def run(self, command: Sequence[str], on_line: OnLine | None = None, *, heartbeat: bool = False) -> CommandResult:
        return run_streamed([_expanded(word) for word in command], on_line, heartbeat=heartbeat)

    def upload(self, source: Path, destination: str) -> None:
        _copy(source, Path(_expanded(destination)))

    def download(self, source: str, destination: Path) -> None:
        _copy(Path(_expanded(source)), destination)

    def check_reachable(self) -> None:
        """This machine is always reachable."""


def _expanded(word: str) -> str:
    return str(Path(word).expanduser()) if word.startswith("~/") else word


def _copy(source: Path, destination: Path) -> None:
    if destination.exists() and source.resolve() == destination.resolve():
        return
    copy_whole(source, destination)
