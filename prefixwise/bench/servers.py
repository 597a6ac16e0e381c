"""Servers of our own on this machine, for the programs that need some: started, waited for, and always stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefixwise.bench.termination import undisturbed
from prefixwise.bench.with_parent import command_with_parent, parent_environment
from prefixwise.contract.errors import PrefixwiseError

_READY = re.compile(r"ready on (http://\S+)")
_GRACE_SECONDS = 10.0


class ServerStartError(PrefixwiseError):
    """A server that did not become ready; the message has the end of its log."""


@dataclass(frozen=True)
class RunningServer:
    """One that answers."""

    url: str
    log: Path
    process_id: int


@contextmanager
def local_server(
    flags: Sequence[str],
    log: Path,
    *,
    port: int = 0,
    env: Mapping[str, str] | None = None,
    on_start: Callable[[int], None] = lambda process_id: None,
    patience_sec: float = 600.0,
) -> Iterator[RunningServer]:
    """`prefixwise serve` with more flags and variables, until the block is left. Raises ServerStartError.

    `on_start` hears the process's id at once, while it loads.
    """
    command = command_with_parent(["serve", "--host", "127.0.0.1", "--port", str(port), *flags])
    log.parent.mkdir(parents=True, exist_ok=True)
    process: subprocess.Popen[bytes] | None = None
    try:
        # A signal between the start and what remembers it would leave a server that nobody knows of.
        with log.open("w", encoding="utf-8") as output, undisturbed():
            # A session of its own: Ctrl-C is for us, and we tell the server.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **parent_environment(), **(env or {})},
                start_new_session=True,
            )
            on_start(process.pid)
        url = _wait_until_ready(process, log, patience_sec)
        yield RunningServer(url, log, process.pid)
    finally:
        if process is not None:
            with undisturbed():
                _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, patience_sec: float) -> str:
    until = time.monotonic() + patience_sec
    while time.monotonic() < until:
        found = _READY.search(log.read_text(encoding="utf-8", errors="replace"))
        if found:
            return found[1]
        if process.poll() is not None:
            raise ServerStartError(f"the server ended with status {process.returncode}: {_last_lines(log)}")
        time.sleep(0.05)
    raise ServerStartError(f"the server was not ready after {patience_sec:g} s: {_last_lines(log)}")


def _last_lines(log: Path, count: int = 3) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " / ".join(lines[-count:]) or f"{log} is empty"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
