"""A forward's integers on their way to the device: from pinned buffers, in turn, to one that stays where it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prefixwise.contract.ragged import Int32Array

_NUM_BUFFERS = 4  # forwards whose copies may be queued before the host has to wait


class Uploads:
    """The device's buffer is overwritten in the stream's order, so by then the forward before has read it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(_NUM_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._next = 0

    def send(self, size: int, fill: Callable[[Int32Array], None]) -> Tensor:
        """Have the first `size` numbers filled in, and queue their copy. What comes back is on the device."""
        number = self._next
        self._next = (number + 1) % _NUM_BUFFERS
        copied, buffer, target = self._copied[number], self._buffers[number][:size], self.on_device[:size]
        if copied is not None:
            copied.synchronize()
        fill(buffer.numpy())
        target.copy_(buffer, non_blocking=True)
        if target.device.type == "cuda":
            self._copied[number] = torch.cuda.current_stream(target.device).record_event()
        return target
