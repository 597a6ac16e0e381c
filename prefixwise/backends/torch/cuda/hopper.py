"""Prefix attention for NVIDIA's Hopper, in Gluon: the same tiles and the same result as `prefix_kernel`, faster.

Twelve warps: one loads tiles of keys and values, two groups of four each attend half a tile's rows. A group issues the
scores of the next key tile and the values of the previous one together, and computes its softmax while the values are
added; while one group computes a softmax, the other uses the matrix units.

The prefix's last key tile, which may be short, comes first, so that the rest need no mask; then the rest in order.

In the kernel: `R` rows of half a tile (tokens x query heads of one KV head), `C` keys of a key tile; `m_i` is the
running max, `l_i` the running sum and `alpha` the rescale of the online softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def describe(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """A TMA descriptor that loads [A, heads * H] in boxes of [C, H]."""
    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
    layout = gl.NVMMASharedLayout.get_default_for(box, dtypes[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, box, layout)


def jit(function: Callable[..., Any]) -> Any:
    """`gluon.jit`, with a type."""
    return gluon.jit(function)


@jit
def _work_of(first_work: gl.tensor, num_work: gl.tensor) -> gl.tensor:
    """The tile and head of this program in a round, as one number; less than 0 for none.

    Tiles with long prefixes come last where KV blocks of one prefix read each other. So tiles are taken from the end,
    and every second round in reverse, so that a program that had a long prefix gets a short one next.
    """
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if (first_work // num_programs) % 2 == 1:
        program = num_programs - 1 - program
    return num_work - 1 - first_work - program


@jit
def _load_key_tiles(
    tiles: gl.tuple,  # counts, starts, lens, reads, lists, addresses
    keys: tma.tensor_descriptor,
    values: tma.tensor_descriptor,
    buffers: gl.tuple,  # keys and values, [num_buffers, C, H] each
    barriers: gl.tuple,  # of each buffer, [num_buffers, 1] each: keys are loaded, are consumed; values likewise
    first_key_head: gl.constexpr,
    first_value_head: gl.constexpr,
    kind: gl.constexpr,
    page_size: gl.constexpr,
    num_kv_heads: gl.constexpr,
    head_size: gl.constexpr,
) -> None:
    """Load every key tile that the two groups need, in their order."""
    counts, _, _, reads, lists, addresses = tiles
    key_buffers, value_buffers = buffers
    keys_ready, keys_free, values_ready, values_free = barriers
    num_buffers: gl.constexpr = key_buffers.shape[0]
    num_keys: gl.constexpr = key_buffers.shape[1]
    per_page: gl.constexpr = page_size // num_keys
    num_work = gl.load(counts + kind) * num_kv_heads
    step = 0
    for first_work in range(0, num_work, gl.num_programs(0)):
        work = _work_of(first_work, num_work)
        if work >= 0:
            tile, kv_head = work // num_kv_heads, work % num_kv_heads
            num_key_tiles = (gl.load(reads + tile) + num_keys - 1) // num_keys
            list_at = addresses + gl.load(lists + tile)
            for number in range(num_key_tiles):
                key_tile = number - 1
                if number == 0:
                    key_tile = num_key_tiles - 1
                row = gl.load(list_at + key_tile // per_page) + key_tile % per_page * num_keys
                buffer = step % num_buffers
                is_odd = (step // num_buffers) % 2
                mbarrier.wait(keys_free.index(buffer), is_odd ^ 1)
                mbarrier.expect(keys_ready.index(buffer), keys.block_type.nbytes)
                column = (first_key_head + kv_head) * head_size
                tma.async_copy_global_to_shared(
                    keys, [row, column], keys_ready.index(buffer), key_buffers.index(buffer)
                )
                mbarrier.wait(values_free.index(buffer), is_odd ^ 1)
                mbarrier.expect(values_ready.index(buffer), values.block_type.nbytes)
                column = (first_value_head + kv_head) * head_size
                tma.async_copy_global_to_shared(
                    values, [row, column], values_ready.index(buffer), value_buffers.index(buffer)
                )
                step += 1


@jit
def _softmax(
    scores: gl.tensor,  # [R, C] float32
    m_i: gl.tensor,  # [R] float32: running max
    l_i: gl.tensor,  # [R] float32: running sum
    scale: gl.constexpr,
) -> gl.tuple:
    """Scores of one key tile into an online softmax, base 2: weights [R, C], the new m_i and l_i, and alpha, which
    rescales the output so far."""
    m_new = gl.maximum(m_i, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    return weights, m_new, l_i * alpha + gl.sum(weights, 1), alpha


@jit
def _clear_values(values: gl.shared_memory_descriptor, num_left: gl.tensor) -> None:
    """Set rows of a buffer [C, H] from `num_left` on to 0. Both groups do it, and write the same."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    loaded = values.load(layout)
    values.store(gl.where((row < num_left)[:, None], loaded, gl.zeros_like(loaded)))
    fence_async_shared()


