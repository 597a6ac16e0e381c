"""A fork sees what a fresh interpreter would see. Run as a program, this module tells what it sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.warm_program import _POPEN, IS_WARM, WarmPopen

PROGRAM = [sys.executable, "-m", "tests.test_warm_program"]
STATUS = 3


def seen() -> dict[str, Any]:
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return {
        "arguments": sys.argv,
        "shown arguments": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "path": sys.path,
        "parent": os.getppid(),
        "process group is its own": os.getpgid(0) == os.getpid(),
        "session is its own": os.getsid(0) == os.getpid(),
        "files": sorted(open_files()),
        "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "streams": [(each.encoding, each.errors, each.line_buffering, each.fileno()) for each in streams],
        "input": sys.stdin.read(),
        "module": __name__,
    }


def open_files() -> Iterator[str]:
    """Their numbers, without those of the processor's caches, which PyTorch leaves open on ARM when it is imported."""
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder itself, which is closed by now
            if not each.readlink().is_relative_to("/sys/devices/system/cpu"):
                yield each.name


def told_by(popen: type[subprocess.Popen[Any]], **options: Any) -> dict[str, Any]:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with popen([*PROGRAM, "one word", ""], text=True, **pipes, **options) as process:
        out, err = process.communicate("typed", timeout=60)
    assert (process.returncode, err) == (STATUS, "said\n")
    told: dict[str, Any] = json.loads(out)
    return told


@pytest.mark.skipif(not IS_WARM, reason="no program is forked")
@pytest.mark.parametrize("alone", [False, True])
def test_a_fork_sees_what_a_fresh_interpreter_sees(alone: bool) -> None:
    options = {"env": {**os.environ, "MORE": "of it"}, "start_new_session": alone}
    assert told_by(WarmPopen, **options) == told_by(_POPEN, **options)
    assert told_by(WarmPopen, **options)["parent"] == os.getpid()


@pytest.mark.skipif(not IS_WARM, reason="no program is forked")
def test_a_signal_ends_it_and_the_status_says_so() -> None:
    with WarmPopen([*PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


if __name__ == "__main__":
    print(json.dumps(seen()))
    print("said", file=sys.stderr)
    sys.exit(STATUS)
