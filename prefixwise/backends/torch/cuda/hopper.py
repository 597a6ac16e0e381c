"""Prefix attention for NVIDIA's Hopper, in Gluon: the same tiles and the same result as `prefix_kernel`, faster.

Two groups of four warps each attend half a tile's rows. A group issues the scores of the next key tile and the values
of the previous one together, and computes its softmax while the values are added; while one group computes a softmax,
the other uses the matrix units. One more warp loads (`hopper_loads.py`).

A visit is one tile and KV head. Its queries and self-attention's output are loaded during the visit before, and its
first scores are issued with the last values of that one, so that short prefixes do not wait for memory either.

Queries and keys may be in FP8, and the result; values and self-attention's output never are. Results are stored by way
of the queries' buffers, which have been read, or by way of others where those are too small.

The prefix's last key tile, which may be short, comes first, so that the rest need no mask; then the rest in order.

In the kernel: `R` rows of half a tile (tokens x query heads of one KV head), `C` keys of a key tile; `m_i` is the
running max, `l_i` the running sum and `alpha` the rescale of the online softmax. Four threads have a row's scores. Each
has a running sum of its own, and only the last are added: threads would wait for each other once more at each key tile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from prefixwise.backends.torch.cuda.hopper_loads import jit, load_visits, num_visits_of, place_of, work_of


def describe(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """A TMA descriptor that loads [A, heads * H] in boxes of [C, H], or [T, heads, H] in boxes of `row_box`."""
    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
    layout = gl.NVMMASharedLayout.get_default_for(box, dtypes[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, box, layout)


def row_box(width: int, padded_group: int, padded_head_size: int) -> list[int]:
    """Tokens, heads and head size of half a tile's rows: half its tokens, or half the heads of its one token."""
    return [width // 2, padded_group, padded_head_size] if width > 1 else [1, padded_group // 2, padded_head_size]


@jit
def _sums_of_threads(weights: gl.tensor) -> gl.tensor:
    """[R, C] to [R, 4], of each of the four threads that have a row: two columns of eight each."""
    by_threads = weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(by_threads, 3), 1)


@jit
def _softmax(
    scores: gl.tensor,  # [R, C] float32
    m_i: gl.tensor,  # [R] float32: running max
    l_i: gl.tensor,  # [R, 4] float32: running sums
    scale: gl.constexpr,
) -> gl.tuple:
    """Scores of one key tile into an online softmax, base 2: weights [R, C], the new m_i and l_i, and alpha, which
    rescales the output so far."""
    m_new = gl.maximum(m_i, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    sums = _sums_of_threads(weights)
    alpha_of_sums = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))
    return weights, m_new, l_i * alpha_of_sums[:, None] + sums, alpha


