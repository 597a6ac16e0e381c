"""This machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from itemwise.ops.targets.base import Done, OnLine, TargetError
from itemwise.ops.targets.processes import run_streamed


class LocalTarget:
    """Commands are processes of this machine."""

    name = "local"
    default_python = sys.executable

    def run(self, command: Sequence[str], on_line: OnLine | None = None, *, heartbeat: bool = False) -> Done:
        return run_streamed([_expanded(word) for word in command], on_line, heartbeat=heartbeat)

    def upload(self, source: Path, destination: str) -> None:
        _copy(source, Path(_expanded(destination)))

    def download(self, source: str, destination: Path) -> None:
        _copy(Path(_expanded(source)), destination)

    def check_reachable(self) -> None:
        """It always is."""


def _expanded(word: str) -> str:
    return str(Path(word).expanduser()) if word.startswith("~/") else word


def _copy(source: Path, destination: Path) -> None:
    if destination.exists() and source.resolve() == destination.resolve():
        return
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, destination, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, destination)
    except (OSError, shutil.Error) as error:
        raise TargetError(f"{source} cannot be copied to {destination}: {error}") from None
