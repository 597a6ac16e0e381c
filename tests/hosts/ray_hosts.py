"""A Ray cluster over several hosts, and clients on one of them that record how each of their requests ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from prefixwise.backends.load import FAKE_STEP_VARIABLE
from tests.hosts.network import Host, HostProcess

OK = 200
GCS_PORT = 6379
HTTP_PORT = 8000
TIMEOUT = 180.0  # seconds for what takes a few on a quiet machine
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
PREFIXWISE = (sys.executable, "-m", "prefixwise")
_SMALL = ("--object-store-memory=100000000", "--disable-usage-stats", "--block")


def ray_environment(step_seconds: float) -> dict[str, str]:
    return {
        FAKE_STEP_VARIABLE: str(step_seconds),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
    }


def start_ray(members: Sequence[Host], environment: dict[str, str], cpus: Sequence[int]) -> str:
    """The first host is the head. Returns the cluster's address when all hosts have joined."""
    head = members[0]
    address = f"{head.address}:{GCS_PORT}"
    quiet: Any = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = ("--head", f"--port={GCS_PORT}", "--include-dashboard=false")
    for host, count in zip(members, cpus, strict=True):
        role = first if host is head else (f"--address={address}",)
        host.start(*_RAY, "start", *role, f"--node-ip-address={host.address}", f"--num-cpus={count}", *_SMALL, **quiet)
        if host is head:
            wait_until(lambda: _listens(head), "the head listens")
    wait_until(lambda: len(living(head, environment)) == len(members), "all hosts have joined", pause=2.0)
    return address


def _listens(head: Host) -> bool:
    program = f"import socket; socket.create_connection(('{head.address}', {GCS_PORT}), 1)"
    return subprocess.run(head.space.command(sys.executable, "-c", program), capture_output=True).returncode == 0


def living(head: Host, environment: dict[str, str]) -> list[str]:
    """Addresses of the hosts that Ray takes to be alive."""
    program = (
        f"import json; from ray._raylet import GcsClient; nodes = GcsClient('{head.address}:{GCS_PORT}')"
        ".get_all_node_info(timeout=60).values(); "
        "print(json.dumps([node.node_manager_address for node in nodes if node.state == 0]))"
    )
    command = head.space.command(sys.executable, "-c", program)
    ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT)
    addresses: list[str] = json.loads(ran.stdout) if ran.returncode == 0 else []  # it may still be starting
    return addresses


def wait_until(is_so: Callable[[], bool], what: str, pause: float = 0.2, timeout: float = TIMEOUT) -> None:
    end = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < end, f"{what}: not within {timeout:g} s"
        time.sleep(pause)


class Clients:
    """The clients of `client.py` on a host, and their answers so far."""

    def __init__(self, host: Host, urls: Sequence[str], num_clients: int = 4) -> None:
        self.answers: list[dict[str, Any]] = []
        program = (sys.executable, "-m", "tests.hosts.client", str(num_clients), *urls)
        self._process = host.start(*program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        assert self._process.entry.stdout is not None
        for line in self._process.entry.stdout:
            self.answers.append(json.loads(line))

    def __enter__(self) -> Clients:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the last answers."""
        assert self._process.entry.stdin is not None
        self._process.entry.stdin.close()
        self._reader.join(TIMEOUT)
        assert not self._reader.is_alive(), "a request hangs"

    def wait_for_scores(self, number: int) -> None:
        """So many more."""
        before = len(self.answers)
        wait_until(
            lambda: sum(each["status"] == OK for each in self.answers[before:]) >= number, f"{number} more scores"
        )


def start_serving(head: Host, address: str, environment: dict[str, str], *flags: str) -> HostProcess:
    """`prefixwise cluster serve` on the head; returns when it is ready."""
    command = (*PREFIXWISE, "cluster", "serve", "--address", address, "--backend", "fake", *flags)
    where = ("--host", "0.0.0.0", "--port", str(HTTP_PORT))
    server = head.start(*command, *where, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.entry.stderr is not None
    said = []
    for line in server.entry.stderr:
        said.append(line)
        if "ready on " in line:
            threading.Thread(target=server.entry.stderr.read, daemon=True).start()  # else it would wait for a reader
            return server
    raise AssertionError("".join(said))
