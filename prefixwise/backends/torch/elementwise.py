"""The elementwise ops of a layer, between its GEMMs: norms, QK norm with RoPE, activation, residuals, the merge by LSE.

Each row is one token, and no row's bits depend on another row. `PlainElementwiseOps` writes each op as PyTorch
operations, each of them a pass over memory; on a CPU a tile of rows stays in cache, so that costs little.
`FusedElementwiseOps` (`cuda/fused_elementwise.py`) has one kernel per op, for CUDA in half precision, where those
passes took most of the time. Both compute in float32 and round at the same places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.fp8 import quantise_activations, quantise_rows
from prefixwise.backends.torch.softmax import NEG_INF, merge
from prefixwise.backends.torch.weights import ExpertWeights
from prefixwise.models.config import Activation, ModelConfig

# Flash attention's result as it comes: output [T, N, H] in q's dtype, log-sum-exp [N, T] float32.
FlashPart = tuple[Tensor, Tensor]


class ElementwiseOps(ABC):
    """The ops between the GEMMs of a layer."""

    is_for_cpu = False

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm: x [T, D], weight [D] of its dtype or float32, to [T, D]."""

    @abstractmethod
    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta, rounded to their dtype, and its norm; all [T, D]."""

    @abstractmethod
    def qk_norm_rope(
        self, qkv: Tensor, num_rope_heads: int, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """QK norm, where the model has one, and RoPE of the first `num_rope_heads` heads: queries and keys.

        Args:
            qkv: [T, N + 2 K, H], overwritten.
            num_rope_heads: N + K; the values that follow are not changed.
            weight: [N + K, H] of each head's norm, or None.
            eps: of the norm.
            cos: [T, 1, H / 2] float32, from the RoPE table.
            sin: [T, 1, H / 2] float32.

        Returns:
            [T, N + 2 K, H], to be used in place of `qkv`.
        """

    @abstractmethod
    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up: [T, 2 F] to [T, F]."""

    @abstractmethod
    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, I] to FP8: codes [T, I] and scales [T] float32."""

    @abstractmethod
    def quantise_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The MLP's x [T, F], likewise; scales are powers of two."""

    def has_grouped_gemm(self, weights: ExpertWeights) -> bool:
        """Has `run_experts` kernels for these? Else `ExpertRunner` runs them."""
        return False

    def run_experts(self, weights: ExpertWeights, x: Tensor, config: ModelConfig) -> Tensor:
        """The MLP of a layer with experts: x [T, D] to [T, D]."""
        raise NotImplementedError("has_grouped_gemm says where it is")

    @abstractmethod
    def merge(self, self_part: FlashPart, prefix_part: FlashPart, prefix_rows: Tensor, num_rows: int) -> Tensor:
        """Merge self-attention and prefix attention by their log-sum-exps.

        Args:
            self_part: of all R tokens, over their own segment.
            prefix_part: of the tokens that read a prefix, in any order.
            prefix_rows: [R] int32, each token's row in `prefix_part`, or -1 for none.
            num_rows: R plus the padding after it.

        Returns:
            [num_rows, N, H] in the dtype of the parts; zero in padding.
        """


class PlainElementwiseOps(ElementwiseOps):
    """PyTorch operations, for every device and dtype. CPUs use `CpuElementwiseOps`."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, rms_norm(x, weight, eps)

    def qk_norm_rope(
        self, qkv: Tensor, num_rope_heads: int, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        qk = qkv[:, :num_rope_heads]
        if weight is not None:
            qk = rms_norm(qk, weight, eps)
        qkv[:, :num_rope_heads] = apply_rope(qk, cos, sin)
        return qkv

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantise_rows(x)

    def quantise_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantise_activations(x)

    def merge(self, self_part: FlashPart, prefix_part: FlashPart, prefix_rows: Tensor, num_rows: int) -> Tensor:
        rows = prefix_rows.clamp(min=0)  # any row will do for a token without a prefix: its log-sum-exp is -inf
        prefix_lse = prefix_part[1].T[rows].masked_fill((prefix_rows < 0).unsqueeze(1), NEG_INF)
        merged, _ = merge((self_part[0].float(), self_part[1].T), (prefix_part[0][rows].float(), prefix_lse))
        return pad_with_zeros(merged.to(self_part[0].dtype), num_rows)


class CpuElementwiseOps(PlainElementwiseOps):
    """The same with fewer passes over memory: heads are not rounded between QK norm and RoPE."""

    is_for_cpu = True

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return (x * norm_scale(x, eps)).mul_(weight)
        wide = x.float()
        return (wide * norm_scale(wide, eps)).mul_(weight).to(x.dtype)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, self.norm(x, weight, eps)

    def qk_norm_rope(
        self, qkv: Tensor, num_rope_heads: int, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        heads = qkv[:, :num_rope_heads]
        wide = heads.float()  # in float32 the heads themselves
        if weight is not None:
            wide.mul_(norm_scale(wide, eps)).mul_(weight)
        first, second = wide.chunk(2, -1)
        turned = (first * cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).addcmul_(first, sin)
        first.copy_(turned)
        if heads.dtype != wide.dtype:
            heads.copy_(wide)
        return qkv


PLAIN = PlainElementwiseOps()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def norm_scale(x: Tensor, eps: float) -> Tensor:
    """What RMS norm multiplies each row [.., D] of a float32 tensor by: [.., 1].

    Not from `vector_norm`, which reads memory once and adds less exactly: docs/decisions.md, "Log-likelihoods".
    """
    return (x * x).mean(-1, keepdim=True).add_(_scalar(eps)).rsqrt_()


@cache
def _scalar(number: float) -> Tensor:
    """A tensor, which operations take faster than a number."""
    return torch.tensor(number, dtype=torch.float32)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of [T, heads, H]: the first half of each head pairs with the second half."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def pad_with_zeros(rows: Tensor, num_rows: int) -> Tensor:
    """[n, N, H] to [num_rows, N, H]."""
    missing = num_rows - len(rows)
    return F.pad(rows, (0, 0, 0, 0, 0, missing)) if missing else rows
