"""Arrays from the host to the device and back, without a wait until one is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixwise.contract.ragged import Int64Array


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device; on a CPU the tensor shares its memory.

    A plain copy to a GPU waits until all that was queued before it is done. From pinned memory it is queued too, so a
    forward is prepared while the one before it runs.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def token_index(tokens: Int64Array, device: torch.device) -> Tensor | slice:
    """All these tokens, as a slice where they follow each other, so that nothing is copied to take them."""
    if np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens))):
        return slice(int(tokens[0]), int(tokens[0]) + len(tokens))
    return upload(tokens, device)


class Download:
    """A tensor on its way to the host: the copy is queued behind the work that makes the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> NDArray[np.float32]:
        """The array, in ordinary memory; raises what went wrong on the device before it."""
        if self._copied is None:
            return self._tensor.numpy()
        self._copied.synchronize()
        return self._tensor.numpy().copy()
