"""The server's process, from outside: started, waited for, and always ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.goals.cases import Settings
from prefixwise.bench.processes import end_process

_READY = re.compile(r"ready on (http://\S+)")
_LOG_LINES = 15  # of a server that failed


class ServerFailedError(Exception):
    """It ended before it was ready; the message has the end of its log."""


@dataclass(frozen=True)
class Running:
    """A server that has measured its engine, and where it answers; None where nothing is asked of it."""

    url: str | None
    found: dict[str, Any]  # what it has written: see `server.open_engine`


@contextmanager
def running(settings: Settings, folder: Path) -> Iterator[Running]:
    """One, until the block is left. Raises ServerFailedError."""
    log_path, result = folder / f"{settings.backend}.log", folder / f"{settings.backend}.json"
    command = [sys.executable, "-m", "benchmarks.goals.server", json.dumps(asdict(settings)), str(result)]
    with log_path.open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), stderr=log)
        try:
            url = _wait(server, log_path, ends=not settings.http_cases)
            yield Running(url, json.loads(result.read_text(encoding="utf-8")))
        finally:
            end_process(server)


def _wait(server: subprocess.Popen[bytes], log: Path, *, ends: bool) -> str | None:
    """Until it is ready, or, where it is to end by itself, until it has."""
    while True:
        status = server.poll()
        text = log.read_text(encoding="utf-8", errors="replace")
        found = _READY.search(text)
        if status is None and found is None:
            time.sleep(0.1)
            continue
        if found:
            return found[1]
        if status or not ends:
            last = "\n".join(text.strip().splitlines()[-_LOG_LINES:])
            raise ServerFailedError(f"the server ended with status {status}:\n{last}")
        return None
