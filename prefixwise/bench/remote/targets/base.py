"""What a target can do: run a command, take a file, give one back, say whether it is there.

Paths on a target are strings: `~` is its home, and it need not be a machine like this one.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prefixwise.contract.errors import PrefixwiseError

OnLine = Callable[[str], None]


class TargetError(PrefixwiseError):
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
        told = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
        if told:
            return " / ".join(told[-3:])
        return (
            f"{self._ending}; its last words: {' / '.join(lines[-2:])}" if lines else f"{self._ending} and said nothing"
        )

    @property
    def _ending(self) -> str:
        """A shell at the other end says 128 + N of a signal N."""
        number = -self.status if self.status < 0 else self.status - 128
        names = {each.value: each.name for each in signal.Signals}
        return f"it was ended by {names[number]}" if number in names else f"it ended with status {self.status}"


class Target(Protocol):
    """One machine."""

    @property
    def name(self) -> str:
        """As it was given: local, ssh://me@host."""

    @property
    def default_python(self) -> str:
        """The interpreter that has prefixwise."""

    def run(self, command: Sequence[str], on_line: OnLine | None = None, *, heartbeat: bool = False) -> Done:
        """Runs it to its end; `on_line` hears every line of its stderr as it comes.

        Its stdin stays open as long as we are there: a command that watches it knows when we are gone. With a heartbeat
        it gets a byte now and then, for ways that break without a word.
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
