"""Choosing and loading a backend. Frameworks are imported here, when one is chosen, and not before."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec

from itemwise.backends.base import Backend
from itemwise.contract.errors import BackendError
from itemwise.models.checkpoint import Checkpoint

log = logging.getLogger("itemwise")


@dataclass(frozen=True)
class BackendOptions:
    """Which backend, where, and how exact."""

    backend: str = "auto"  # auto, torch
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    tp_size: int = 1
    dp_size: int = 1
    batch_invariant: bool = False


def load_backend(checkpoint: Checkpoint, options: BackendOptions) -> Backend:
    """Load the weights onto the device. Raises BackendError where the choice cannot run here."""
    if options.backend not in ("auto", "torch"):
        raise BackendError(f"unknown backend {options.backend!r}; expected auto or torch")
    if options.tp_size != 1 or options.dp_size != 1:
        raise BackendError(
            "the torch backend runs on one device: expected tp_size=1 and dp_size=1, "
            f"got tp_size={options.tp_size} and dp_size={options.dp_size}"
        )
    if find_spec("torch") is None:
        raise BackendError('PyTorch is not installed; install it with: pip install "itemwise[torch]"')
    from itemwise.backends.torch.backend import TorchBackend

    backend = TorchBackend(
        checkpoint, dtype=options.dtype, device=options.device, batch_invariant=options.batch_invariant
    )
    log.info("backend torch on %s, %s", backend.info.device, backend.info.dtype)
    return backend
