"""Several hosts on this machine: namespaces with a network, processes, a name and folders of their own, and a switch.

    10.77.0.1 host1 ---+
    10.77.0.2 host2 ---+--- bridge, in a namespace of its own        nothing leads out of it
    10.77.0.3 host3 ---+

`unshare` makes the namespaces, as root or in a user namespace. A host is a process and all that it holds: it ends when
this process ends, however that may be, and everything on it with it. `reason_not_allowed` says why there can be none.

The kernel need not have `netem`: a relay (`relay.py`) delays and drops the frames of a host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SUBNET = "10.77.0"
_TOOLS = ("unshare", "nsenter", "ip", "mount")
_USER = ("--user", "--map-root-user")
# Process 1: collects orphans, and ends when the test's end of its standard input is closed.
_INIT = """
import os, signal, sys
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
signal.signal(signal.SIGCHLD, reap)
print("ready", flush=True)
sys.stdin.read()
"""


@cache
def reason_not_allowed() -> str | None:
    """Why this machine lets us make no hosts; None where it does."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux)"
    try:
        with hosts(2) as (first, second):
            second.run("true")
            first.run("python3", "-c", "pass")
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return f"this machine allows no network namespaces: {str(detail).strip()}"
    return None


def _user_flags() -> tuple[str, ...]:
    """Root needs no user namespace, and some programs (sshd) do not run in one."""
    return () if os.geteuid() == 0 else _USER


class _Namespace:
    """Namespaces that a process holds; commands run in them."""

    def __init__(self, flags: Sequence[str], inside: _Namespace | None = None) -> None:
        user = _user_flags() if inside is None else ()
        entry = () if inside is None or not _user_flags() else ("nsenter", *inside._target, *inside._enter_user)
        command = (*entry, "unshare", *user, *flags, "--fork", "--kill-child", sys.executable, "-c", _INIT)
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            raise OSError(self._holder.stderr.read().strip())
        self.pid = psutil.Process(self._holder.pid).children(recursive=True)[-1].pid
        self._enter = [*self._enter_user, *(flag for flag in flags if flag != "--mount-proc")]

    @property
    def _target(self) -> list[str]:
        return ["--target", str(self.pid)]

    @property
    def _enter_user(self) -> list[str]:
        return ["--user", "--preserve-credentials"] if _user_flags() else []

    def command(self, *command: str) -> list[str]:
        """The command, to be run in these namespaces, in the repository's folder."""
        return ["nsenter", *self._target, *self._enter, "--", "env", "-C", str(ROOT), *command]

    def run(self, *command: str, timeout: float = 60.0, **options: Any) -> str:
        """Run to the end; returns the output. Raises CalledProcessError."""
        ran = subprocess.run(
            self.command(*command), capture_output=True, text=True, timeout=timeout, check=True, **options
        )
        return str(ran.stdout)

    def close(self) -> None:
        """The kernel ends every process of the namespaces with their first one."""
        if self._holder.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._holder.communicate()


