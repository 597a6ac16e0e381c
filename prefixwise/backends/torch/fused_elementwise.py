"""`FusedElementwiseOps`: each step between the matrix products as one Triton kernel, for CUDA in bfloat16 and float16.

Every kernel reads its rows once and writes its result once. The arithmetic is float32, rounded where `PlainElementwiseOps`
rounds: a result differs from the plain one only where the last bits of a float32 decide which way it is rounded.

A row's bits do not depend on its place or on the number of rows. One program holds one row, or some heads of one, and
no program talks to another; and one compiled kernel serves all calls of a model. Sizes of the model are compile-time
constants, numbers of rows are never specialised, and a tensor that does not begin at a multiple of 16 bytes is copied
first: Triton would compile another kernel for it, which may add in another order.

Imported only where a CUDA device is used: nothing else needs Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixwise.backends.torch.elementwise import ElementwiseOps, FlashPart
from prefixwise.models.config import Activation, ModelConfig

HEAD_BLOCK = 16  # heads of one token that a program takes
LEAST_HALF_BLOCK = 8  # columns: with fewer, two threads would hold one number that one of them has overwritten
GATE_BLOCK = 1024  # columns of one row that a program takes
_POINTER_ALIGNMENT = 16  # bytes
_SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(math.sqrt(2 / math.pi))


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, with a type; numbers of rows do not choose the compiled kernel."""
    return triton.jit(do_not_specialize=("num_own", "num_part", "num_turned_heads"))(function)


