"""Commands of our own as processes, ended with us and in time to clean up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefixwise.bench.with_parent import command_with_parent, parent_environment

_GRACE_SECONDS = 30.0  # for a command to stop the servers that it has started


def run_logged(arguments: Sequence[str], log: Path) -> int:
    """The status of `prefixwise ARGUMENTS`; all it says goes to the log. Whatever ends us ends it, too."""
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
    """Asked to, and made to where it does not listen in time."""
    process.terminate()
    try:
        process.wait(grace_sec)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
