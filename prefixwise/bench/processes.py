"""Our own servers and commands as processes: started, waited for, and always stopped.

SIGTERM and a closed terminal become an exception, so that a verb stops its processes on the way out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from prefixwise.bench.with_parent import command_with_parent, parent_environment
from prefixwise.contract.errors import PrefixwiseError

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


_ALL = (*_SIGNALS, signal.SIGINT)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise SystemExit, once. Ignored signals, as by nohup, stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    watched = [each for each, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        for each in watched:  # once is enough: the way out is not to be cut short
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in watched:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in watched:
            signal.signal(each, before[each])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Defer signals until the block ends, for the few lines in which a process could be lost.

    A mask would do the same, but a child that is started in the block would inherit it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {each: signal.getsignal(each) for each in _ALL}
    watched = [each for each, handler in before.items() if callable(handler) or handler is signal.SIG_DFL]
    for each in watched:
        signal.signal(each, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for each in watched:
            signal.signal(each, before[each])
        for number in came[:1]:
            signal.raise_signal(number)


_GRACE_SECONDS = 30.0  # for a command to stop the servers that it has started


def run_logged(arguments: Sequence[str], log: Path) -> int:
    """Run `prefixwise ARGUMENTS` and return its status; its output goes to the log. It ends with this process."""
    command = command_with_parent(arguments)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **parent_environment()},
        )
        try:
            return process.wait()
        except BaseException:
            end_process(process)
            raise


def end_process(process: subprocess.Popen[Any], grace_sec: float = _GRACE_SECONDS) -> None:
    """Terminate a process; kill it after `grace_sec`."""
    process.terminate()
    try:
        process.wait(grace_sec)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_READY = re.compile(r"ready on (http://\S+)")


_SERVER_GRACE_SECONDS = 10.0


class ServerStartError(PrefixwiseError):
    """A server that did not become ready; the message has the end of its log."""


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready."""

    url: str
    log: Path
    process_id: int


@contextmanager
def local_server(
    flags: Sequence[str],
    log: Path,
    *,
    port: int = 0,
    env: Mapping[str, str | None] | None = None,
    on_start: Callable[[int], None] = lambda process_id: None,
    start_timeout_sec: float = 600.0,
) -> Iterator[RunningServer]:
    """`prefixwise serve` with more flags and variables (None: without it), until the block is left.

    Raises ServerStartError.

    Calls `on_start` with the process id at once, while it loads.
    """
    command = command_with_parent(["serve", "--host", "127.0.0.1", "--port", str(port), *flags])
    log.parent.mkdir(parents=True, exist_ok=True)
    process: subprocess.Popen[bytes] | None = None
    try:
        # A signal between the start and the assignment would leave an orphaned server.
        with log.open("w", encoding="utf-8") as output, undisturbed():
            # A session of its own: Ctrl-C ends us, and we end the server.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(env or {}),
                start_new_session=True,
            )
            on_start(process.pid)
        url = _wait_until_ready(process, log, start_timeout_sec)
        yield RunningServer(url, log, process.pid)
    finally:
        if process is not None:
            with undisturbed():
                _stop(process)


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**os.environ, **parent_environment(), **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, start_timeout_sec: float) -> str:
    until = time.monotonic() + start_timeout_sec
    while time.monotonic() < until:
        found = _READY.search(log.read_text(encoding="utf-8", errors="replace"))
        if found:
            return found[1]
        if process.poll() is not None:
            raise ServerStartError(f"the server {ending(process.returncode)}: {_last_lines(log)}")
        time.sleep(0.05)
    raise ServerStartError(f"the server was not ready after {start_timeout_sec:g} s: {_last_lines(log)}")


def ending(returncode: int) -> str:
    """How a process ended, as a verb: by itself, or by which signal."""
    if returncode >= 0:
        return f"ended with status {returncode}"
    name = signal.Signals(-returncode).name
    return f"was ended by {name}{' (probably out of memory)' if name == 'SIGKILL' else ''}"


def _last_lines(log: Path, count: int = 3) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " / ".join(lines[-count:]) or f"{log} is empty"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_SERVER_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