@jit
def _attend(
    half: gl.constexpr,  # which half of the rows
    tiles: gl.tuple,
    qkv: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    queries: gl.shared_memory_descriptor,  # [R, H]
    buffers: gl.tuple,
    barriers: gl.tuple,
    scale: gl.constexpr,
    kind: gl.constexpr,
    out_stride: gl.constexpr,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    padded_group: gl.constexpr,
    head_size: gl.constexpr,
) -> None:
    """Attend half of the rows of every tile of this program."""
    counts, starts, lens, reads, _, _ = tiles
    key_buffers, value_buffers = buffers
    keys_ready, keys_free, values_ready, values_free = barriers
    num_buffers: gl.constexpr = key_buffers.shape[0]
    num_keys: gl.constexpr = key_buffers.shape[1]
    num_rows: gl.constexpr = queries.shape[0]
    padded_head_size: gl.constexpr = queries.shape[1]
    num_heads: gl.constexpr = num_kv_heads * group
    row_size: gl.constexpr = (num_heads + 2 * num_kv_heads) * head_size
    dtype: gl.constexpr = qkv.dtype.element_ty
    memory: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, num_keys, 16])
    of_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, padded_head_size, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_output, 2)
    of_row: gl.constexpr = gl.SliceLayout(1, of_scores)
    of_output_row: gl.constexpr = gl.SliceLayout(1, of_output)

    rows = half * num_rows + gl.arange(0, num_rows, gl.SliceLayout(1, memory))
    columns = gl.arange(0, padded_head_size, gl.SliceLayout(0, memory))
    offset, head_in_group = rows // padded_group, rows % padded_group
    state_rows = half * num_rows + gl.arange(0, num_rows, of_row)
    no_scores = gl.zeros([num_rows, num_keys], gl.float32, of_scores)
    num_work = gl.load(counts + kind) * num_kv_heads
    step = 0
    for first_work in range(0, num_work, gl.num_programs(0)):
        work = _work_of(first_work, num_work)
        if work >= 0:
            tile, kv_head = work // num_kv_heads, work % num_kv_heads
            start, length = gl.load(starts + tile).to(gl.int64), gl.load(lens + tile)
            num_read = gl.load(reads + tile)
            num_key_tiles = (num_read + num_keys - 1) // num_keys
            head = kv_head * group + head_in_group
            inside = ((offset < length) & (head_in_group < group))[:, None] & (columns < head_size)[None, :]
            q_at = qkv + start * row_size + (offset * row_size + head * head_size)[:, None] + columns[None, :]
            queries.store(gl.load(q_at, mask=inside, other=0.0))
            fence_async_shared()
            out_at = out + start * out_stride + (offset * out_stride + head * head_size)[:, None]
            acc = gl.load(out_at + columns[None, :], mask=inside, other=0.0)
            acc = gl.convert_layout(acc, of_output).to(gl.float32)
            state_head = state_rows % padded_group
            is_state = (state_rows // padded_group < length) & (state_head < group)
            lse_at = lse + (start + state_rows // padded_group) * num_heads + kv_head * group + state_head
            m_i = gl.load(lse_at, mask=is_state, other=0.0)
            l_i = gl.full([num_rows], 1.0, gl.float32, of_row)

            # The last key tile of the prefix, which may be short.
            buffer, is_odd = step % num_buffers, (step // num_buffers) % 2
            num_left = num_read - (num_key_tiles - 1) * num_keys
            mbarrier.wait(keys_ready.index(buffer), is_odd)
            scores = warpgroup_mma(
                queries, key_buffers.index(buffer).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(keys_free.index(buffer))
            is_left = gl.arange(0, num_keys, gl.SliceLayout(0, of_scores)) < num_left
            scores = gl.where(is_left[None, :], scores, float("-inf"))
            weights, m_i, l_i, alpha = _softmax(scores, m_i, l_i, scale)
            acc = acc * gl.convert_layout(alpha, of_output_row)[:, None]
            operand = gl.convert_layout(weights.to(dtype), of_weights)
            mbarrier.wait(values_ready.index(buffer), is_odd)
            if num_left < num_keys:
                # After the prefix the page may hold NaN, which a weight of 0 would not remove.
                _clear_values(value_buffers.index(buffer), num_left)

            for number in range(1, num_key_tiles):  # noqa: B007  # `_` is a tensor here
                next_step = step + 1
                next_buffer, next_odd = next_step % num_buffers, (next_step // num_buffers) % 2
                mbarrier.wait(keys_ready.index(next_buffer), next_odd)
                token = warpgroup_mma(
                    queries, key_buffers.index(next_buffer).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                output = warpgroup_mma(operand, value_buffers.index(buffer), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[token])
                mbarrier.arrive(keys_free.index(next_buffer))
                weights, m_i, l_i, alpha = _softmax(scores, m_i, l_i, scale)
                # Values of the next tile. ptxas moves the wait for a product to its start unless a branch lies between,
                # so without this one the softmax would run when the matrix units have nothing to do.
                mbarrier.wait(values_ready.index(next_buffer), next_odd)
                acc, operand = warpgroup_mma_wait(0, deps=[output, operand])
                mbarrier.arrive(values_free.index(buffer))
                acc = acc * gl.convert_layout(alpha, of_output_row)[:, None]
                operand = gl.convert_layout(weights.to(dtype), of_weights)
                step, buffer, is_odd = next_step, next_buffer, next_odd
            output = warpgroup_mma(operand, value_buffers.index(buffer), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[output])
            mbarrier.arrive(values_free.index(buffer))
            step += 1

            acc = acc / gl.convert_layout(l_i, of_output_row)[:, None]
            stored = gl.convert_layout(acc.to(dtype), memory)
            gl.store(out_at + columns[None, :], stored, mask=inside)


@jit
def hopper_prefix_kernel(
    counts: gl.tensor,  # [3] int32: tiles of each kind
    starts: gl.tensor,  # [tiles] int32: first token
    lens: gl.tensor,  # [tiles] int32: tokens
    reads: gl.tensor,  # [tiles] int32: how many prefix tokens each of them reads
    lists: gl.tensor,  # [tiles] int32: where in `addresses` the pages of their prefix begin
    addresses: gl.tensor,  # [pages] int32: the page table, first row of each page in `keys` and `values`
    qkv: gl.tensor,  # [T, N + 2 K, H]: the queries
    keys: tma.tensor_descriptor,  # of [A, heads * H], loaded as [C, H]
    values: tma.tensor_descriptor,  # of [A, heads * H], loaded as [C, H]
    out: gl.tensor,  # [T, N, H], tokens `out_stride` apart: of self-attention, overwritten with both parts
    lse: gl.tensor,  # [T, N] float32, base 2, of self-attention
    first_key_head: gl.constexpr,  # where the KV heads begin in a row of `keys`
    first_value_head: gl.constexpr,
    scale: gl.constexpr,  # of the scores, times log2(e)
    kind: gl.constexpr,  # index in `counts`
    width: gl.constexpr,  # tokens of a tile
    num_buffers: gl.constexpr,  # tiles of keys, and of values, in flight
    page_size: gl.constexpr,  # tokens of a page
    out_stride: gl.constexpr,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,  # query heads of a KV head
    padded_group: gl.constexpr,  # the power of two that holds them
    head_size: gl.constexpr,
    padded_head_size: gl.constexpr,
) -> None:
    """Prefix attention: tokens over the prefix that they read."""
    num_rows: gl.constexpr = width * padded_group // 2
    dtype: gl.constexpr = qkv.dtype.element_ty
    buffer_shape: gl.constexpr = [num_buffers, keys.block_type.shape[0], padded_head_size]
    key_buffers = gl.allocate_shared_memory(dtype, buffer_shape, keys.layout)
    value_buffers = gl.allocate_shared_memory(dtype, buffer_shape, values.layout)
    queries = gl.allocate_shared_memory(dtype, [2, num_rows, padded_head_size], keys.layout)
    keys_ready = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(num_buffers):
        mbarrier.init(keys_ready.index(number), count=1)
        mbarrier.init(values_ready.index(number), count=1)
        mbarrier.init(keys_free.index(number), count=2)
        mbarrier.init(values_free.index(number), count=2)

    tiles = (counts, starts, lens, reads, lists, addresses)
    buffers = (key_buffers, value_buffers)
    barriers = (keys_ready, keys_free, values_ready, values_free)
    first = (0, tiles, qkv, out, lse, queries.index(0), buffers, barriers)
    second = (1, tiles, qkv, out, lse, queries.index(1), buffers, barriers)
    heads = (scale, kind, out_stride, num_kv_heads, group, padded_group, head_size)
    loader = (first_key_head, first_value_head, kind, page_size, num_kv_heads, head_size)
    gl.warp_specialize(
        [
            (_attend, first + heads),
            (_attend, second + heads),
            (_load_key_tiles, (tiles, keys, values, buffers, barriers) + loader),  # noqa: RUF005  # Gluon's tuples
        ],
        [4, 1],
        [240, 24],
    )
