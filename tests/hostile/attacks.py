"""A hostile client: raw connections to a real server process, and what they cost that process.

Every attack is shown by its cost, not by how long a test waits: the peak of the server's memory, the processor time
it spent, how many bytes it took, and whether it still answers. `cost_of` measures the block:

    with cost_of(server) as cost:
        send_all(server, endless_header(60 * MB))
    assert cost.bytes < 50 * MB

The longest time that `/health` took is measured, too (`cost.stall`); only tests of a quiet machine may judge by it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.server.server_process import ServerProcess

MB = 10**6
TIMEOUT = 60  # seconds for anything that takes milliseconds on a quiet machine
HEAD = b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@dataclass
class Cost:
    """What a server spent while a block ran. The values are there when the block has ended."""

    bytes: int = 0  # peak resident memory above that at the start
    cpu_seconds: float = 0.0
    stall: float = 0.0  # the longest time that /health took, in seconds


@contextmanager
def cost_of(server: ServerProcess) -> Iterator[Cost]:
    """Measures from outside, through /proc, while `/health` is asked again and again on one connection."""
    cost, stop = Cost(), threading.Event()
    watcher = threading.Thread(target=_watch_health, args=(server.port, cost, stop))
    process = Path(f"/proc/{server.process.pid}")
    (process / "clear_refs").write_text("5")  # the peak begins anew
    memory, cpu = _status(process, "VmRSS"), _cpu_seconds(process)
    watcher.start()
    try:
        yield cost
    finally:
        stop.set()
        watcher.join(TIMEOUT)
        cost.bytes = max(0, _status(process, "VmHWM") - memory)
        cost.cpu_seconds = _cpu_seconds(process) - cpu


def _watch_health(port: int, cost: Cost, stop: threading.Event) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    while not stop.wait(0.01):
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except (OSError, HTTPException):
            connection.close()  # it made room for another one; the next request connects again
        cost.stall = max(cost.stall, time.monotonic() - began)
    connection.close()


def _status(process: Path, name: str) -> int:
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _cpu_seconds(process: Path) -> float:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)


@contextmanager
def many_connections(server: ServerProcess, number: int) -> Iterator[list[socket.socket]]:
    """So many that are silent, until the block ends."""
    with ExitStack() as stack:
        yield [stack.enter_context(connect(server)) for _ in range(number)]


def send_all(server: ServerProcess, parts: Iterable[bytes]) -> tuple[int, bytes]:
    """Send as long as the server takes it: how many bytes it took, and what it answered."""
    sent = 0
    with connect(server) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                sent += len(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return sent, read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes the connection."""
    answer = b""
    try:
        while part := connection.recv(1 << 16):
            answer += part
    except ConnectionResetError:
        pass  # it closed while bytes were on their way
    return answer


def repeated(head: bytes, part: bytes, size: int) -> Iterator[bytes]:
    """The head, then `size` bytes of the part over and over, in pieces of about 64 KiB."""
    yield head
    piece = part * max(1, (1 << 16) // len(part))
    for _ in range(-(-size // len(piece))):
        yield piece
