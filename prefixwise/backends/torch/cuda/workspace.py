"""Where a forward's activations are: one piece of memory for all programs, since they run one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from prefixwise.models.config import ModelConfig

_ALIGNMENT = 1024  # bytes


@dataclass(frozen=True)
class Buffers:
    """The activations of T tokens. `gate_up` and `gated` lie where `qkv` and `attended` do."""

    x: Tensor  # [T, D]
    normed: Tensor  # [T, D]
    delta: Tensor  # [T, D], to be added to x
    cos: Tensor  # [T, H / 2] float32
    sin: Tensor  # [T, H / 2] float32
    lse: Tensor  # [T, N] float32
    qkv: Tensor  # [T, N + 2 K, H]
    attended: Tensor  # [T, N, H]
    gate_up: Tensor  # [T, 2 F]
    gated: Tensor  # [T, F]


class Workspace:
    """Memory for `num_tokens` tokens or fewer."""

    def __init__(self, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype = config, dtype
        self._memory = torch.empty(_Cut.total(self._shapes(num_tokens)), dtype=torch.uint8, device=device)

    def _shapes(self, num_tokens: int) -> list[list[_Shape]]:
        """What always lives; what lives until attention is done; what lives after it."""
        config, t, wide = self._config, num_tokens, torch.float32
        d, n, k, h, f = config.model_size, config.num_heads, config.num_kv_heads, config.head_size, config.mlp_size
        return [
            [*[((t, d), self._dtype)] * 3, *[((t, h // 2), wide)] * 2, ((t, n), wide)],
            [((t, n + 2 * k, h), self._dtype), ((t, n, h), self._dtype)],
            [((t, 2 * f), self._dtype), ((t, f), self._dtype)],
        ]

    def buffers(self, num_tokens: int) -> Buffers:
        """All of them overwrite those of another call."""
        always, before, after = self._shapes(num_tokens)
        cut = _Cut(self._memory)
        tensors = [cut.next(*shape) for shape in always]
        start = cut.at
        tensors += [cut.next(*shape) for shape in before]
        cut.at = start
        return Buffers(*tensors, *(cut.next(*shape) for shape in after))


_Shape = tuple[tuple[int, ...], torch.dtype]


class _Cut:
    """Tensors one after the other in a piece of memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self.at = memory, 0

    def next(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        found = self._memory[self.at : self.at + num_bytes].view(dtype).view(shape)
        self.at += _aligned(num_bytes)
        return found

    @staticmethod
    def total(shapes: list[list[_Shape]]) -> int:
        """Bytes for the first list and the larger of the others."""
        always, *others = (sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in each) for each in shapes)
        return always + max(others)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
