"""The hosts themselves: what separates them, and that cables and hosts fail as real ones do."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from tests.hosts.network import Host, hosts

pytestmark = pytest.mark.hosts

SERVER = (
    "import socket; s = socket.create_server(('', 7)); print('up', flush=True)\nwhile 1: s.accept()[0].sendall(b'x')"
)
CLIENT = "import socket, sys; print(socket.create_connection(('host2', 7), float(sys.argv[1])).recv(1))"


def reaches(host: Host, seconds: float = 30.0) -> bool:
    command = host.space.command(sys.executable, "-c", CLIENT, str(seconds))
    return subprocess.run(command, capture_output=True).returncode == 0


def test_hosts_reach_each_other_until_a_cable_is_out_and_end_without_a_trace() -> None:
    with hosts(2) as (first, second):
        inits = [host.space.pid for host in (first, second)]
        assert first.run("hostname") == "host1\n"
        server = second.start(sys.executable, "-c", SERVER, stdout=subprocess.PIPE)
        assert server.entry.stdout is not None
        assert server.entry.stdout.readline() == b"up\n"
        assert reaches(first)
        second.cut()
        assert not reaches(first, 0.5)
        second.join()
        assert reaches(first)
        second.impair(delay=0.3, loss=0.0)
        start = time.monotonic()
        assert reaches(first)
        assert time.monotonic() - start > 0.3
        second.repair()
        second.die()
        assert not reaches(first, 0.5)
        assert server.entry.wait(30) != 0
    assert not any(map(psutil.pid_exists, inits))
