"""A real server on a real port: starts it, waits until it is ready, ends it.

`server_process` is `tests.server.fake_server`, whose model is a formula; `real_server` is `prefixwise serve`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep

import psutil

SCHEMATHESIS = (
    *(sys.executable, "-m", "schemathesis.cli", "run"),
    "--checks=all",
    # Ids beyond the vocabulary, or labels that are no token, are for the model to refuse, not for a schema.
    "--exclude-checks=positive_data_acceptance",
)
FAKE_PROGRAM = ("tests.server.fake_server",)
REAL_PROGRAM = ("prefixwise", "serve", "--device=cpu")
WORKERS = "--http-workers=2"
Form = tuple[str, ...]  # options of one process for all, or of HTTP workers
_POLL_TIMEOUT = 60  # seconds for anything that takes milliseconds on a quiet machine


class ServerProcess:
    """A running process, and what it has logged."""

    def __init__(self, *options: str, program: Sequence[str] = FAKE_PROGRAM) -> None:
        command = [sys.executable, "-m", *program, "--port=0", *options]
        env = {**os.environ, "XLA_FLAGS": ""}  # as a user's, not as this process has them
        env.pop("PREFIXWISE_API_KEY", None)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=env)
        self.log: list[str] = []
        self.reads_log = threading.Event()  # cleared: nobody reads its stderr
        self.reads_log.set()
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line.rstrip("\n"))
            self.reads_log.wait()
        self._lines.put(None)

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """The first line from here on that has it."""
        while True:
            try:
                line = self._lines.get(timeout=_POLL_TIMEOUT)
            except Empty:
                line = None
            assert line is not None, f"no {pattern!r} in the log:\n" + "\n".join(self.log)
            self.log.append(line)
            found = re.search(pattern, line)
            if found is not None:
                return found

    def wait_until_listening(self) -> None:
        self.url = self.wait_for_line(r"listening on (http://\S+)")[1]

    def wait_until_ready(self) -> None:
        self.wait_until_listening()
        self.wait_for_line(r"ready on http")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status; after it the log is complete."""
        status = self.process.wait(_POLL_TIMEOUT)
        self._reader.join(_POLL_TIMEOUT)
        while (line := self._lines.get()) is not None:
            self.log.append(line)
        return status


@contextmanager
def server_process(*options: str, wait: bool = True, program: Sequence[str] = FAKE_PROGRAM) -> Iterator[ServerProcess]:
    server = ServerProcess(*options, program=program)
    try:
        if wait:
            server.wait_until_ready()
        yield server
    finally:
        server.process.kill()
        server.reads_log.set()
        server.process.wait(_POLL_TIMEOUT)
        server._reader.join(_POLL_TIMEOUT)
        if server.process.stderr is not None:
            server.process.stderr.close()


@contextmanager
def real_server(*options: str, wait: bool = True) -> Iterator[ServerProcess]:
    """`python -m prefixwise serve` with these options; a --port among them counts."""
    with server_process(*options, wait=wait, program=REAL_PROGRAM) as server:
        yield server


def process_of(server: ServerProcess, name: str) -> int:
    """The newest process of a server with HTTP workers that has this name in the log."""
    found = [re.search(rf"started {name}, process (\d+)", line) for line in server.log]
    return int(next(each for each in reversed(found) if each is not None)[1])


def socket_folder(server: ServerProcess, name: str = "the engine process") -> Path:
    """Where its processes meet, once the one of this name listens there."""
    process, folders = psutil.Process(process_of(server, name)), set[Path]()

    def is_found() -> bool:
        addresses = [Path(str(each.laddr)) for each in process.net_connections("unix")]
        folders.update(each.parent for each in addresses if each.parent.name.startswith("prefixwise-"))
        return bool(folders)

    until(is_found)
    (folder,) = folders
    return folder


@contextmanager
def frozen(process: int) -> Iterator[None]:
    """SIGSTOP stands for a native call that keeps the interpreter lock, or memory that does not come."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def until(condition: Callable[[], bool]) -> None:
    """Wait for it. What the server logs is a better event, if it does: `wait_for_line`."""
    limit = monotonic() + _POLL_TIMEOUT
    while not condition():
        assert monotonic() < limit
        sleep(0.01)
