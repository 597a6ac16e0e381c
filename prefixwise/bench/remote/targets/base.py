"""The interface of a target: run a command, upload and download files, check that it is reachable.

Paths on a target are strings; a leading `~/` is the home folder there.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prefixwise.contract.errors import PrefixwiseError

VENV = "~/.prefixwise/venv"  # where `ops install` puts prefixwise, and remote targets look for it
VENV_PYTHON = f"{VENV}/bin/python"

OnLine = Callable[[str], None]


class TargetError(PrefixwiseError):
    """An operation on a target failed; the message quotes the target's own error."""


class ConnectionLostError(TargetError):
    """The connection broke before or during a command. The agent on the target then stops what it has started."""


@dataclass(frozen=True)
class CommandResult:
    """The result of a command that has ended."""

    status: int
    stdout: str
    stderr: str  # its last lines

    @property
    def last_line(self) -> str:
        lines = self.stdout.strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def message(self) -> str:
        """The error message of a failed command: its `error:` lines, or its end and last lines."""
        lines = [line for line in self.stderr.strip().splitlines() if line.strip()]
        errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
        if errors:
            return " / ".join(errors[-3:])
        return (
            f"{self._ending}; its last lines: {' / '.join(lines[-2:])}"
            if lines
            else f"{self._ending} without a message"
        )

    @property
    def _ending(self) -> str:
        """How it ended; a remote shell reports signal N as status 128 + N."""
        number = -self.status if self.status < 0 else self.status - 128
        names = {each.value: each.name for each in signal.Signals}
        return f"it was ended by {names[number]}" if number in names else f"it ended with status {self.status}"


class Target(Protocol):
    """One machine."""

    @property
    def name(self) -> str:
        """As given on the command line: local, ssh://me@host."""

    @property
    def default_python(self) -> str:
        """The interpreter that has prefixwise installed."""

    def run(self, command: Sequence[str], on_line: OnLine | None = None, *, heartbeat: bool = False) -> CommandResult:
        """Run the command to its end; `on_line` is called with every line of its stderr.

        Its stdin stays open until this process ends, so a command that watches stdin notices when its caller is gone.
        With `heartbeat` it receives a byte every few seconds, to detect connections that break silently.
        An argument that begins with `~/` is in the target's home. Raises ConnectionLostError, TargetError.
        """

    def upload(self, source: Path, destination: str) -> None:
        """Copy a file to the target. Raises ConnectionLostError, TargetError."""

    def download(self, source: str, destination: Path) -> None:
        """Copy a file or a whole folder to exactly this path. Raises ConnectionLostError, TargetError."""

    def check_reachable(self) -> None:
        """Raises TargetError with the reason."""


def shell_line(command: Sequence[str]) -> str:
    """The command for a remote shell: quoted, except for a leading `~/`, which that shell expands."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in command)
