"""What a layer does to each row between its matrix products: norms, rotation, activation, residuals, merges.

One row is one token, and no row's bits depend on another's. `PlainElementwiseOps` writes each step as PyTorch operations, each
of them a pass over memory; on a CPU a block of rows stays in cache, so that costs little. `FusedElementwiseOps` (`fused.py`)
has one kernel per step, for CUDA in half precision, where those passes took most of the time. Both compute in float32
and round at the same places.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from importlib.util import find_spec

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.softmax import NEG_INF, merge
from prefixwise.models.config import Activation, ModelConfig

log = logging.getLogger("prefixwise")

# Flash attention's result as it comes: output [T, N, H] in q's dtype, log-sum-exp [N, T] float32.
FlashPart = tuple[Tensor, Tensor]


class ElementwiseOps(ABC):
    """The steps between the matrix products of a layer."""

    is_for_cpu = False

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm: x [T, D], weight [D] of its dtype or float32, to [T, D]."""

    @abstractmethod
    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta, rounded to their dtype, and its norm; all [T, D]."""

    @abstractmethod
    def qk_norm_rope(
        self, qkv: Tensor, num_turned: int, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Norm, where the model has one, and rotary embedding of the first `num_turned` heads: queries and keys.

        Args:
            qkv: [T, N + 2 K, H], overwritten.
            num_turned: N + K; the values that follow stay as they are.
            weight: [N + K, H] of the norm of each head, or None.
            eps: of the norm.
            cos: [T, 1, H / 2] float32.
            sin: [T, 1, H / 2] float32.

        Returns:
            [T, N + 2 K, H], to be used in place of `qkv`.
        """

    @abstractmethod
    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up: [T, 2 F] to [T, F]."""

    @abstractmethod
    def merge(self, own: FlashPart, part: FlashPart, part_rows: Tensor, num_rows: int) -> Tensor:
        """Two partial attentions to one, by their log-sum-exps.

        Args:
            own: of all R tokens over their own segment.
            part: of some of them, in any order, over other keys.
            part_rows: [R] int32, each token's row in `part`, or -1 where it has none.
            num_rows: R and the padding after it.

        Returns:
            [num_rows, N, H] in the dtype of the parts; zero where there is padding.
        """


class PlainElementwiseOps(ElementwiseOps):
    """PyTorch operations, for every device and dtype; those of `CpuElementwiseOps` are for CPUs."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, rms_norm(x, weight, eps)

    def qk_norm_rope(
        self, qkv: Tensor, num_turned: int, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        qk = qkv[:, :num_turned]
        if weight is not None:
            qk = rms_norm(qk, weight, eps)
        qkv[:, :num_turned] = rotate(qk, cos, sin)
        return qkv

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)

    def merge(self, own: FlashPart, part: FlashPart, part_rows: Tensor, num_rows: int) -> Tensor:
        rows = part_rows.clamp(min=0)  # where there is none any will do: the log-sum-exp takes it out
        part_lse = part[1].T[rows].masked_fill((part_rows < 0).unsqueeze(1), NEG_INF)
        merged, _ = merge((own[0].float(), own[1].T), (part[0][rows].float(), part_lse))
        return pad_with_zeros(merged.to(own[0].dtype), num_rows)


class CpuElementwiseOps(PlainElementwiseOps):
    """The same with fewer passes over memory: heads are not rounded between their norm and their rotation."""

    is_for_cpu = True

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32, copy=True)
        norm_in_place(wide, weight, eps)
        return wide.to(x.dtype)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, self.norm(x, weight, eps)

    def qk_norm_rope(
        self, qkv: Tensor, num_turned: int, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        heads, half = qkv[:, :num_turned], qkv.shape[-1] // 2
        wide = heads.to(torch.float32, copy=True)  # the heads themselves are overwritten
        if weight is not None:
            norm_in_place(wide, weight, eps)
        first, second = wide[..., :half], wide[..., half:]
        heads[..., :half] = (first * cos).addcmul_(second, sin, value=-1)
        heads[..., half:] = (second * cos).addcmul_(first, sin)
        return qkv


PLAIN = PlainElementwiseOps()


def choose_elementwise_ops(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ElementwiseOps:
    """Fused kernels for CUDA in half precision where Triton works, else plain operations."""
    if device.type == "cpu":
        return CpuElementwiseOps()
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return PLAIN
    try:
        from prefixwise.backends.torch.fused_elementwise import FusedElementwiseOps

        return FusedElementwiseOps.for_model(config, dtype, device)
    except Exception as error:  # no C compiler, no Python headers, an old device: whatever it is, PyTorch can do it
        log.warning("Triton does not work here, so scoring is slower than it could be: %s", error)
        return PLAIN


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis, in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """Root mean square norm over the last axis of float32, with fewer passes over memory."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    x.mul_(scale).mul_(weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, H]: the first half of each head pairs with the second half."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def pad_with_zeros(rows: Tensor, num_rows: int) -> Tensor:
    """[n, N, H] to [num_rows, N, H]."""
    missing = num_rows - len(rows)
    return F.pad(rows, (0, 0, 0, 0, 0, missing)) if missing else rows
