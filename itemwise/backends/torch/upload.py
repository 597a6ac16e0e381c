"""Host arrays to the device, without a wait."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device; on a CPU the tensor shares its memory.

    A plain copy to a GPU waits until all that was queued before it is done. From pinned memory it is queued too, so a
    forward is prepared while the one before it runs.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
