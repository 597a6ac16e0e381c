"""A Cloud TPU VM or a Compute Engine VM, through the gcloud CLI: its accounts, keys and settings count.

Held to the documented command lines and to the help of gcloud 528; it has not been run against a real TPU or GPU VM.

`tpu-vm ssh` tries again, up to ten times, whenever the connection fails: also in the middle of a command, which would
then run a second time. So every command carries a token that the VM writes down, and one that began before is refused.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self, final

from prefixwise.bench.remote.targets.base import ConnectionLostError, Done, OnLine, TargetError, shell_line
from prefixwise.bench.remote.targets.processes import run_streamed
from prefixwise.bench.remote.targets.ssh import ssh_words
from prefixwise.bench.remote.targets.streams import landing

_ADDRESS = re.compile(r"(?:(?P<user>[A-Za-z_][\w.-]*)@)?(?P<instance>[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)")
_BROKEN = 255  # what ssh says of its own failures; gcloud hands it on
_BEGUN = 254  # what our line says of a command that began before
# gcloud cuts an --ssh-flag at spaces and an --scp-flag not at all: one word each, for both.
_OPTIONS = ("-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4", "-oConnectTimeout=20")
_GCLOUD_FAILED = "ERROR: (gcloud."
_NO_SSH_YET = "Could not SSH into the instance"  # gcloud's word for a key that is not there yet; status 1
# What no shell at the other end reads as more than a name: the scp that gcloud runs may hand paths to one.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9._/~+=@%-]+")
_KEPT_WORDS = 4  # lines of an error of gcloud's that say what it is


@dataclass(frozen=True)
class GcloudTarget(ABC):
    """What the two kinds share: all but the words that stand before `ssh` and before `create`."""

    instance: str
    project: str
    zone: str
    user: str | None = None  # gcloud's own choice where it is not given
    default_python: str = "~/.prefixwise/venv/bin/python"

    scheme: ClassVar[str]
    access: ClassVar[tuple[str, ...]]  # the group of ssh and scp
    resource: ClassVar[tuple[str, ...]]  # the group of create, describe and delete

    @classmethod
    def parse(cls, address: str, project: str, zone: str) -> Self:
        """Of what stands behind `gcloud-tpu://`. Raises TargetError."""
        found = _ADDRESS.fullmatch(address.removesuffix("/"))
        if found is None:
            raise TargetError(f"a target of gcloud must be like {cls.scheme}://my-vm, got '{cls.scheme}://{address}'")
        return cls(found["instance"], project, zone, found["user"])

    @property
    def name(self) -> str:
        return f"{self.scheme}://{self._login}"

    def run(self, command: Sequence[str], on_line: OnLine | None = None, *, heartbeat: bool = False) -> Done:
        token = uuid.uuid4().hex
        done = run_streamed(self.ssh_command(once(shell_line(command), token)), on_line, heartbeat=heartbeat)
        if done.status == _BEGUN and token in done.complaints:
            raise ConnectionLostError(f"{self.name}: the connection was lost while a command ran")
        self._connected(done)
        # A status 1 may be the command's or gcloud's, which did not get to run it.
        if done.status != 0 and (told := gcloud_words(done)) is not None:
            raise TargetError(f"{self.name}: {told}")
        return done

    def upload(self, source: Path, destination: str) -> None:
        # Beside the place first: half a file must not be taken for one.
        part = f"{destination}.part"
        self._scp(str(source.absolute()), self._remote(part))
        moved = self.run(["mv", "-f", part, destination])
        if moved.status != 0:
            raise TargetError(f"{self.name}: {destination} cannot be written: {moved.words}")

    def download(self, source: str, destination: Path) -> None:
        place = self._remote(source)
        with landing(destination) as folder:
            self._scp(place, str(folder))

    def check_reachable(self) -> None:
        done = self.run(["true"])
        if done.status != 0:
            raise TargetError(f"{self.name} cannot run a command: {done.words}")

    def ssh_command(self, line: str) -> list[str]:
        """gcloud adds -T itself where there is a command, and hands our stdin on to it."""
        flags = [f"--ssh-flag={option}" for option in _OPTIONS]
        return ["gcloud", *self.access, "ssh", self._login, *self.place, *flags, f"--command={line}"]

    def scp_command(self, source: str, destination: str) -> list[str]:
        """A file, or a folder with all that is in it. Paths here are absolute: a relative `a:b` is a machine's."""
        flags = [f"--scp-flag={option}" for option in (*_OPTIONS, "-p")]
        return ["gcloud", *self.access, "scp", "--recurse", *self.place, *flags, source, destination]

    def resource_command(self, verb: str, *flags: str) -> list[str]:
        """create, describe, delete: of the machine itself."""
        return ["gcloud", *self.resource, verb, self.instance, *self.place, *flags]

    @property
    def place(self) -> tuple[str, ...]:
        """Where every command line finds it; and nobody is asked in the middle of a run."""
        return (f"--zone={self.zone}", f"--project={self.project}", "--quiet")

    @property
    def _login(self) -> str:
        return f"{self.user}@{self.instance}" if self.user else self.instance

    def _remote(self, path: str) -> str:
        if not _PLAIN_PATH.fullmatch(path):
            expected = "letters, digits and ._/~+=@%- alone"
            raise TargetError(f"{self.name}: a path to copy through gcloud must have {expected}, got {path!r}")
        return f"{self._login}:{path.removeprefix('~/')}"

    def _scp(self, source: str, destination: str) -> None:
        done = self._connected(run_streamed(self.scp_command(source, destination)))
        if done.status != 0:
            raise TargetError(f"{self.name}: {source} cannot be copied to {destination}: {done.words}")

    def _connected(self, done: Done) -> Done:
        told = gcloud_words(done)
        if done.status == _BROKEN or (done.status != 0 and told is not None and _NO_SSH_YET in told):
            reason = ssh_words(done) or told or done.words
            raise ConnectionLostError(f"{self.name} cannot be reached, or the connection was lost: {reason}")
        return done


@final
class GcloudTpuTarget(GcloudTarget):
    """`gcloud-tpu://NAME`: a Cloud TPU VM of one host, which is worker 0, gcloud's default."""

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
    """For the shell there: refused where it began before; run all the same where the disk has no room for the token."""
    refuse = f"{{ echo {token} began before >&2; exit {_BEGUN}; }}"
    write = f"{{ mkdir -p ~/.prefixwise && echo {token} >> ~/.prefixwise/begun; }} 2>/dev/null"
    return f"grep -qs {token} ~/.prefixwise/begun && {refuse}; {write}; {line}"


def gcloud_words(done: Done) -> str | None:
    """What gcloud itself complained of; None where the complaints are the command's alone."""
    lines = [line.strip() for line in done.complaints.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.startswith(_GCLOUD_FAILED)]
    return " ".join(lines[starts[-1] :][:_KEPT_WORDS]) if starts else None
