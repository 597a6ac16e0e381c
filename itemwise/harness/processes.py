"""Commands of our own as processes, ended with us and in time to clean up."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

_GRACE_SECONDS = 30.0  # for a command to stop the servers that it has started


def run_logged(command: Sequence[str], log: Path) -> int:
    """Its status; all it says goes to the log. Whatever ends us ends it, too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
