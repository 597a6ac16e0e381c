"""Launching the fused elementwise kernels, for CUDA in bfloat16 and float16.

`FusedElementwiseOps` allocates its results and serves `model.py`. The functions below it write into buffers that stay
where they are, as CUDA graphs need it, and serve `trunk.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from prefixwise.backends.torch.cuda.elementwise_kernels import (
    GATE_TILE,
    HEAD_TILE,
    MIN_PADDED_HALF,
    add_norm_kernel,
    gate_kernel,
    launch,
    merge_kernel,
    norm_kernel,
    qk_norm_rope_and_cache_kernel,
    qk_norm_rope_kernel,
    row_sizes,
)
from prefixwise.backends.torch.cuda.experts import has_grouped_gemm, run_experts
from prefixwise.backends.torch.cuda.fp8_kernels import quantise
from prefixwise.backends.torch.cuda.kv_cache import KeySource
from prefixwise.backends.torch.elementwise import ElementwiseOps, FlashPart
from prefixwise.backends.torch.fp8 import FP8, fp8_linear
from prefixwise.backends.torch.linear import RowTile
from prefixwise.backends.torch.weights import ExpertWeights
from prefixwise.models.config import Activation, ModelConfig

_POINTER_ALIGNMENT = 16  # bytes


class FusedElementwiseOps(ElementwiseOps):
    """One kernel per op. Any sizes; the head size is even, as RoPE needs it."""

    @classmethod
    def for_model(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> FusedElementwiseOps:
        """Compile and run every kernel once for this model. A kernel that cannot work fails here, not in a request."""
        n, kv, h = config.num_heads, config.num_kv_heads, config.head_size

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        norm_dtype = torch.float32 if config.float32_norms else dtype
        ops, x, weight = cls(), zeros(1, config.model_size), zeros(config.model_size, dtype=norm_dtype)
        ops.norm(x, weight, config.norm_eps)
        ops.add_norm(x, x, weight, config.norm_eps)
        ops.gate(zeros(1, 2 * config.mlp_size), config.activation)
        angles = zeros(1, 1, h // 2, dtype=torch.float32)
        head_weight = zeros(n + kv, h, dtype=norm_dtype) if config.qk_norm else None
        ops.qk_norm_rope(zeros(1, n + 2 * kv, h), n + kv, head_weight, config.norm_eps, angles, angles)
        part = zeros(1, n, h), zeros(n, 1, dtype=torch.float32)
        ops.merge(part, part, zeros(1, dtype=torch.int32), 1).cpu()  # waits for all of them
        return ops

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _aligned(x)
        out = torch.empty_like(x)
        sizes = row_sizes(x.shape[1])
        launch(norm_kernel, (len(x),), x, weight, out, eps, out_stride=x.shape[1], **sizes)
        return out

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, delta = _aligned(x), _aligned(delta)
        residual, out = torch.empty_like(x), torch.empty_like(x)
        sizes = row_sizes(x.shape[1])
        launch(add_norm_kernel, (len(x),), x, delta, weight, residual, out, eps, out_stride=x.shape[1], **sizes)
        return residual, out

    def qk_norm_rope(
        self, qkv: Tensor, num_rope_heads: int, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        qkv, cos, sin = _aligned(qkv), _aligned(cos), _aligned(sin)
        num_tokens, num_heads, head_size = qkv.shape
        launch(
            qk_norm_rope_kernel,
            (num_tokens, triton.cdiv(num_rope_heads, HEAD_TILE)),
            *(qkv, qkv if weight is None else weight, cos, sin, eps),
            row_size=num_heads * head_size,
            num_rope_heads=num_rope_heads,
            half=head_size // 2,
            has_norm=weight is not None,
            head_tile=HEAD_TILE,
            padded_half=max(triton.next_power_of_2(head_size // 2), MIN_PADDED_HALF),
        )
        return qkv

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up = _aligned(gate_up)
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        gate(gate_up, activation, out)
        return out

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._quantise(x, are_activations=False)

    def quantise_activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._quantise(x, are_activations=True)

    def _quantise(self, x: Tensor, *, are_activations: bool) -> tuple[Tensor, Tensor]:
        x = _aligned(x)
        codes, row_scales = torch.empty_like(x, dtype=FP8), x.new_empty(len(x), dtype=torch.float32)
        quantise(x, codes, row_scales, are_activations=are_activations)
        return codes, row_scales

    def has_grouped_gemm(self, weights: ExpertWeights) -> bool:
        return has_grouped_gemm(weights)

    def run_experts(self, weights: ExpertWeights, x: Tensor, config: ModelConfig) -> Tensor:
        return run_experts(weights, _aligned(x.contiguous()), config, self)

    def merge(self, self_part: FlashPart, prefix_part: FlashPart, prefix_rows: Tensor, num_rows: int) -> Tensor:
        self_out, self_lse, prefix_out, prefix_lse = (_aligned(each) for each in (*self_part, *prefix_part))
        num_self, num_heads, head_size = self_out.shape
        out = self_out.new_empty(num_rows, num_heads, head_size)
        launch(
            merge_kernel,
            (num_rows, triton.cdiv(num_heads, HEAD_TILE)),
            *(self_out, self_lse, prefix_out, prefix_lse, prefix_rows, out, num_self, len(prefix_out)),
            num_heads=num_heads,
            head_size=head_size,
            head_tile=HEAD_TILE,
            padded_head_size=triton.next_power_of_2(head_size),
        )
        return out


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous and begins at a multiple of 16 bytes, else a copy, which always does.

    For another alignment Triton would compile another kernel, which may add in another order.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % _POINTER_ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def qk_norm_rope_and_cache(
    qkv: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor | None,
    cache: KeySource,
    query_codes: Tensor | None = None,
) -> None:
    """QK norm and RoPE of qkv [T, N + 2 K, H] in place. With `slots` [T], the keys and values of tokens that have a
    slot also go to this layer of the KV cache, in FP8 as codes, and all queries to `query_codes` [T, N, H]."""
    num_tokens, num_rows, head_size = qkv.shape
    num_kv_heads = cache.keys.shape[1]
    num_rope_rows = num_tokens * (num_rows - num_kv_heads)
    launch(
        qk_norm_rope_and_cache_kernel,
        (triton.cdiv(num_rope_rows, HEAD_TILE),),
        qkv,
        *(qkv if weight is None else weight, cos, sin, cos if slots is None else slots, cache.keys, cache.values),
        *(cache.key_scales, cache.value_scales, query_codes, cache.num_slots, eps),
        num_rope_rows,
        num_heads=num_rows - 2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        half=head_size // 2,
        has_norm=weight is not None,
        caches=slots is not None,
        head_tile=HEAD_TILE,
        padded_half=max(triton.next_power_of_2(head_size // 2), MIN_PADDED_HALF),
    )


def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [T, D] to its root mean square norm, the first D columns of `out`."""
    launch(norm_kernel, (len(x),), x, weight, out, eps, out_stride=out.stride(0), **row_sizes(x.shape[1]))


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [T, D] becomes x + delta, rounded, and the first D columns of `out` its norm."""
    sizes = row_sizes(x.shape[1])
    launch(add_norm_kernel, (len(x),), x, delta, weight, x, out, eps, out_stride=out.stride(0), **sizes)


def gate(gate_up: Tensor, activation: Activation, out: Tensor) -> None:
    """activation(gate) * up: [T, 2 F] to the first F columns of `out`."""
    size = gate_up.shape[1] // 2
    launch(
        gate_kernel,
        (len(gate_up), triton.cdiv(size, GATE_TILE)),
        *(gate_up, out),
        out_stride=out.stride(0),
        size=size,
        is_silu=activation == "silu",
        column_tile=GATE_TILE,
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Sequence[RowTile],
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """x [T, in] with weight [out, in] to [T, out], in GEMMs of the rows of `tiles`. `scales`: in FP8 those of the rows
    [T] and of the weight [out]."""
    for tile in tiles:
        rows = slice(*tile)
        if scales is not None:
            fp8_linear(x[rows], scales[0][rows], weight, scales[1], bias, out[rows])
        elif bias is None:
            torch.mm(x[rows], weight.T, out=out[rows])
        else:
            torch.addmm(bias, x[rows], weight.T, out=out[rows])
