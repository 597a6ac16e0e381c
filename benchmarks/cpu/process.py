"""A peer's process, from outside: started, asked, and always ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cpu.cases import Role
from benchmarks.cpu.peer import Round
from prefixwise.bench.processes import end_process, ending

_LOG_LINES = 8  # of a process that failed


class PeerFailedError(Exception):
    """It ended before it had answered; the message has the end of its log."""


class Running:
    """A peer that answers one question at a time."""

    def __init__(self, process: subprocess.Popen[str], name: str, log: Path) -> None:
        self._process = process
        self._name = name
        self._log = log

    def wait_until_loaded(self) -> None:
        """Raises PeerFailedError."""
        self._ask({"do": "load"})

    def prepare(self) -> dict[str, Any]:
        """Raises PeerFailedError."""
        return self._ask({"do": "prepare"})

    def run(self, seed: int) -> Round:
        """Raises PeerFailedError."""
        return Round(**self._ask({"do": "round", "seed": seed}))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        try:
            self._process.stdin.write(f"{json.dumps(question)}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        found: dict[str, Any] = json.loads(line)
        return found

    def _failure(self) -> PeerFailedError:
        status = self._process.wait()
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LOG_LINES:]
        return PeerFailedError("\n".join([f"{self._name} {ending(status)}", *last]))


@contextmanager
def running(role: Role, folder: Path) -> Iterator[Running]:
    """One, until the block is left. Its log is in the folder."""
    log_path = folder / f"{role.peer}.log"
    command = [sys.executable, "-m", "benchmarks.cpu.child", json.dumps(asdict(role))]
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8"
        )
        try:
            yield Running(process, role.peer, log_path)
        finally:
            end_process(process)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
