"""`python -m itemwise.harness.with_parent ARGUMENTS`: `itemwise ARGUMENTS` that ends when whoever started it ends.

For children that must not be left over, however their parent ends: the kernel sends them SIGTERM. Only Linux can do
that; elsewhere it is `itemwise` as ever.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

PARENT_VARIABLE = "ITEMWISE_PARENT_PROCESS"
_PR_SET_PDEATHSIG = 1


def command_with_parent(arguments: Sequence[str]) -> list[str]:
    """Of `itemwise ARGUMENTS`, to be started by this process with `parent_environment`."""
    return [sys.executable, "-m", "itemwise.harness.with_parent", *arguments]


def parent_environment() -> dict[str, str]:
    """What tells the child who we are."""
    return {PARENT_VARIABLE: str(os.getpid())}


def _end_with_parent() -> None:
    parent = os.environ.pop(PARENT_VARIABLE, "")
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):  # not on Linux
        return
    if parent and os.getppid() != int(parent):  # it was gone before we could ask
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    _end_with_parent()
    runpy.run_module("itemwise", run_name="__main__", alter_sys=True)