@jit
def apply_norm(wide: tl.tensor, weight: tl.tensor, mean_square: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """The rows, in float32, over their root mean square, times the weight."""
    return wide * tl.rsqrt(mean_square + eps) * weight.to(tl.float32)


@jit
def norm_kernel(
    x: tl.tensor,  # [T, size]
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [T, size]
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One row a program."""
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, block)
    inside = columns < size
    wide = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    normed = apply_norm(wide, scales, tl.sum(wide * wide, 0) / size, eps)
    tl.store(out + row + columns, normed.to(out.dtype.element_ty), mask=inside)


@jit
def add_norm_kernel(
    x: tl.tensor,  # [T, size]
    delta: tl.tensor,  # [T, size]
    weight: tl.tensor,  # [size]
    total: tl.tensor,  # [T, size]
    out: tl.tensor,  # [T, size]
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One row a program; the norm is taken of the rounded sum, which is what later layers read."""
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, block)
    inside = columns < size
    added = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(delta + row + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + row + columns, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    normed = apply_norm(wide, scales, tl.sum(wide * wide, 0) / size, eps)
    tl.store(out + row + columns, normed.to(out.dtype.element_ty), mask=inside)


@jit
def _qk_norm_rope_kernel(
    qkv: tl.tensor,  # [T, row_size]: heads of 2 * half, overwritten
    weight: tl.tensor,  # [num_turned, 2 * half]; not read without a norm
    cos: tl.tensor,  # [T, half] float32
    sin: tl.tensor,  # [T, half] float32
    eps: tl.tensor,
    row_size: tl.constexpr,
    num_turned: tl.constexpr,
    half: tl.constexpr,
    has_norm: tl.constexpr,
    head_block: tl.constexpr,
    half_block: tl.constexpr,
) -> None:
    """Some heads of one token a program, each as two halves: column i of the one turns with column i of the other."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * head_block + tl.arange(0, head_block)[:, None]
    columns = tl.arange(0, half_block)[None, :]
    inside = (heads < num_turned) & (columns < half)
    places = heads * (2 * half) + columns
    first_at = qkv + token * row_size + places
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + half, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if has_norm:
        mean_square = (tl.sum(first * first + second * second, 1) / (2 * half))[:, None]
        first_scales = tl.load(weight + places, mask=inside, other=0.0)
        second_scales = tl.load(weight + places + half, mask=inside, other=0.0)
        first = apply_norm(first, first_scales, mean_square, eps).to(dtype).to(tl.float32)
        second = apply_norm(second, second_scales, mean_square, eps).to(dtype).to(tl.float32)
    cosines = tl.load(cos + token * half + columns, mask=columns < half, other=0.0)
    sines = tl.load(sin + token * half + columns, mask=columns < half, other=0.0)
    tl.store(first_at, (first * cosines - second * sines).to(dtype), mask=inside)
    tl.store(first_at + half, (second * cosines + first * sines).to(dtype), mask=inside)


@jit
def gate_kernel(
    gate_up: tl.tensor,  # [T, 2 * size]
    out: tl.tensor,  # [T, size]
    size: tl.constexpr,
    is_silu: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Some columns of one row a program. GELU's (1 + tanh(y)) / 2 is sigmoid(2 y)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    gate_at = gate_up + row * (2 * size) + columns
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + size, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    exponent = gate if is_silu else 2.0 * _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-exponent))).to(dtype).to(tl.float32)
    tl.store(out + row * size + columns, (activated * up).to(dtype), mask=inside)


@jit
def _merge_kernel(
    own: tl.tensor,  # [num_own, num_heads, head_size]
    own_lse: tl.tensor,  # [num_heads, num_own] float32
    part: tl.tensor,  # [num_part, num_heads, head_size]
    part_lse: tl.tensor,  # [num_heads, num_part] float32
    part_rows: tl.tensor,  # [num_own] int32
    out: tl.tensor,  # [T, num_heads, head_size], T >= num_own
    num_own: tl.tensor,
    num_part: tl.tensor,
    num_heads: tl.constexpr,
    head_size: tl.constexpr,
    head_block: tl.constexpr,
    size_block: tl.constexpr,
) -> None:
    """Some heads of one token a program. What a token lacks (its part; in padding, both) has a log-sum-exp of -inf."""
    token = tl.program_id(0).to(tl.int64)
    is_real = token < num_own
    part_row = tl.load(part_rows + token, mask=is_real, other=-1).to(tl.int64)
    has_part = part_row >= 0
    heads = tl.program_id(1) * head_block + tl.arange(0, head_block)
    is_head = heads < num_heads
    own_sum = tl.load(own_lse + heads * num_own + token, mask=is_head & is_real, other=float("-inf"))
    part_sum = tl.load(part_lse + heads * num_part + part_row, mask=is_head & has_part, other=float("-inf"))

    peak = tl.maximum(own_sum, part_sum)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    own_weight, part_weight = tl.exp(own_sum - peak), tl.exp(part_sum - peak)
    total = own_weight + part_weight
    total = tl.where(total == 0.0, 1.0, total)
    own_share, part_share = (own_weight / total)[:, None], (part_weight / total)[:, None]

    columns = tl.arange(0, size_block)[None, :]
    inside = is_head[:, None] & (columns < head_size)
    row_size: tl.constexpr = num_heads * head_size
    places = heads[:, None] * head_size + columns
    own_out = tl.load(own + token * row_size + places, mask=inside & is_real, other=0.0).to(tl.float32)
    part_out = tl.load(part + part_row * row_size + places, mask=inside & has_part, other=0.0).to(tl.float32)
    merged = own_out * own_share + part_out * part_share
    tl.store(out + token * row_size + places, merged.to(out.dtype.element_ty), mask=inside)


class FusedElementwiseOps(ElementwiseOps):
    """One kernel a step. Any sizes; the head size is even, as rotation asks."""

    @classmethod
    def for_model(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> FusedElementwiseOps:
        """Compile every kernel for this model and run it once: what cannot work fails here, not in a request."""
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
        launch(norm_kernel, (len(x),), x, weight, out, eps, **sizes)
        return out

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, delta = _aligned(x), _aligned(delta)
        total, out = torch.empty_like(x), torch.empty_like(x)
        sizes = row_sizes(x.shape[1])
        launch(add_norm_kernel, (len(x),), x, delta, weight, total, out, eps, **sizes)
        return total, out

    def qk_norm_rope(
        self, qkv: Tensor, num_turned: int, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        qkv, cos, sin = _aligned(qkv), _aligned(cos), _aligned(sin)
        num_tokens, num_heads, head_size = qkv.shape
        launch(
            _qk_norm_rope_kernel,
            (num_tokens, triton.cdiv(num_turned, HEAD_BLOCK)),
            *(qkv, qkv if weight is None else weight, cos, sin, eps),
            row_size=num_heads * head_size,
            num_turned=num_turned,
            half=head_size // 2,
            has_norm=weight is not None,
            head_block=HEAD_BLOCK,
            half_block=max(triton.next_power_of_2(head_size // 2), LEAST_HALF_BLOCK),
        )
        return qkv

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up = _aligned(gate_up)
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, size)
        grid = (num_rows, triton.cdiv(size, GATE_BLOCK))
        launch(gate_kernel, grid, gate_up, out, size=size, is_silu=activation == "silu", block=GATE_BLOCK)
        return out

    def merge(self, own: FlashPart, part: FlashPart, part_rows: Tensor, num_rows: int) -> Tensor:
        own_out, own_lse, part_out, part_lse = (_aligned(each) for each in (*own, *part))
        num_own, num_heads, head_size = own_out.shape
        out = own_out.new_empty(num_rows, num_heads, head_size)
        launch(
            _merge_kernel,
            (num_rows, triton.cdiv(num_heads, HEAD_BLOCK)),
            *(own_out, own_lse, part_out, part_lse, part_rows, out, num_own, len(part_out)),
            num_heads=num_heads,
            head_size=head_size,
            head_block=HEAD_BLOCK,
            size_block=triton.next_power_of_2(head_size),
        )
        return out


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous and begins at a multiple of 16 bytes, else a copy, which always does."""
    if tensor.is_contiguous() and tensor.data_ptr() % _POINTER_ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def row_sizes(size: int) -> dict[str, int]:
    """A row in one block, with eight of its columns to a thread where that gives 1 to 16 warps."""
    block = triton.next_power_of_2(size)
    return {"size": size, "block": block, "num_warps": min(max(block // 256, 1), 16)}


def launch(kernel: Any, grid: tuple[int, ...], tensor: Tensor, *arguments: Any, **sizes: Any) -> None:
    """On the tensor's device: Triton takes the current one, whatever its arguments."""
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        kernel[grid](tensor, *arguments, **sizes)
