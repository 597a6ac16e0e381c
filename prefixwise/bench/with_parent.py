"""`python -m prefixwise.bench.with_parent ARGUMENTS`: `prefixwise ARGUMENTS`, ended with its parent process.

For children that must not be left over, however their parent ends: they get SIGTERM.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from prefixwise.host import end_with_parent

PARENT_VARIABLE = "PREFIXWISE_PARENT_PROCESS"


def command_with_parent(arguments: Sequence[str]) -> list[str]:
    """The command of `prefixwise ARGUMENTS`, to be started with `parent_environment`."""
    return [sys.executable, "-m", "prefixwise.bench.with_parent", *arguments]


def parent_environment() -> dict[str, str]:
    """The environment variable with our process id, for the child."""
    return {PARENT_VARIABLE: str(os.getpid())}


if __name__ == "__main__":
    end_with_parent(int(os.environ.pop(PARENT_VARIABLE, os.getppid())))
    runpy.run_module("prefixwise", run_name="__main__", alter_sys=True)
