"""The elementwise kernels of a layer in Triton: norms, QK norm with RoPE, the gated activation, the merge by LSE.

Every kernel reads its input once and writes its result once. The arithmetic is float32, rounded where
`PlainElementwiseOps` rounds: a result differs from the plain one only where the last bits of a float32 decide which way
it is rounded.

A row's bits depend neither on its index nor on the number of rows. One program holds one row, or some heads of one, and
programs do not communicate; and one compiled kernel serves all calls of a model. Sizes of the model are compile-time
constants, and numbers of rows are never specialised.

Only modules that run on CUDA import this one: nothing else needs Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HEAD_TILE = 16  # heads of one token that a program takes
MIN_PADDED_HALF = 8  # columns: with fewer, two threads hold the same number, and one of them may have overwritten it
GATE_TILE = 1024  # columns of one row that a program takes
_SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(math.sqrt(2 / math.pi))


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, with a type; numbers of rows do not choose the compiled kernel."""
    return triton.jit(do_not_specialize=("num_rows", "num_self", "num_prefix", "num_rope_rows"))(function)


@jit
def from_the_end() -> tl.tensor:
    """The number of this program, where the last one takes the first rows. The kernel before took them first to last,
    and so does the one behind: what is read first was written last, and is still in the GPU's cache."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@jit
def apply_norm(wide: tl.tensor, weight: tl.tensor, mean_square: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """The rows, in float32, over their root mean square, times the weight."""
    return wide * tl.rsqrt(mean_square + eps) * weight.to(tl.float32)


@jit
def activate(gate: tl.tensor, is_silu: tl.constexpr) -> tl.tensor:
    """SiLU, or GELU, whose (1 + tanh(y)) / 2 is sigmoid(2 y), of float32."""
    exponent = gate if is_silu else 2.0 * _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-exponent))


@jit
def norm_kernel(
    x: tl.tensor,  # [T, size]
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [T, size], rows `out_stride` apart
    eps: tl.tensor,
    out_stride: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    """One program takes one row."""
    number = from_the_end().to(tl.int64)
    row, out_row = number * size, number * out_stride
    columns = tl.arange(0, padded_size)
    inside = columns < size
    wide = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    normed = apply_norm(wide, scales, tl.sum(wide * wide, 0) / size, eps)
    tl.store(out + out_row + columns, normed.to(out.dtype.element_ty), mask=inside)


@jit
def add_norm_kernel(
    x: tl.tensor,  # [T, size]
    delta: tl.tensor,  # [T, size]
    weight: tl.tensor,  # [size]
    residual: tl.tensor,  # [T, size]
    out: tl.tensor,  # [T, size], rows `out_stride` apart
    eps: tl.tensor,
    out_stride: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    """One program takes one row. The norm is that of the rounded sum, which is what later layers read."""
    number = from_the_end().to(tl.int64)
    row, out_row = number * size, number * out_stride
    columns = tl.arange(0, padded_size)
    inside = columns < size
    added = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(delta + row + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(residual.dtype.element_ty)
    tl.store(residual + row + columns, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    normed = apply_norm(wide, scales, tl.sum(wide * wide, 0) / size, eps)
    tl.store(out + out_row + columns, normed.to(out.dtype.element_ty), mask=inside)


@jit
def qk_norm_rope_kernel(
    qkv: tl.tensor,  # [T, row_size]: heads of 2 * half, overwritten
    weight: tl.tensor,  # [num_rope_heads, 2 * half]; not read without a norm
    cos: tl.tensor,  # [T, half] float32
    sin: tl.tensor,  # [T, half] float32
    eps: tl.tensor,
    row_size: tl.constexpr,
    num_rope_heads: tl.constexpr,
    half: tl.constexpr,
    has_norm: tl.constexpr,
    head_tile: tl.constexpr,
    padded_half: tl.constexpr,
) -> None:
    """One program takes some heads of one token, each as two halves: RoPE rotates column i of one half with column i of
    the other."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * head_tile + tl.arange(0, head_tile)[:, None]
    columns = tl.arange(0, padded_half)[None, :]
    inside = (heads < num_rope_heads) & (columns < half)
    offsets = heads * (2 * half) + columns
    first_at = qkv + token * row_size + offsets
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + half, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if has_norm:
        mean_square = (tl.sum(first * first + second * second, 1) / (2 * half))[:, None]
        first_scales = tl.load(weight + offsets, mask=inside, other=0.0)
        second_scales = tl.load(weight + offsets + half, mask=inside, other=0.0)
        first = apply_norm(first, first_scales, mean_square, eps).to(dtype).to(tl.float32)
        second = apply_norm(second, second_scales, mean_square, eps).to(dtype).to(tl.float32)
    cosines = tl.load(cos + token * half + columns, mask=columns < half, other=0.0)
    sines = tl.load(sin + token * half + columns, mask=columns < half, other=0.0)
    tl.store(first_at, (first * cosines - second * sines).to(dtype), mask=inside)
    tl.store(first_at + half, (second * cosines + first * sines).to(dtype), mask=inside)


