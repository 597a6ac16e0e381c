"""A Cloud TPU VM or a Compute Engine VM, through the gcloud CLI with its accounts, keys and settings.

Tested against the documented command lines and the help of gcloud 528, not against a real TPU or GPU VM.

`tpu-vm ssh` retries up to ten times when the connection fails, even in the middle of a command, which would then run
twice. So every command carries a token that the VM records, and a command whose token is recorded is refused.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self, final

from prefixwise.bench.remote.targets.base import (
    VENV_PYTHON,
    CommandResult,
    ConnectionLostError,
    OnLine,
    TargetError,
    shell_line,
)
from prefixwise.bench.remote.targets.processes import run_streamed
from prefixwise.bench.remote.targets.ssh import ssh_error
from prefixwise.bench.remote.targets.transfer import landing

_ADDRESS = re.compile(r"(?:(?P<user>[A-Za-z_][\w.-]*)@)?(?P<instance>[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)")
_BROKEN = 255  # ssh's status for its own failures, which gcloud returns
_BEGUN = 254  # our status for a command that has begun before
# gcloud splits an --ssh-flag at spaces, but not an --scp-flag: use flags without spaces for both.
_OPTIONS = ("-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4", "-oConnectTimeout=20")
_GCLOUD_FAILED = "ERROR: (gcloud."
_NO_SSH_YET = "Could not SSH into the instance"  # gcloud's message while the key is not yet installed; status 1
# Paths that a remote shell does not interpret: gcloud's scp may pass paths to one.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9._/~+=@%-]+")
_ERROR_LINES = 4  # of gcloud's error message


@dataclass(frozen=True)
class GcloudTarget(ABC):
    """What both kinds share: all but the gcloud command groups."""

    instance: str
    project: str
    zone: str
    user: str | None = None  # None: gcloud's default
    default_python: str = VENV_PYTHON

    scheme: ClassVar[str]
    access: ClassVar[tuple[str, ...]]  # the group of ssh and scp
    resource: ClassVar[tuple[str, ...]]  # the group of create, describe and delete

    @classmethod
    def parse(cls, address: str, project: str, zone: str) -> Self:
        """Parse the part after `gcloud-tpu://`. Raises TargetError."""
        found = _ADDRESS.fullmatch(address.removesuffix("/"))
        if found is None:
            raise TargetError(f"a gcloud target must be like {cls.scheme}://my-vm, got '{cls.scheme}://{address}'")
        return cls(found["instance"], project, zone, found["user"])

    @property
    def name(self) -> str:
        return f"{self.scheme}://{self._login}"

    def run(self, command: Sequence[str], on_line: OnLine | None = None, *, heartbeat: bool = False) -> CommandResult:
        token = uuid.uuid4().hex
        done = run_streamed(self.ssh_command(once(shell_line(command), token)), on_line, heartbeat=heartbeat)
        if done.status == _BEGUN and token in done.stderr:
            raise ConnectionLostError(f"{self.name}: the connection was lost while a command ran")
        self._connected(done)
        # Status 1 may be the command's, or gcloud's if it could not run the command.
        if done.status != 0 and (error := gcloud_error(done)) is not None:
            raise TargetError(f"{self.name}: {error}")
        return done

    def upload(self, source: Path, destination: str) -> None:
        # To a temporary name first: a partial file must not be mistaken for a complete one.
        part = f"{destination}.part"
        self._scp(str(source.absolute()), self._remote(part))
        moved = self.run(["mv", "-f", part, destination])
        if moved.status != 0:
            raise TargetError(f"{self.name}: {destination} cannot be written: {moved.message}")

    def download(self, source: str, destination: Path) -> None:
        place = self._remote(source)
        with landing(destination) as folder:
            self._scp(place, str(folder))

    def check_reachable(self) -> None:
        done = self.run(["true"])
        if done.status != 0:
            raise TargetError(f"{self.name} cannot run a command: {done.message}")

    def ssh_command(self, line: str) -> list[str]:
        """gcloud adds -T itself for a command, and connects our stdin to it."""
        flags = [f"--ssh-flag={option}" for option in _OPTIONS]
        return ["gcloud", *self.access, "ssh", self._login, *self.place, *flags, f"--command={line}"]

    def scp_command(self, source: str, destination: str) -> list[str]:
        """Copies a file or a whole folder. Local paths are absolute: a relative `a:b` would name a machine."""
        flags = [f"--scp-flag={option}" for option in (*_OPTIONS, "-p")]
        return ["gcloud", *self.access, "scp", "--recurse", *self.place, *flags, source, destination]

    def resource_command(self, verb: str, *flags: str) -> list[str]:
        """create, describe or delete the machine itself."""
        return ["gcloud", *self.resource, verb, self.instance, *self.place, *flags]

    @property
    def place(self) -> tuple[str, ...]:
        """Zone and project for every command line, and no interactive questions."""
        return (f"--zone={self.zone}", f"--project={self.project}", "--quiet")

    @property
    def _login(self) -> str:
        return f"{self.user}@{self.instance}" if self.user else self.instance

    def _remote(self, path: str) -> str:
        if not _PLAIN_PATH.fullmatch(path):
            expected = "only letters, digits and ._/~+=@%-"
            raise TargetError(f"{self.name}: a path for gcloud scp must contain {expected}, got {path!r}")
        return f"{self._login}:{path.removeprefix('~/')}"

    def _scp(self, source: str, destination: str) -> None:
        done = self._connected(run_streamed(self.scp_command(source, destination)))
        if done.status != 0:
            raise TargetError(f"{self.name}: {source} cannot be copied to {destination}: {done.message}")

    def _connected(self, done: CommandResult) -> CommandResult:
        error = gcloud_error(done)
        if done.status == _BROKEN or (done.status != 0 and error is not None and _NO_SSH_YET in error):
            reason = ssh_error(done) or error or done.message
            raise ConnectionLostError(f"{self.name} cannot be reached, or the connection was lost: {reason}")
        return done


@final
class GcloudTpuTarget(GcloudTarget):
    """`gcloud-tpu://NAME`: a Cloud TPU VM with one host (worker 0, gcloud's default)."""

    scheme = "gcloud-tpu"
    access = ("compute", "tpus", "tpu-vm")
    resource = ("compute", "tpus", "tpu-vm")


@final
class GcloudGpuTarget(GcloudTarget):
    """`gcloud-gpu://NAME`: a Compute Engine VM."""

    scheme = "gcloud-gpu"
    access = ("compute",)
    resource = ("compute", "instances")


def once(line: str, token: str) -> str:
    """The line for the remote shell: refuses a command that has begun before; runs it if the disk is full, too."""
    refuse = f"{{ echo {token} began before >&2; exit {_BEGUN}; }}"
    write = f"{{ mkdir -p ~/.prefixwise && echo {token} >> ~/.prefixwise/begun; }} 2>/dev/null"
    return f"grep -qs {token} ~/.prefixwise/begun && {refuse}; {write}; {line}"


def gcloud_error(done: CommandResult) -> str | None:
    """gcloud's own error message; None if stderr is the command's alone."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.startswith(_GCLOUD_FAILED)]
    return " ".join(lines[starts[-1] :][:_ERROR_LINES]) if starts else None