@dataclass
class Host:
    """One host. Its name, /tmp/ray, /dev/shm, /etc/hosts and processes are its own; other files are this machine's."""

    name: str
    address: str
    port: str  # its end of the cable, on the switch
    space: _Namespace
    switch: _Namespace
    relay: subprocess.Popen[bytes] | None = None
    processes: list[HostProcess] = field(default_factory=list)

    def run(self, *command: str, **options: Any) -> str:
        return self.space.run(*command, **options)

    def start(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> HostProcess:
        """Start a process on this host."""
        environment = {**os.environ, **(env or {})}
        process = HostProcess(subprocess.Popen(self.space.command(*command), env=environment, **options), command[0])
        self.processes.append(process)
        return process

    def cut(self) -> None:
        """Pull the cable: no frame comes through, and nobody is told."""
        self.switch.run("ip", "link", "set", self.port, "nomaster")

    def join(self) -> None:
        self.switch.run("ip", "link", "set", self.port, "master", "bridge")

    def die(self) -> None:
        """As by a power failure: no process says goodbye to anyone."""
        self.cut()
        self.space.close()

    def impair(self, *, delay: float, loss: float) -> None:
        """Delay all frames that this host sends, in seconds, and drop a share of them."""
        inner, outer = f"{self.port}-in", f"{self.port}-out"
        self.switch.run("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
        for name in (inner, outer):
            self.switch.run("ip", "link", "set", name, "up")
        self.cut()
        self.switch.run("ip", "link", "set", outer, "master", "bridge")
        program = [sys.executable, "-m", "tests.hosts.relay", self.port, inner, str(delay), str(loss)]
        self.relay = subprocess.Popen(self.switch.command(*program), stdout=subprocess.PIPE)
        assert self.relay.stdout is not None
        if self.relay.stdout.readline() != b"ready\n":
            raise OSError("the relay did not start")

    def repair(self) -> None:
        """Undo `impair`."""
        assert self.relay is not None
        self.relay.kill()
        self.relay.communicate()
        self.relay = None
        self.switch.run("ip", "link", "del", f"{self.port}-in")
        self.join()

    def close(self) -> None:
        if self.relay is not None:
            self.relay.kill()
            self.relay.communicate()
        self.space.close()
        for process in self.processes:
            process.reap()


class HostProcess:
    """A process on a host, behind the `nsenter` that started it there."""

    def __init__(self, entry: subprocess.Popen[Any], title: str) -> None:
        self.entry = entry
        self.title = title

    def send_signal(self, number: signal.Signals) -> None:
        for child in psutil.Process(self.entry.pid).children():
            child.send_signal(number)

    def end(self, timeout: float = 60.0) -> int:
        """Ask it to end; returns its exit status."""
        if self.entry.poll() is None:
            self.send_signal(signal.SIGTERM)
        return self.entry.wait(timeout)

    def reap(self) -> None:
        """After its host has ended."""
        if self.entry.poll() is None:
            self.entry.kill()
        self.entry.wait()
        for stream in (self.entry.stdin, self.entry.stdout, self.entry.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts at one switch: host1 at 10.77.0.1, and so on."""
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "hosts")
        lines = ["127.0.0.1 localhost", *(f"{SUBNET}.{number} host{number}" for number in range(1, count + 1))]
        names.write_text("\n".join(lines) + "\n")
        switch = _Namespace(["--net"])
        made: list[Host] = []
        try:
            switch.run("ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0", "stp_state", "0")
            switch.run("ip", "link", "set", "bridge", "up")
            for number in range(1, count + 1):
                made.append(_make_host(number, switch, names))
            yield made
        finally:
            for host in made:
                host.close()
            switch.close()


def _make_host(number: int, switch: _Namespace, names: Path) -> Host:
    space = _Namespace(["--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc"], inside=switch)
    host = Host(f"host{number}", f"{SUBNET}.{number}", f"port{number}", space, switch)
    try:
        _set_up(host, names)
    except BaseException:
        space.close()
        raise
    return host


def _set_up(host: Host, names: Path) -> None:
    cable = ["ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", str(host.space.pid)]
    host.switch.run(*cable)
    host.switch.run("ip", "link", "set", host.port, "master", "bridge", "up")
    Path("/tmp/ray").mkdir(exist_ok=True)
    lines = [
        f"hostname {host.name}",
        f"mount --bind {names} /etc/hosts",
        "mount -t tmpfs tmpfs /tmp/ray",
        "mount -t tmpfs tmpfs /dev/shm",
        "ip link set lo up",
        f"ip address add {host.address}/24 dev eth0",
        "ip link set eth0 up",
        "ip route add default dev eth0",
    ]
    host.run("sh", "-ec", "\n".join(lines))
    host.run(sys.executable, "-m", "tests.hosts.relay", "eth0")
