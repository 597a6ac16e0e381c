"""What a target can do: run a command, take a file, give one back, say whether it is there.

Paths on a target are strings: `~` is its home, and it need not be a machine like this one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from itemwise.contract.errors import ItemwiseError

OnLine = Callable[[str], None]


class TargetError(ItemwiseError):
    """What could not be done on a target, in its own words."""


class ConnectionLostError(TargetError):
    """The way to the target broke, before or while a command ran. What it had started ends by itself."""


@dataclass(frozen=True)
class Done:
    """A command that came to its end."""

    status: int
    output: str  # what it wrote to stdout
    complaints: str  # the end of what it wrote to stderr

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def words(self) -> str:
        """What to tell people of a command that failed."""
        lines = [line for line in self.complaints.strip().splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("error:")]
        return " / ".join((told or lines)[-3:]) or f"it ended with status {self.status} and said nothing"


class Target(Protocol):
    """One machine."""

    @property
    def name(self) -> str:
        """As it was given: local, ssh://me@host."""

    @property
    def default_python(self) -> str:
        """The interpreter that has itemwise."""

    def run(self, command: Sequence[str], on_line: OnLine | None = None) -> Done:
        """Runs it to its end; `on_line` hears every line of its stderr as it comes.

        Its stdin stays open as long as we are there: a command that watches it knows when we are gone.
        A word that begins with `~/` is of the target's home. Raises ConnectionLostError, TargetError.
        """

    def upload(self, source: Path, destination: str) -> None:
        """A file. Raises ConnectionLostError, TargetError."""

    def download(self, source: str, destination: Path) -> None:
        """A file or a folder with all that is in it, to exactly this path. Raises ConnectionLostError, TargetError."""

    def check_reachable(self) -> None:
        """Raises TargetError with the reason."""


def shell_line(command: Sequence[str]) -> str:
    """For a shell at the other end: quoted, but for a leading `~/`, which only that shell can resolve."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in command)
