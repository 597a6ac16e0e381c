"""A machine over ssh, through the system's OpenSSH client: its agent, config, known hosts and jump hosts count."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from itemwise.ops.targets.base import ConnectionLostError, Done, OnLine, TargetError, shell_line
from itemwise.ops.targets.processes import run_streamed
from itemwise.ops.targets.transfer import put_in_place

_ADDRESS = re.compile(
    r"(?:(?P<user>[^@/\s-][^@/\s]*)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[\w][\w.-]*)(?::(?P<port>\d{1,5}))?"
)
_BROKEN = 255  # what ssh says of its own failures
# Nobody is asked for a password in the middle of a run; a way that is dead is noticed.
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_CONNECT = ("-o", "ConnectTimeout=20")


@dataclass(frozen=True)
class SshTarget:
    """`ssh://user@host:port`; user and port are the config's where they are not given."""

    host: str
    user: str | None = None
    port: int | None = None
    default_python: str = "~/.itemwise/venv/bin/python"

    @classmethod
    def parse(cls, address: str) -> SshTarget:
        """Of what stands behind `ssh://`. Raises TargetError."""
        found = _ADDRESS.fullmatch(address.removesuffix("/"))
        if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
            raise TargetError(f"a target over ssh must be like ssh://user@host:22, got 'ssh://{address}'")
        return cls(found["host"].strip("[]"), found["user"], int(found["port"]) if found["port"] else None)

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user + '@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    def run(self, command: Sequence[str], on_line: OnLine | None = None) -> Done:
        port = ("-p", str(self.port)) if self.port else ()
        line = ["ssh", *_OPTIONS, *_CONNECT, *port, "-T", self._login, "--", shell_line(command)]
        return self._checked(run_streamed(line, on_line))

    def upload(self, source: Path, destination: str) -> None:
        # Beside the place first: half a file must not be taken for one.
        part = f"{destination}.part"
        self._scp([str(source)], self._remote(part))
        moved = self.run(["mv", "-f", part, destination])
        if moved.status != 0:
            raise TargetError(f"{self.name}: {destination} cannot be written: {moved.words}")

    def download(self, source: str, destination: Path) -> None:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".download-") as folder:
            self._scp([self._remote(source)], folder)
            put_in_place(Path(folder), destination)

    def check_reachable(self) -> None:
        done = self.run(["true"])
        if done.status != 0:
            raise TargetError(f"{self.name} cannot run a command: {done.words}")

    @property
    def _login(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host

    def _remote(self, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user + '@' if self.user else ''}{host}:{path.removeprefix('~/')}"

    def _scp(self, sources: Sequence[str], destination: str) -> None:
        port = ("-P", str(self.port)) if self.port else ()
        done = self._checked(run_streamed(["scp", *_OPTIONS, *_CONNECT, *port, "-r", "-p", *sources, destination]))
        if done.status != 0:
            raise TargetError(f"{self.name}: {' '.join(sources)} cannot be copied to {destination}: {done.words}")

    def _checked(self, done: Done) -> Done:
        if done.status == _BROKEN:
            raise ConnectionLostError(f"{self.name} cannot be reached, or the connection was lost: {done.words}")
        return done
