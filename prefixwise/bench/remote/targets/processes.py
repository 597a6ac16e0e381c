"""Runs a command as a local process, with its stderr line by line: the command itself, or an ssh or gcloud client."""

from __future__ import annotations

import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from prefixwise.bench.processes import end_process
from prefixwise.bench.remote.spec import HEARTBEAT_SECONDS
from prefixwise.bench.remote.targets.base import CommandResult, OnLine, TargetError

_GRACE_SECONDS = 45.0  # for the command to stop what it has started
_MAX_STDERR_LINES = 50


def run_streamed(command: Sequence[str], on_line: OnLine | None = None, *, heartbeat: bool = False) -> CommandResult:
    """Run to the end. Its stdin is a pipe that closes when this process ends. Raises TargetError if it cannot start."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise TargetError(f"{command[0]} cannot be run: {error.strerror}") from None
    listener = _Listener(process, on_line)
    ended = threading.Event()
    if heartbeat:
        threading.Thread(target=_beat, args=(process.stdin, ended), daemon=True).start()
    try:
        assert process.stdout is not None
        output = process.stdout.read()
        status = process.wait()
        listener.join()
    except BaseException:
        _end(process)
        raise
    finally:
        ended.set()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
    if listener.failure is not None:
        raise listener.failure
    return CommandResult(status, output.decode("utf-8", "replace"), "\n".join(listener.lines))


class _Listener(threading.Thread):
    """Reads stderr to its end, even after `on_line` has failed: a full pipe would block the command."""

    def __init__(self, process: subprocess.Popen[bytes], on_line: OnLine | None) -> None:
        super().__init__(daemon=True)
        self.lines: deque[str] = deque(maxlen=_MAX_STDERR_LINES)
        self.failure: BaseException | None = None
        self._process = process
        self._on_line = on_line
        self.start()

    def run(self) -> None:
        """The thread's work."""
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            self.lines.append(line)
            if self._on_line is None or self.failure is not None:
                continue
            try:
                self._on_line(line)
            except BaseException as error:  # raised again by run_streamed
                self.failure = error
                self._process.terminate()


def _beat(stdin: IO[bytes] | None, ended: threading.Event) -> None:
    assert stdin is not None
    with suppress(OSError, ValueError):  # the process has ended, or the pipe is closed
        while not ended.wait(HEARTBEAT_SECONDS):
            stdin.write(b".")
            stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close stdin, which ends a command that watches it; then send a signal."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    end_process(process, _GRACE_SECONDS)
