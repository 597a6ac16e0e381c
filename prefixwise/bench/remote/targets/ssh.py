"""A machine over ssh, through the system's OpenSSH client: its agent, config, known hosts and jump hosts count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixwise.bench.remote.targets.base import ConnectionLostError, Done, OnLine, TargetError, shell_line
from prefixwise.bench.remote.targets.processes import run_streamed
from prefixwise.bench.remote.targets.streams import landing, send, unpack

_ADDRESS = re.compile(
    r"(?:(?P<user>[^@/\s-][^@/\s]*)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[\w][\w.-]*)(?::(?P<port>\d{1,5}))?"
)
_BROKEN = 255  # what ssh says of its own failures
# Nobody is asked for a password in the middle of a run; a way that is dead is noticed.
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_CONNECT = ("-o", "ConnectTimeout=20")
# How ssh's own lines begin, among those of the command that it carries.
_SSH_WORDS = re.compile(
    r"ssh: |ssh_|Connection |client_loop: |kex_exchange|banner exchange|Timeout, |Host key |No .* host key |"
    r"Received disconnect|Disconnected|Unable to negotiate|\S+@\S+: Permission denied|.*[Bb]ad configuration option"
)
# `cat` ends well where the connection is cut, too: only the number of bytes tells half a file from a whole one.
_RECEIVE = (
    'cat > "$1" && if [ $(wc -c < "$1") -eq "$3" ]; then mv -f -- "$1" "$2"; '
    'else echo "error: $(wc -c < "$1") bytes came, expected $3" >&2; exit 1; fi'
)
# What GNU tar says, with status 1, of files that a run under way goes on writing.
_STILL_WRITTEN = re.compile(r".*(file changed as we read it|File removed before we read it)")


@dataclass(frozen=True)
class SshTarget:
    """`ssh://user@host:port`; user and port are the config's where they are not given."""

    host: str
    user: str | None = None
    port: int | None = None
    default_python: str = "~/.prefixwise/venv/bin/python"

    @classmethod
    def parse(cls, address: str) -> SshTarget:
        """Of what stands behind `ssh://`. Raises TargetError."""
        found = _ADDRESS.fullmatch(address.removesuffix("/"))
        if ":" in address.rpartition("@")[0]:  # and it is not shown again
            raise TargetError(
                "a target over ssh takes no password, which all could see here: use a key, ssh://user@host"
            )
        if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
            raise TargetError(f"a target over ssh must be like ssh://user@host:22, got 'ssh://{address}'")
        return cls(found["host"].strip("[]"), found["user"], int(found["port"]) if found["port"] else None)

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user + '@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    def run(self, command: Sequence[str], on_line: OnLine | None = None, *, heartbeat: bool = False) -> Done:
        done = run_streamed(self._command(command), on_line, heartbeat=heartbeat)
        return self._connected(done, "ssh does not say why")  # other lines are the command's

    def upload(self, source: Path, destination: str) -> None:
        # Beside the place first: half a file must not be taken for one.
        try:
            size = source.stat().st_size
        except OSError as error:
            raise TargetError(f"{source} cannot be read: {error.strerror}") from None
        receive = self._command(["sh", "-c", _RECEIVE, "sh", f"{destination}.part", destination, str(size)])
        done = send(receive, source)
        if self._connected(done, done.words).status != 0:
            raise TargetError(f"{self.name}: {destination} cannot be written: {done.words}")

    def download(self, source: str, destination: Path) -> None:
        parent, slash, name = source.rstrip("/").rpartition("/")
        # As with scp, links are followed: what they lead to is on the other side only.
        tar = ["env", "LC_ALL=C", "tar", "-C", f"{parent}/" if slash else ".", "-chf", "-", f"./{name}"]
        with landing(destination) as folder:
            done = unpack(self._command(tar), folder)
            if self._connected(done, done.words).status != 0 and not _was_still_written(done):
                raise TargetError(f"{self.name}: {source} cannot be fetched: {done.words}")

    def check_reachable(self) -> None:
        done = run_streamed(self._command(["true"]))
        if self._connected(done, done.words).status != 0:
            raise TargetError(f"{self.name} cannot run a command: {done.words}")

    def _command(self, command: Sequence[str]) -> list[str]:
        port = ("-p", str(self.port)) if self.port else ()
        login = f"{self.user}@{self.host}" if self.user else self.host
        return ["ssh", *_OPTIONS, *_CONNECT, *port, "-T", login, "--", shell_line(command)]

    def _connected(self, done: Done, otherwise: str) -> Done:
        if done.status == _BROKEN:
            reason = ssh_words(done) or otherwise
            raise ConnectionLostError(f"{self.name} cannot be reached, or the connection was lost: {reason}")
        return done


def ssh_words(done: Done) -> str | None:
    """The client's own last line: those around it are the command's, or gcloud's."""
    lines = [line.strip() for line in done.complaints.splitlines() if _SSH_WORDS.match(line)]
    return lines[-1] if lines else None


def _was_still_written(done: Done) -> bool:
    lines = done.complaints.splitlines()
    return done.status == 1 and bool(lines) and all(_STILL_WRITTEN.match(line) for line in lines)
