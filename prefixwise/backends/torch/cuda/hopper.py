"""The prefix part for NVIDIA's Hopper, in Gluon: the same tiles and the same result as `prefix_kernel`, faster.

Twelve warps: one loads blocks of keys and values, two groups of four each attend half a tile's rows. A group starts the
next block's scores and the values of the block before together, and takes its softmax while the values are added up;
and while one group takes a softmax, the other has the matrix units.

The prefix's last block, which may be short, comes first, so that no other needs a mask; then the others in order.

In the kernel: `R` rows of half a tile (tokens x query heads of one KV head), `C` keys of a block.
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


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """How [A, heads * H] is loaded in blocks of [C, H]."""
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def jit(function: Callable[..., Any]) -> Any:
    """`gluon.jit`, with a type."""
    return gluon.jit(function)


@jit
def _work_of(first_work: gl.tensor, num_work: gl.tensor) -> gl.tensor:
    """Which of all tiles in all heads is this program's in a round, less than 0 for none.

    Long prefixes are behind short ones where blocks of one prefix read each other. So from the end on, and to and fro,
    so that who had a long one next gets a short one.
    """
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if (first_work // num_programs) % 2 == 1:
        program = num_programs - 1 - program
    return num_work - 1 - first_work - program


@jit
def _load_blocks(
    tiles: gl.tuple,  # counts, starts, lens, reads, lists, addresses
    keys: tma.tensor_descriptor,
    values: tma.tensor_descriptor,
    buffers: gl.tuple,  # keys and values, [num_buffers, C, H] each
    barriers: gl.tuple,  # of each buffer, [num_buffers, 1] each: keys are there, are read; values are there, are read
    first_key_head: gl.constexpr,
    first_value_head: gl.constexpr,
    kind: gl.constexpr,
    page_size: gl.constexpr,
    num_kv_heads: gl.constexpr,
    head_size: gl.constexpr,
) -> None:
    """Load every block that the two groups will want, in their order."""
    counts, _, _, reads, lists, addresses = tiles
    key_buffers, value_buffers = buffers
    keys_there, keys_read, values_there, values_read = barriers
    num_buffers: gl.constexpr = key_buffers.shape[0]
    num_keys: gl.constexpr = key_buffers.shape[1]
    per_page: gl.constexpr = page_size // num_keys
    num_work = gl.load(counts + kind) * num_kv_heads
    step = 0
    for first_work in range(0, num_work, gl.num_programs(0)):
        work = _work_of(first_work, num_work)
        if work >= 0:
            tile, kv_head = work // num_kv_heads, work % num_kv_heads
            num_blocks = (gl.load(reads + tile) + num_keys - 1) // num_keys
            list_at = addresses + gl.load(lists + tile)
            for number in range(num_blocks):
                block = number - 1
                if number == 0:
                    block = num_blocks - 1
                row = gl.load(list_at + block // per_page) + block % per_page * num_keys
                buffer = step % num_buffers
                is_odd = (step // num_buffers) % 2
                mbarrier.wait(keys_read.index(buffer), is_odd ^ 1)
                mbarrier.expect(keys_there.index(buffer), keys.block_type.nbytes)
                column = (first_key_head + kv_head) * head_size
                tma.async_copy_global_to_shared(
                    keys, [row, column], keys_there.index(buffer), key_buffers.index(buffer)
                )
                mbarrier.wait(values_read.index(buffer), is_odd ^ 1)
                mbarrier.expect(values_there.index(buffer), values.block_type.nbytes)
                column = (first_value_head + kv_head) * head_size
                tma.async_copy_global_to_shared(
                    values, [row, column], values_there.index(buffer), value_buffers.index(buffer)
                )
                step += 1


@jit
def _softmax(
    scores: gl.tensor,  # [R, C] float32
    peak: gl.tensor,  # [R] float32
    total: gl.tensor,  # [R] float32
    scale: gl.constexpr,
) -> gl.tuple:
    """One block of scores into an online softmax, base 2: weights [R, C], the new peak and total, and by how much the
    output so far shrinks."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_peak[:, None])
    shrink = gl.exp2(peak - new_peak)
    return weights, new_peak, total * shrink + gl.sum(weights, 1), shrink


