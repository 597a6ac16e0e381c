"""An OpenSSH server of our own on a loopback port, with keys that are thrown away.

The client is the system's, made to read a config of ours by a `ssh` and a `scp` first on PATH: users' own files are
neither read nor written.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
MISSING = next((name for name in (SSHD, "ssh", "scp", "ssh-keygen") if shutil.which(name) is None), None)
_CONFIG = """
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/client_key.pub
ListenAddress {address}:{port}
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
PermitUserEnvironment no
Subsystem sftp internal-sftp
SetEnv PYTHONPATH={root} HF_HUB_OFFLINE=1 PREFIXWISE_HOME={folder}/prefixwise_home OMP_NUM_THREADS=1
"""
_CLIENT = """
Host *
  IdentityFile {folder}/client_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking accept-new
"""


@dataclass(frozen=True)
class SshServer:
    """One that answers."""

    port: int
    process_id: int
    folder: Path

    @property
    def address(self) -> str:
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}"

    @property
    def prefixwise_home(self) -> Path:
        """Where records of servers are, on the other side."""
        return self.folder / "prefixwise_home"

    @property
    def environment(self) -> dict[str, str]:
        """For a process whose ssh is to be ours."""
        return {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def cut(self) -> None:
        """Every connection that there is, as when the network goes."""
        for session in psutil.Process(self.process_id).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # one that has ended since it was listed
                if "sshd" in session.name():
                    session.send_signal(signal.SIGKILL)


@contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    """Until the block is left. Only where MISSING is None."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = write_files(folder, "127.0.0.1", port)
    log = (folder / "sshd.log").open("w")
    process = subprocess.Popen(command, stderr=log)
    try:
        _wait(port, process, folder / "sshd.log")
        yield SshServer(port, process.pid, folder)
    finally:
        for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            each.kill()
        process.terminate()
        process.wait()
        log.close()


def write_files(folder: Path, address: str, port: int) -> list[str]:
    """Keys, settings and programs of both sides; returns the command of the server."""
    (folder / "bin").mkdir(parents=True)
    for name in ("host_key", "client_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    root = Path(__file__).parents[3]
    (folder / "sshd_config").write_text(_CONFIG.format(folder=folder, address=address, port=port, root=root))
    (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))
    for program in ("ssh", "scp"):
        wrapper = folder / "bin" / program
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which(program)} -F {folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # where it separates its privileges
    return [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    tick = threading.Event()
    for _ in range(500):
        if process.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        tick.wait(0.02)
    raise AssertionError(f"sshd did not start: {log.read_text()}")


PYTHON = sys.executable  # the interpreter that the other side uses