@jit
def fitting_exponents(largest: tl.tensor) -> tl.tensor:
    """Biased exponents of the least powers of two with which float32 numbers fit FP8, as `fp8.py` has them."""
    exponents = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    return tl.minimum(tl.maximum(exponents, 1), 254)


@jit
def power_of_two(exponents: tl.tensor) -> tl.tensor:
    """Of biased exponents."""
    return (exponents << 23).to(tl.float32, bitcast=True)


@jit
def head_exponents(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Biased exponents [heads, 1] of the scales of heads in two halves, as `quantise_heads` in `fp8.py` has them."""
    largest = tl.max(tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32))), 1)[:, None]
    return fitting_exponents(largest)


@jit
def store_head_codes(
    first: tl.tensor,  # [heads, half]; columns outside are 0
    second: tl.tensor,
    first_at: tl.tensor,  # where the codes go
    scales_at: tl.tensor,  # [heads, 1]
    inside: tl.tensor,  # [heads, half]
    is_head: tl.tensor,  # [heads, 1]
    half: tl.constexpr,
) -> None:
    """Quantise heads for the KV cache."""
    exponents = head_exponents(first, second)
    factors = power_of_two(254 - exponents)
    dtype: tl.constexpr = first_at.dtype.element_ty
    tl.store(first_at, (first.to(tl.float32) * factors).to(dtype), mask=inside)
    tl.store(first_at + half, (second.to(tl.float32) * factors).to(dtype), mask=inside)
    tl.store(scales_at, exponents.to(tl.uint8), mask=is_head)


@jit
def _as_stored(numbers: tl.tensor, at: tl.tensor) -> tl.tensor:
    """In the dtype of what is stored there; in FP8 rounded without a scale (`round_to_fp8` in `fp8.py`)."""
    if numbers.dtype != at.dtype.element_ty:
        numbers = tl.clamp(numbers.to(tl.float32), -448.0, 448.0, tl.PropagateNan.ALL).to(at.dtype.element_ty)
    return numbers


@jit
def qk_norm_rope_and_cache_kernel(
    qkv: tl.tensor,  # [T, num_heads + 2 * num_kv_heads, 2 * half]: queries and keys are overwritten
    weight: tl.tensor,  # [num_heads + num_kv_heads, 2 * half]; not read without a norm
    cos: tl.tensor,  # [T, half] float32
    sin: tl.tensor,  # [T, half] float32
    slots: tl.tensor,  # [T] int32: the token's slot in the KV cache, less than 0 for none; not read unless `caches`
    keys: tl.tensor,  # [A, num_kv_heads, 2 * half]
    values: tl.tensor,  # [A, num_kv_heads, 2 * half]
    key_scales: tl.tensor | None,  # [num_kv_heads, A] uint8, exponents; None: keys and values have no scales
    value_scales: tl.tensor | None,  # [num_kv_heads, A] uint8
    query_codes: tl.tensor | None,  # [T, num_heads, 2 * half] in FP8, written where `caches`; None: there are none
    num_slots: tl.tensor | None,  # A
    eps: tl.tensor,
    num_rope_rows: tl.tensor,  # query and key heads of all tokens
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    has_norm: tl.constexpr,
    caches: tl.constexpr,
    head_tile: tl.constexpr,
    padded_half: tl.constexpr,
) -> None:
    """One program takes some heads, of one token or several, each as two halves: RoPE rotates column i of one half with
    column i of the other. Keys, after RoPE, and values of a token with a slot also go to the KV cache, queries to
    `query_codes`."""
    num_rope_heads: tl.constexpr = num_heads + num_kv_heads
    rope_rows = from_the_end() * head_tile + tl.arange(0, head_tile)[:, None]
    token, head = (rope_rows // num_rope_heads).to(tl.int64), rope_rows % num_rope_heads
    columns = tl.arange(0, padded_half)[None, :]
    inside = (rope_rows < num_rope_rows) & (columns < half)
    first_at = qkv + (token * (num_rope_heads + num_kv_heads) + head) * (2 * half) + columns
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + half, mask=inside, other=0.0).to(tl.float32)
    cosines = tl.load(cos + token * half + columns, mask=inside, other=0.0)
    sines = tl.load(sin + token * half + columns, mask=inside, other=0.0)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if has_norm:
        mean_square = (tl.sum(first * first + second * second, 1) / (2 * half))[:, None]
        scales_at = weight + head * (2 * half) + columns
        first_scales = tl.load(scales_at, mask=inside, other=0.0)
        second_scales = tl.load(scales_at + half, mask=inside, other=0.0)
        first = apply_norm(first, first_scales, mean_square, eps).to(dtype).to(tl.float32)
        second = apply_norm(second, second_scales, mean_square, eps).to(dtype).to(tl.float32)
    rotated_first = (first * cosines - second * sines).to(dtype)
    rotated_second = (second * cosines + first * sines).to(dtype)
    tl.store(first_at, rotated_first, mask=inside)
    tl.store(first_at + half, rotated_second, mask=inside)
    if caches:
        slot = tl.load(slots + token, mask=rope_rows < num_rope_rows, other=-1).to(tl.int64)
        is_cached = inside & (head >= num_heads) & (slot >= 0)
        cached_at = (slot * num_kv_heads + head - num_heads) * (2 * half) + columns
        if query_codes is not None:
            is_query = inside & (head < num_heads)
            codes_at = query_codes + (token * num_heads + head) * (2 * half) + columns
            tl.store(codes_at, _as_stored(rotated_first, query_codes), mask=is_query)
            tl.store(codes_at + half, _as_stored(rotated_second, query_codes), mask=is_query)
        if key_scales is None:
            tl.store(keys + cached_at, _as_stored(rotated_first, keys), mask=is_cached)
            tl.store(keys + cached_at + half, _as_stored(rotated_second, keys), mask=is_cached)
            value_at = first_at + num_kv_heads * (2 * half)  # of the same KV head
            tl.store(values + cached_at, tl.load(value_at, mask=is_cached), mask=is_cached)
            tl.store(values + cached_at + half, tl.load(value_at + half, mask=is_cached), mask=is_cached)
        else:
            scale_at = (head - num_heads).to(tl.int64) * num_slots + slot
            is_head = (rope_rows < num_rope_rows) & (head >= num_heads) & (slot >= 0)
            store_head_codes(
                rotated_first, rotated_second, keys + cached_at, key_scales + scale_at, is_cached, is_head, half
            )
            value_at = first_at + num_kv_heads * (2 * half)
            value_first = tl.load(value_at, mask=is_cached, other=0.0)
            value_second = tl.load(value_at + half, mask=is_cached, other=0.0)
            store_head_codes(
                value_first, value_second, values + cached_at, value_scales + scale_at, is_cached, is_head, half
            )


@jit
def gate_kernel(
    gate_up: tl.tensor,  # [T, 2 * size]
    out: tl.tensor,  # [T, size], rows `out_stride` apart
    out_stride: tl.constexpr,
    size: tl.constexpr,
    is_silu: tl.constexpr,
    column_tile: tl.constexpr,
) -> None:
    """One program takes some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * column_tile + tl.arange(0, column_tile)
    inside = columns < size
    gate_at = gate_up + row * (2 * size) + columns
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + size, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    activated = activate(gate, is_silu).to(dtype).to(tl.float32)
    tl.store(out + row * out_stride + columns, (activated * up).to(dtype), mask=inside)


@jit
def merge_kernel(
    self_out: tl.tensor,  # [num_self, num_heads, head_size]
    self_lse: tl.tensor,  # [num_heads, num_self] float32
    prefix_out: tl.tensor,  # [num_prefix, num_heads, head_size]
    prefix_lse: tl.tensor,  # [num_heads, num_prefix] float32
    prefix_rows: tl.tensor,  # [num_self] int32: the token's row in `prefix_out`, -1 for none
    out: tl.tensor,  # [T, num_heads, head_size], T >= num_self
    num_self: tl.tensor,
    num_prefix: tl.tensor,
    num_heads: tl.constexpr,
    head_size: tl.constexpr,
    head_tile: tl.constexpr,
    padded_head_size: tl.constexpr,
) -> None:
    """One program takes some heads of one token. A part that a token lacks has a log-sum-exp of -inf: the prefix part
    of a token that reads no prefix, both parts of padding."""
    token = tl.program_id(0).to(tl.int64)
    is_real = token < num_self
    prefix_row = tl.load(prefix_rows + token, mask=is_real, other=-1).to(tl.int64)
    has_prefix = prefix_row >= 0
    heads = tl.program_id(1) * head_tile + tl.arange(0, head_tile)
    is_head = heads < num_heads
    token_self_lse = tl.load(self_lse + heads * num_self + token, mask=is_head & is_real, other=float("-inf"))
    token_prefix_lse = tl.load(
        prefix_lse + heads * num_prefix + prefix_row, mask=is_head & has_prefix, other=float("-inf")
    )

    max_lse = tl.maximum(token_self_lse, token_prefix_lse)
    max_lse = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    self_weight, prefix_weight = tl.exp(token_self_lse - max_lse), tl.exp(token_prefix_lse - max_lse)
    weight_sum = self_weight + prefix_weight
    weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
    self_share, prefix_share = (self_weight / weight_sum)[:, None], (prefix_weight / weight_sum)[:, None]

    columns = tl.arange(0, padded_head_size)[None, :]
    inside = is_head[:, None] & (columns < head_size)
    row_size: tl.constexpr = num_heads * head_size
    offsets = heads[:, None] * head_size + columns
    self_values = tl.load(self_out + token * row_size + offsets, mask=inside & is_real, other=0.0).to(tl.float32)
    prefix_values = tl.load(prefix_out + prefix_row * row_size + offsets, mask=inside & has_prefix, other=0.0).to(
        tl.float32
    )
    merged = self_values * self_share + prefix_values * prefix_share
    tl.store(out + token * row_size + offsets, merged.to(out.dtype.element_ty), mask=inside)


def row_sizes(size: int) -> dict[str, int]:
    """The whole row in one tile, with eight of its columns to a thread where that gives 1 to 16 warps."""
    padded_size = triton.next_power_of_2(size)
    return {"size": size, "padded_size": padded_size, "num_warps": min(max(padded_size // 256, 1), 16)}


def launch(kernel: Any, grid: tuple[int, ...], tensor: Tensor, *arguments: Any, **sizes: Any) -> None:
    """Run the kernel on the tensor's device: Triton would take the current device."""
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        kernel[grid](tensor, *arguments, **sizes)
