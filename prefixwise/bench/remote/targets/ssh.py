"""A machine over ssh, through the system's OpenSSH client with its agent, config, known hosts and jump hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixwise.bench.remote.targets.base import (
    VENV_PYTHON,
    CommandResult,
    ConnectionLostError,
    OnLine,
    TargetError,
    shell_line,
)
from prefixwise.bench.remote.targets.processes import run_streamed
from prefixwise.bench.remote.targets.transfer import landing, send, unpack

_ADDRESS = re.compile(
    r"(?:(?P<user>[^@/\s-][^@/\s]*)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[\w][\w.-]*)(?::(?P<port>\d{1,5}))?"
)
_BROKEN = 255  # ssh's status for its own failures
# No password prompt in the middle of a run; dead connections are detected.
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_CONNECT = ("-o", "ConnectTimeout=20")
# The beginnings of ssh's own messages, to tell them from the command's.
_SSH_MESSAGE = re.compile(
    r"ssh: |ssh_|Connection |client_loop: |kex_exchange|banner exchange|Timeout, |Host key |No .* host key |"
    r"Received disconnect|Disconnected|Unable to negotiate|\S+@\S+: Permission denied|.*[Bb]ad configuration option"
)
# `cat` succeeds on a cut connection, too: only the number of bytes distinguishes a partial file from a complete one.
_RECEIVE = (
    'cat > "$1" && if [ $(wc -c < "$1") -eq "$3" ]; then mv -f -- "$1" "$2"; '
    'else echo "error: $(wc -c < "$1") bytes received, expected $3" >&2; exit 1; fi'
)
# GNU tar's messages, with status 1, about files that an active run is still writing.
_STILL_WRITTEN = re.compile(r".*(file changed as we read it|File removed before we read it)")


@dataclass(frozen=True)
class SshTarget:
    """`ssh://user@host:port`; user and port default to the ssh config's."""

    host: str
    user: str | None = None
    port: int | None = None
    default_python: str = VENV_PYTHON

    @classmethod
    def parse(cls, address: str) -> SshTarget:
        """Parse the part after `ssh://`. Raises TargetError."""
        found = _ADDRESS.fullmatch(address.removesuffix("/"))
        if ":" in address.rpartition("@")[0]:  # do not print it again
            raise TargetError(
                "an ssh target takes no password, which process lists would show: use a key, ssh://user@host"
            )
        if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
            raise TargetError(f"an ssh target must be like ssh://user@host:22, got 'ssh://{address}'")
        return cls(found["host"].strip("[]"), found["user"], int(found["port"]) if found["port"] else None)

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user + '@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    def run(self, command: Sequence[str], on_line: OnLine | None = None, *, heartbeat: bool = False) -> CommandResult:
        done = run_streamed(self._command(command), on_line, heartbeat=heartbeat)
        return self._connected(done, "ssh gives no reason")  # other lines are the command's

    def upload(self, source: Path, destination: str) -> None:
        # To a temporary name first: a partial file must not be mistaken for a complete one.
        try:
            size = source.stat().st_size
        except OSError as error:
            raise TargetError(f"{source} cannot be read: {error.strerror}") from None
        receive = self._command(["sh", "-c", _RECEIVE, "sh", f"{destination}.part", destination, str(size)])
        done = send(receive, source)
        if self._connected(done, done.message).status != 0:
            raise TargetError(f"{self.name}: {destination} cannot be written: {done.message}")

    def download(self, source: str, destination: Path) -> None:
        parent, slash, name = source.rstrip("/").rpartition("/")
        # As with scp, links are followed: their targets exist only on the other side.
        tar = ["env", "LC_ALL=C", "tar", "-C", f"{parent}/" if slash else ".", "-chf", "-", f"./{name}"]
        with landing(destination) as folder:
            done = unpack(self._command(tar), folder)
            if self._connected(done, done.message).status != 0 and not _was_still_written(done):
                raise TargetError(f"{self.name}: {source} cannot be fetched: {done.message}")

    def check_reachable(self) -> None:
        done = run_streamed(self._command(["true"]))
        if self._connected(done, done.message).status != 0:
            raise TargetError(f"{self.name} cannot run a command: {done.message}")

    def _command(self, command: Sequence[str]) -> list[str]:
        port = ("-p", str(self.port)) if self.port else ()
        login = f"{self.user}@{self.host}" if self.user else self.host
        return ["ssh", *_OPTIONS, *_CONNECT, *port, "-T", login, "--", shell_line(command)]

    def _connected(self, done: CommandResult, otherwise: str) -> CommandResult:
        if done.status == _BROKEN:
            reason = ssh_error(done) or otherwise
            raise ConnectionLostError(f"{self.name} cannot be reached, or the connection was lost: {reason}")
        return done


def ssh_error(done: CommandResult) -> str | None:
    """The ssh client's last message; other lines are the command's or gcloud's."""
    lines = [line.strip() for line in done.stderr.splitlines() if _SSH_MESSAGE.match(line)]
    return lines[-1] if lines else None


def _was_still_written(done: CommandResult) -> bool:
    lines = done.stderr.splitlines()
    return done.status == 1 and bool(lines) and all(_STILL_WRITTEN.match(line) for line in lines)
