"""The steps between a layer's matrix products, from buffer to buffer: the kernels of `fused.py`, and one of its own.

`qk_norm_rope` does in one pass what is to be done to the heads of a token: norm and rotation of queries and keys, and for
a token that is kept, its keys and values to their place in the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixwise.backends.torch.cuda.attention import KeySource
from prefixwise.backends.torch.fused_elementwise import (
    GATE_BLOCK,
    HEAD_BLOCK,
    LEAST_HALF_BLOCK,
    add_norm_kernel,
    apply_norm,
    gate_kernel,
    jit,
    launch,
    norm_kernel,
    row_sizes,
)
from prefixwise.models.config import Activation


@jit
def qk_norm_rope_kernel(
    qkv: tl.tensor,  # [T, num_heads + 2 * num_kv_heads, 2 * half]: queries and keys are overwritten
    weight: tl.tensor,  # [num_heads + num_kv_heads, 2 * half]; not read without a norm
    cos: tl.tensor,  # [T, half] float32
    sin: tl.tensor,  # [T, half] float32
    slots: tl.tensor,  # [T] int32: place in the pool, less than 0 for none; not read unless `keeps`
    keys: tl.tensor,  # [A, num_kv_heads, 2 * half]
    values: tl.tensor,  # [A, num_kv_heads, 2 * half]
    eps: tl.tensor,
    num_turned_heads: tl.tensor,  # of all tokens
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    has_norm: tl.constexpr,
    keeps: tl.constexpr,
    head_block: tl.constexpr,
    half_block: tl.constexpr,
) -> None:
    """Some heads a program, of one token or several, each as two halves: column i of the one turns with column i of the
    other."""
    num_turned: tl.constexpr = num_heads + num_kv_heads
    places = tl.program_id(0) * head_block + tl.arange(0, head_block)[:, None]
    token, head = (places // num_turned).to(tl.int64), places % num_turned
    columns = tl.arange(0, half_block)[None, :]
    inside = (places < num_turned_heads) & (columns < half)
    first_at = qkv + (token * (num_turned + num_kv_heads) + head) * (2 * half) + columns
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
    turned_first = (first * cosines - second * sines).to(dtype)
    turned_second = (second * cosines + first * sines).to(dtype)
    tl.store(first_at, turned_first, mask=inside)
    tl.store(first_at + half, turned_second, mask=inside)
    if keeps:
        slot = tl.load(slots + token, mask=places < num_turned_heads, other=-1).to(tl.int64)
        is_kept = inside & (head >= num_heads) & (slot >= 0)
        kept_at = (slot * num_kv_heads + head - num_heads) * (2 * half) + columns
        tl.store(keys + kept_at, turned_first, mask=is_kept)
        tl.store(keys + kept_at + half, turned_second, mask=is_kept)
        value_at = first_at + num_kv_heads * (2 * half)  # of the same KV head
        tl.store(values + kept_at, tl.load(value_at, mask=is_kept), mask=is_kept)
        tl.store(values + kept_at + half, tl.load(value_at + half, mask=is_kept), mask=is_kept)


def qk_norm_rope(
    qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, slots: Tensor | None, pool: KeySource
) -> None:
    """qkv [T, N + 2 K, H] in place; where `slots` [T] are given, tokens with one go to this layer of the pool."""
    num_tokens, num_rows, head_size = qkv.shape
    num_kv_heads = pool.keys.shape[1]
    num_turned = num_tokens * (num_rows - num_kv_heads)
    launch(
        qk_norm_rope_kernel,
        (triton.cdiv(num_turned, HEAD_BLOCK),),
        qkv,
        *(qkv if weight is None else weight, cos, sin, cos if slots is None else slots, pool.keys, pool.values, eps),
        num_turned,
        num_heads=num_rows - 2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        half=head_size // 2,
        has_norm=weight is not None,
        keeps=slots is not None,
        head_block=HEAD_BLOCK,
        half_block=max(triton.next_power_of_2(head_size // 2), LEAST_HALF_BLOCK),
    )


def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [T, D] to its root mean square norm."""
    launch(norm_kernel, (len(x),), x, weight, out, eps, **row_sizes(x.shape[1]))


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [T, D] becomes x + delta, rounded, and `out` its norm."""
    launch(add_norm_kernel, (len(x),), x, delta, weight, x, out, eps, **row_sizes(x.shape[1]))


def gate(gate_up: Tensor, activation: Activation, out: Tensor) -> None:
    """activation(gate) * up: [T, 2 F] to [T, F]."""
    num_rows, size = out.shape
    grid = (num_rows, triton.cdiv(size, GATE_BLOCK))
    launch(gate_kernel, grid, gate_up, out, size=size, is_silu=activation == "silu", block=GATE_BLOCK)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, block_rows: int | None) -> None:
    """x [T, in] with weight [out, in] to [T, out]. With `block_rows`, which divides T, in products of so many rows."""
    for start in range(0, len(x), block_rows or len(x)):
        rows = slice(start, start + (block_rows or len(x)))
        if bias is None:
            torch.mm(x[rows], weight.T, out=out[rows])
        else:
            torch.addmm(bias, x[rows], weight.T, out=out[rows])