@jit
def _clear_values(values: gl.shared_memory_descriptor, num_left: gl.tensor) -> None:
    """Rows of a buffer [C, H] from `num_left` on become 0. Both groups do it: what they write is the same."""
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
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    group_block: gl.constexpr,
    head_size: gl.constexpr,
) -> None:
    """Attend half of the rows of every tile of this program."""
    counts, starts, lens, reads, _, _ = tiles
    key_buffers, value_buffers = buffers
    keys_there, keys_read, values_there, values_read = barriers
    num_buffers: gl.constexpr = key_buffers.shape[0]
    num_keys: gl.constexpr = key_buffers.shape[1]
    num_rows: gl.constexpr = queries.shape[0]
    head_block: gl.constexpr = queries.shape[1]
    num_heads: gl.constexpr = num_kv_heads * group
    row_size: gl.constexpr = (num_heads + 2 * num_kv_heads) * head_size
    dtype: gl.constexpr = qkv.dtype.element_ty
    memory: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, num_keys, 16])
    of_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, head_block, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_output, 2)
    of_row: gl.constexpr = gl.SliceLayout(1, of_scores)
    of_output_row: gl.constexpr = gl.SliceLayout(1, of_output)

    rows = half * num_rows + gl.arange(0, num_rows, gl.SliceLayout(1, memory))
    columns = gl.arange(0, head_block, gl.SliceLayout(0, memory))
    offset, head_in_group = rows // group_block, rows % group_block
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
            num_blocks = (num_read + num_keys - 1) // num_keys
            head = kv_head * group + head_in_group
            inside = ((offset < length) & (head_in_group < group))[:, None] & (columns < head_size)[None, :]
            q_at = qkv + start * row_size + (offset * row_size + head * head_size)[:, None] + columns[None, :]
            queries.store(gl.load(q_at, mask=inside, other=0.0))
            fence_async_shared()
            out_at = out + start * num_heads * head_size + (offset * num_heads + head)[:, None] * head_size
            acc = gl.load(out_at + columns[None, :], mask=inside, other=0.0)
            acc = gl.convert_layout(acc, of_output).to(gl.float32)
            state_head = state_rows % group_block
            is_state = (state_rows // group_block < length) & (state_head < group)
            lse_at = lse + (start + state_rows // group_block) * num_heads + kv_head * group + state_head
            peak = gl.load(lse_at, mask=is_state, other=0.0)
            total = gl.full([num_rows], 1.0, gl.float32, of_row)

            # The last block of the prefix, which may be short.
            buffer, is_odd = step % num_buffers, (step // num_buffers) % 2
            num_left = num_read - (num_blocks - 1) * num_keys
            mbarrier.wait(keys_there.index(buffer), is_odd)
            scores = warpgroup_mma(
                queries, key_buffers.index(buffer).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(keys_read.index(buffer))
            is_left = gl.arange(0, num_keys, gl.SliceLayout(0, of_scores)) < num_left
            scores = gl.where(is_left[None, :], scores, float("-inf"))
            weights, peak, total, shrink = _softmax(scores, peak, total, scale)
            acc = acc * gl.convert_layout(shrink, of_output_row)[:, None]
            operand = gl.convert_layout(weights.to(dtype), of_weights)
            mbarrier.wait(values_there.index(buffer), is_odd)
            if num_left < num_keys:
                # Beyond the prefix there may be anything: a weight of 0 would not take a NaN out.
                _clear_values(value_buffers.index(buffer), num_left)

            for number in range(1, num_blocks):  # noqa: B007  # `_` is a tensor here
                next_step = step + 1
                next_buffer, next_odd = next_step % num_buffers, (next_step // num_buffers) % 2
                mbarrier.wait(keys_there.index(next_buffer), next_odd)
                token = warpgroup_mma(
                    queries, key_buffers.index(next_buffer).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                mbarrier.wait(values_there.index(buffer), is_odd)
                output = warpgroup_mma(operand, value_buffers.index(buffer), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[token])
                mbarrier.arrive(keys_read.index(next_buffer))
                weights, peak, total, shrink = _softmax(scores, peak, total, scale)
                acc = warpgroup_mma_wait(0, deps=[output])
                mbarrier.arrive(values_read.index(buffer))
                acc = acc * gl.convert_layout(shrink, of_output_row)[:, None]
                operand = gl.convert_layout(weights.to(dtype), of_weights)
                step, buffer, is_odd = next_step, next_buffer, next_odd
            mbarrier.wait(values_there.index(buffer), is_odd)
            output = warpgroup_mma(operand, value_buffers.index(buffer), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[output])
            mbarrier.arrive(values_read.index(buffer))
            step += 1

            acc = acc / gl.convert_layout(total, of_output_row)[:, None]
            stored = gl.convert_layout(acc.to(dtype), memory)
            gl.store(out_at + columns[None, :], stored, mask=inside)


@jit
def hopper_prefix_kernel(
    counts: gl.tensor,  # [3] int32: tiles of each kind
    starts: gl.tensor,  # [tiles] int32: first token
    lens: gl.tensor,  # [tiles] int32: tokens
    reads: gl.tensor,  # [tiles] int32: how many prefix tokens each of them reads
    lists: gl.tensor,  # [tiles] int32: where in `addresses` the blocks of their prefix begin
    addresses: gl.tensor,  # [blocks] int32: first row of each block in `keys` and `values`
    qkv: gl.tensor,  # [T, N + 2 K, H]: the queries
    keys: tma.tensor_descriptor,  # of [A, heads * H], in blocks of [C, H]
    values: tma.tensor_descriptor,  # of [A, heads * H], in blocks of [C, H]
    out: gl.tensor,  # [T, N, H]: the own part, overwritten with both
    lse: gl.tensor,  # [T, N] float32, base 2, of the own part
    first_key_head: gl.constexpr,  # where the KV heads begin in a row of `keys`
    first_value_head: gl.constexpr,
    scale: gl.constexpr,  # of the scores, times log2(e)
    kind: gl.constexpr,  # place in `counts`
    width: gl.constexpr,  # tokens of a tile
    num_buffers: gl.constexpr,  # blocks of keys, and of values, under way
    page_size: gl.constexpr,  # tokens of a block in `addresses`
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,  # query heads of a KV head
    group_block: gl.constexpr,  # the power of two that holds them
    head_size: gl.constexpr,
    head_block: gl.constexpr,
) -> None:
    """Tokens over the prefix that they read."""
    num_rows: gl.constexpr = width * group_block // 2
    dtype: gl.constexpr = qkv.dtype.element_ty
    block_shape: gl.constexpr = [num_buffers, keys.block_type.shape[0], head_block]
    key_buffers = gl.allocate_shared_memory(dtype, block_shape, keys.layout)
    value_buffers = gl.allocate_shared_memory(dtype, block_shape, values.layout)
    queries = gl.allocate_shared_memory(dtype, [2, num_rows, head_block], keys.layout)
    keys_there = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    keys_read = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    values_there = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    values_read = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(num_buffers):
        mbarrier.init(keys_there.index(number), count=1)
        mbarrier.init(values_there.index(number), count=1)
        mbarrier.init(keys_read.index(number), count=2)
        mbarrier.init(values_read.index(number), count=2)

    tiles = (counts, starts, lens, reads, lists, addresses)
    buffers = (key_buffers, value_buffers)
    barriers = (keys_there, keys_read, values_there, values_read)
    first = (0, tiles, qkv, out, lse, queries.index(0), buffers, barriers)
    second = (1, tiles, qkv, out, lse, queries.index(1), buffers, barriers)
    heads = (scale, kind, num_kv_heads, group, group_block, head_size)
    loader = (first_key_head, first_value_head, kind, page_size, num_kv_heads, head_size)
    gl.warp_specialize(
        [
            (_attend, first + heads),
            (_attend, second + heads),
            (_load_blocks, (tiles, keys, values, buffers, barriers) + loader),  # noqa: RUF005  # Gluon's tuples
        ],
        [4, 1],
        [240, 24],
    )