@jit
def _clear_values(values: gl.shared_memory_descriptor, num_left: gl.tensor) -> None:
    """Set rows of a buffer [C, H] from `num_left` on to 0. Both groups do it, and write the same."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 32, gl.SliceLayout(1, layout))
    num_keys: gl.constexpr = values.shape[0]
    for first in gl.static_range(0, num_keys, 32):
        if num_left < first + 32:
            part = values.slice(first, 32)
            loaded = part.load(layout)
            part.store(gl.where((first + row < num_left)[:, None], loaded, gl.zeros_like(loaded)))
    fence_async_shared()


@jit
def _tile_at(starts: gl.tensor, lens: gl.tensor, reads: gl.tensor, tile: gl.tensor) -> gl.tuple:
    """First token, tokens, and how many prefix tokens each reads."""
    return gl.load(starts + tile), gl.load(lens + tile), gl.load(reads + tile)


@jit
def _load_lse(
    lse: gl.tensor,
    rows: gl.tensor,
    start: gl.tensor,
    length: gl.tensor,
    kv_head: gl.tensor,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    padded_group: gl.constexpr,
) -> gl.tensor:
    num_heads: gl.constexpr = num_kv_heads * group
    offset, head_in_group = rows // padded_group, rows % padded_group
    at = lse + start.to(gl.int64) * num_heads + kv_head * group + (offset * num_heads + head_in_group)
    return gl.load(at, mask=(offset < length) & (head_in_group < group), other=0.0)


@jit
def _store(
    acc: gl.tensor,  # [R, H] float32
    staging: gl.shared_memory_descriptor,  # [R, H]
    dtype: gl.constexpr,  # of the model, to which `acc` is rounded before it is in FP8
    result: gl.tensor,  # from the tile's first token and head on
    half: gl.constexpr,
    length: gl.tensor,
    result_stride: gl.constexpr,
    group: gl.constexpr,
    padded_group: gl.constexpr,
    head_size: gl.constexpr,
) -> None:
    """Through shared memory, as a thread of a matrix product holds four bytes of a row at a time."""
    num_rows: gl.constexpr = staging.shape[0]
    memory: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    rounded = acc.to(dtype)
    if staging.dtype != dtype:
        rounded = rounded.to(gl.float32).to(staging.dtype)
    staging.store(rounded)
    rows = half * num_rows + gl.arange(0, num_rows, gl.SliceLayout(1, memory))
    columns = gl.arange(0, staging.shape[1], gl.SliceLayout(0, memory))
    offset, head_in_group = rows // padded_group, rows % padded_group
    is_inside = ((offset < length) & (head_in_group < group))[:, None] & (columns < head_size)[None, :]
    at = result + (offset * result_stride + head_in_group * head_size)[:, None] + columns[None, :]
    by_rows = staging.load(memory)
    fence_async_shared()
    gl.store(at, by_rows, mask=is_inside)


@jit
def _attend(
    half: gl.constexpr,  # which half of the rows
    tiles: gl.tuple,
    result: gl.tensor,
    lse: gl.tensor,
    buffers: gl.tuple,
    barriers: gl.tuple,
    scale: gl.constexpr,
    kind: gl.constexpr,
    result_stride: gl.constexpr,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    padded_group: gl.constexpr,
    head_size: gl.constexpr,
) -> None:
    """Attend half of the rows of every tile of this program."""
    counts, starts, lens, reads, _, _ = tiles
    query_buffers, output_buffers, key_buffers, value_buffers, staging_buffers = buffers
    queries_ready, queries_free, outputs_ready, outputs_free, keys_ready, keys_free, values_ready, values_free = (
        barriers
    )
    num_buffers: gl.constexpr = key_buffers.shape[0]
    num_keys: gl.constexpr = key_buffers.shape[1]
    padded_head_size: gl.constexpr = key_buffers.shape[2]
    num_rows: gl.constexpr = query_buffers.shape[1] * query_buffers.shape[2]
    dtype: gl.constexpr = output_buffers.dtype
    inner: gl.constexpr = 256 // query_buffers.dtype.primitive_bitwidth  # that an instruction sums over
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, num_keys, inner])
    of_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, padded_head_size, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_output, 2)
    of_row: gl.constexpr = gl.SliceLayout(1, of_scores)
    of_output_row: gl.constexpr = gl.SliceLayout(1, of_output)

    rows = half * num_rows + gl.arange(0, num_rows, of_row)
    no_scores = gl.zeros([num_rows, num_keys], gl.float32, of_scores)
    self_output = output_buffers.index(half).reshape([num_rows, padded_head_size])
    num_work = gl.load(counts + kind) * num_kv_heads
    num_visits = num_visits_of(num_work)
    work = work_of(0, num_work)
    start, length, num_read = _tile_at(starts, lens, reads, work // num_kv_heads)
    length *= (num_work > 0).to(gl.int32)  # without a tile, what lies there is of another forward
    m_i = _load_lse(lse, rows, start, length, work % num_kv_heads, num_kv_heads, group, padded_group)
    mbarrier.wait(queries_ready.index(0), 0, pred=num_visits > 0)
    mbarrier.wait(keys_ready.index(0), 0, pred=num_visits > 0)
    query = query_buffers.index(half).reshape([num_rows, padded_head_size])
    first_scores = warpgroup_mma(query, key_buffers.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    step = 0
    for visit in range(num_visits):
        next_work = work_of(visit + 1, num_work)
        next_start, next_length, next_read = _tile_at(starts, lens, reads, next_work // num_kv_heads)
        query = query_buffers.index(2 * (visit % 2) + half).reshape([num_rows, padded_head_size])
        mbarrier.wait(outputs_ready, visit % 2)
        acc = self_output.load(of_output).to(gl.float32)
        mbarrier.arrive(outputs_free)
        l_i = _sums_of_threads(no_scores) + 0.25  # self-attention's 1, in four parts

        # The last key tile of the prefix, which may be short.
        num_key_tiles = (num_read + num_keys - 1) // num_keys
        num_left = num_read - (num_key_tiles - 1) * num_keys
        buffer, is_odd = place_of(step, num_buffers)
        scores = warpgroup_mma_wait(0, deps=[first_scores])
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
            next_buffer, is_odd = place_of(step + 1, num_buffers)
            mbarrier.wait(keys_ready.index(next_buffer), is_odd)
            next_keys = key_buffers.index(next_buffer).permute((1, 0))
            token = warpgroup_mma(query, next_keys, no_scores, use_acc=False, is_async=True)
            output = warpgroup_mma(operand, value_buffers.index(buffer), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[token])
            mbarrier.arrive(keys_free.index(next_buffer))
            weights, m_i, l_i, alpha = _softmax(scores, m_i, l_i, scale)
            # Values of the next tile. ptxas moves the wait for a product to its start unless a branch lies between,
            # so without this one the softmax would run when the matrix units have nothing to do.
            mbarrier.wait(values_ready.index(next_buffer), is_odd)
            acc, operand = warpgroup_mma_wait(0, deps=[output, operand])
            mbarrier.arrive(values_free.index(buffer))
            acc = acc * gl.convert_layout(alpha, of_output_row)[:, None]
            operand = gl.convert_layout(weights.to(dtype), of_weights)
            step, buffer = step + 1, next_buffer

        # The last values, and the first scores of the next visit; after the last visit, of what happens to lie there.
        has_next = visit + 1 < num_visits
        next_turn, is_odd = place_of(visit + 1, 2)
        mbarrier.wait(queries_ready.index(next_turn), is_odd, pred=has_next)
        next_buffer, is_odd = place_of(step + 1, num_buffers)
        mbarrier.wait(keys_ready.index(next_buffer), is_odd, pred=has_next)
        output = warpgroup_mma(operand, value_buffers.index(buffer), acc, is_async=True)
        next_query = query_buffers.index(2 * next_turn + half).reshape([num_rows, padded_head_size])
        next_keys = key_buffers.index(next_buffer).permute((1, 0))
        first_scores = warpgroup_mma(next_query, next_keys, no_scores, use_acc=False, is_async=True)
        m_i = _load_lse(lse, rows, next_start, next_length, next_work % num_kv_heads, num_kv_heads, group, padded_group)
        acc, operand = warpgroup_mma_wait(1, deps=[output, operand])
        mbarrier.arrive(values_free.index(buffer))
        acc = acc / gl.convert_layout(gl.sum(l_i, 1), of_output_row)[:, None]
        result_at = result + start.to(gl.int64) * result_stride + work % num_kv_heads * group * head_size
        staging = query
        if staging_buffers.dtype != query_buffers.dtype:
            staging = staging_buffers.index(half)
            if dtype != staging_buffers.dtype:  # in the queries' memory: two in each of theirs
                staging = staging_buffers.index(2 * (2 * (visit % 2) + half))
        _store(acc, staging, dtype, result_at, half, length, result_stride, group, padded_group, head_size)
        mbarrier.arrive(queries_free.index(visit % 2))
        step += 1
        work, start, length, num_read = next_work, next_start, next_length, next_read
    warpgroup_mma_wait(0, deps=[first_scores])


@jit
def _barriers(num_barriers: gl.constexpr, count: gl.constexpr) -> gl.shared_memory_descriptor:
    """[num_barriers, 1], each of which needs `count` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [num_barriers, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(num_barriers):
        mbarrier.init(barriers.index(number), count=count)
    return barriers


@jit
def hopper_prefix_kernel(
    counts: gl.tensor,  # [5] int32: tiles of each kind
    starts: gl.tensor,  # [tiles] int32: first token
    lens: gl.tensor,  # [tiles] int32: tokens
    reads: gl.tensor,  # [tiles] int32: how many prefix tokens each of them reads
    lists: gl.tensor,  # [tiles] int32: where in `addresses` the pages of their prefix begin
    addresses: gl.tensor,  # [pages] int32: the page table, first row of each page in `keys` and `values`
    queries: tma.tensor_descriptor,  # of [T, N or more, H], loaded as `row_box` says
    outputs: tma.tensor_descriptor,  # of self-attention, likewise
    keys: tma.tensor_descriptor,  # of [A, heads * H], loaded as [C, H]
    values: tma.tensor_descriptor,  # of [A, heads * H], loaded as [C, H]
    result: gl.tensor,  # [T, N, H], tokens `result_stride` apart: both parts; where `outputs` lie, or in FP8
    lse: gl.tensor,  # [T, N] float32, base 2, of self-attention
    first_key_head: gl.constexpr,  # where the KV heads begin in a row of `keys`
    first_value_head: gl.constexpr,
    scale: gl.constexpr,  # of the scores, times log2(e)
    kind: gl.constexpr,  # index in `counts`
    width: gl.constexpr,  # tokens of a tile
    num_buffers: gl.constexpr,  # tiles of keys, and of values, in flight
    page_size: gl.constexpr,  # tokens of a page
    result_stride: gl.constexpr,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,  # query heads of a KV head
    padded_group: gl.constexpr,  # the power of two that holds them
    head_size: gl.constexpr,
    padded_head_size: gl.constexpr,
) -> None:
    """Prefix attention: tokens over the prefix that they read."""
    dtype: gl.constexpr = outputs.block_type.element_ty
    result_dtype: gl.constexpr = result.dtype.element_ty
    tokens: gl.constexpr = queries.block_type.shape[0]
    heads: gl.constexpr = queries.block_type.shape[1]
    query_dtype: gl.constexpr = queries.block_type.element_ty
    query_buffers = gl.allocate_shared_memory(query_dtype, [4, tokens, heads, padded_head_size], queries.layout)
    output_buffers = gl.allocate_shared_memory(dtype, [2, tokens, heads, padded_head_size], outputs.layout)
    buffer_shape: gl.constexpr = [num_buffers, keys.block_type.shape[0], padded_head_size]
    key_buffers = gl.allocate_shared_memory(query_dtype, buffer_shape, keys.layout)
    value_buffers = gl.allocate_shared_memory(dtype, buffer_shape, values.layout)
    queries_ready, queries_free = _barriers(2, 1), _barriers(2, 2)
    outputs_ready, outputs_free = _barriers(1, 1).index(0), _barriers(1, 2).index(0)
    keys_ready, keys_free = _barriers(num_buffers, 1), _barriers(num_buffers, 2)
    values_ready, values_free = _barriers(num_buffers, 1), _barriers(num_buffers, 2)

    tiles = (counts, starts, lens, reads, lists, addresses)
    staging_buffers = query_buffers
    if result_dtype != query_dtype:
        rows: gl.constexpr = [tokens * heads, padded_head_size]
        staging_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(rows, result_dtype)
        if result_dtype.primitive_bitwidth > query_dtype.primitive_bitwidth:
            staging_buffers = gl.allocate_shared_memory(result_dtype, [2] + rows, staging_layout)  # noqa: RUF005
        else:
            staging_buffers = query_buffers._reinterpret(result_dtype, [8] + rows, staging_layout)  # noqa: RUF005
    buffers = (query_buffers, output_buffers, key_buffers, value_buffers, staging_buffers)
    row_barriers = (queries_ready, queries_free, outputs_ready, outputs_free)
    barriers = row_barriers + (keys_ready, keys_free, values_ready, values_free)  # noqa: RUF005  # Gluon's tuples
    sizes = (scale, kind, result_stride, num_kv_heads, group, padded_group, head_size)
    loader = (first_key_head, first_value_head, kind, width, page_size, num_kv_heads, group, padded_group, head_size)
    gl.warp_specialize(
        [
            (_attend, (0, tiles, result, lse, buffers, barriers) + sizes),  # noqa: RUF005
            (_attend, (1, tiles, result, lse, buffers, barriers) + sizes),  # noqa: RUF005
            (load_visits, (tiles, (queries, outputs, keys, values), buffers, barriers) + loader),  # noqa: RUF005
        ],
        [4, 1],
        [240, 24],
    )
