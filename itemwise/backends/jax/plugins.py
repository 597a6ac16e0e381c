"""Could JAX have an accelerator here? Answered from what is installed: importing JAX to ask it takes most of a second,
which a CPU that PyTorch will run on should not wait for. So nothing here imports it.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

_PLUGINS = "jax_plugins"  # the package and the entry points by which jax finds them
_TOLD_BY = ("JAX_PLATFORMS", "PJRT_NAMES_AND_LIBRARY_PATHS", "TPU_LIBRARY_PATH")


def may_have_accelerator() -> bool:
    """False where jax can only find the CPU: it reaches every other device through a plugin, a TPU through libtpu.
    True does not say that the device is there; jax itself does."""
    if "jax" in sys.modules:  # where asking costs nothing
        return True
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    if any(os.environ.get(variable) for variable in _TOLD_BY):
        return True
    return any(find_spec(name) for name in (_PLUGINS, "libtpu")) or bool(entry_points(group=_PLUGINS))
