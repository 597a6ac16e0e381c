"""Could JAX have an accelerator here? The answer comes from the installed packages: importing JAX takes most of a
second, which is wasted where PyTorch will run on the CPU. Nothing here imports JAX.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

_PLUGINS = "jax_plugins"  # the package and the entry points by which jax finds them
_VARIABLES = ("JAX_PLATFORMS", "PJRT_NAMES_AND_LIBRARY_PATHS", "TPU_LIBRARY_PATH", "JAX_FORCE_TPU_INIT")
_PCI_VENDORS = "sys/bus/pci/devices/*/vendor"
_GOOGLE = "0x1ae0"  # of TPUs, and of other devices of Google's machines
_TPU_FILES = ("dev/accel*", "dev/vfio/[0-9]*")


def may_have_accelerator() -> bool:
    """False where jax can only find the CPU: it reaches every other device through a plugin, a TPU through libtpu.
    True does not say that the device is attached; jax itself does."""
    if "jax" in sys.modules:  # then asking jax itself costs nothing
        return True
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    if any(os.environ.get(variable) for variable in _VARIABLES):
        return True
    if find_spec(_PLUGINS) or entry_points(group=_PLUGINS):
        return True
    return find_spec("libtpu") is not None and may_have_tpu()


def may_have_tpu(root: Path = Path("/")) -> bool:
    """False where no device on the machine can be a TPU. libtpu may be installed only to compile for TPUs, and its own
    search is slow and prints warnings."""
    if any(True for pattern in _TPU_FILES for _ in root.glob(pattern)):
        return True
    try:
        return any(vendor.read_text().strip() == _GOOGLE for vendor in root.glob(_PCI_VENDORS))
    except OSError:  # let jax decide
        return True
