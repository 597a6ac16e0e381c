"""What must be settled before jax is imported: the compiler for TPUs is libtpu, which must not look for a TPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

from prefixwise.contract.errors import BackendError
from prefixwise.host import install_command

# jax stays on the CPU, and libtpu asks nobody where it runs.
_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else there is one process of it on a machine: it is meant to own a TPU
    "TPU_STDERR_LOG_LEVEL": "3",  # what fails is reported
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def missing_packages() -> list[str]:
    """What has to be installed first."""
    return [name for name in ("jax", "libtpu") if find_spec(name) is None]


def prepare_compiler() -> None:
    """For this process, which is not to use a TPU from then on. Raises BackendError where a package is missing."""
    missing = missing_packages()
    if missing:
        raise BackendError(
            f"compiling for TPUs needs {' and '.join(missing)}; install it with: {install_command('tpu-aot')}"
        )
    os.environ.update(_VARIABLES)
