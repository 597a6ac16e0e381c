"""A command as a process here: local, or a client that carries it to another machine."""

from __future__ import annotations

import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO

from itemwise.ops.targets.base import Done, OnLine, TargetError

_GRACE_SECONDS = 45.0  # for what it started to be stopped
_KEPT_LINES = 50


def run_streamed(command: Sequence[str], on_line: OnLine | None = None) -> Done:
    """Its stdin is a pipe that closes with us, whatever ends us. Raises TargetError where there is no such program."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise TargetError(f"{command[0]} cannot be run: {error.strerror}") from None
    complaints: deque[str] = deque(maxlen=_KEPT_LINES)

    def hear(line: str) -> None:
        complaints.append(line)
        if on_line is not None:
            on_line(line)

    listener = threading.Thread(target=_each_line, args=(process.stderr, hear), daemon=True)
    listener.start()
    try:
        assert process.stdout is not None
        output = process.stdout.read()
        status = process.wait()
        listener.join()
    except BaseException:
        _end(process)
        raise
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return Done(status, output.decode("utf-8", "replace"), "\n".join(complaints))


def _each_line(pipe: IO[bytes] | None, hear: OnLine) -> None:
    assert pipe is not None
    for line in pipe:
        hear(line.decode("utf-8", "replace").rstrip("\r\n"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """In two steps: the pipe closes, which ends what watches it; then a signal."""
    if process.stdin is not None:
        process.stdin.close()
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
