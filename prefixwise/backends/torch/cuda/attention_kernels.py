"""Attention over segments as Triton kernels, over the tiles of `forward/tiles.py`.

Self-attention runs first and writes each token's output and log-sum-exp. Prefix attention starts its online softmax
from them, so no merge follows. In the last layer only scored tokens need it: between the two they are put together. The
query heads of one KV head are rows of one matrix product. A row's arithmetic depends on its segment and its prefix
alone: tiles are counted from the segment's start, key tiles from the prefix's start, and no sum is split between
programs. The tiles of a program are data, so one launch serves every batch.

In the kernels: `R` rows of a tile (its tokens x query heads of one KV head, padded to a power of two), `C` keys of a
load. `m_i` is the running max, `l_i` the running sum and `alpha` the rescale of the online softmax. Sizes of the model
and the layer's sliding window are compile-time constants; nothing else chooses the compiled kernel. A key that a window
hides adds exactly nothing, so tiles of keys that it hides from all rows of a tile are skipped.
"""

from __future__ import annotations

import triton.language as tl

from prefixwise.backends.torch.cuda.elementwise_kernels import jit

_FAR: tl.constexpr = tl.constexpr(1 << 30)  # a position behind all others


@jit
def _softmax_step(
    out: tl.tensor,  # [R, H] float32
    m_i: tl.tensor,  # [R] float32: running max
    l_i: tl.tensor,  # [R] float32: running sum
    q: tl.tensor,  # [R, H]
    keys: tl.tensor,  # [C, H]
    values: tl.tensor,  # [C, H]
    hidden: tl.tensor,  # [R, C] or [1, C]: which keys a row does not see; not read unless `is_masked`
    scale: tl.constexpr,
    softcap: tl.constexpr,  # of the scores, times log2(e); 0: they are not capped
    is_masked: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One tile of keys into the online softmax, base 2. Every row has seen a key before, or sees one here."""
    scores = tl.dot(q, keys.T)
    if softcap > 0.0:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 * scale / softcap))))  # tanh
    if is_masked:
        scores = tl.where(hidden, float("-inf"), scores)
    if softcap > 0.0:
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        weights = tl.exp2(scores - m_new[:, None])
    else:
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(weights, 1)
    out = tl.dot(weights.to(values.dtype), values, out * alpha[:, None])
    return out, m_new, l_i


@jit
def _load_tile(
    stored: tl.tensor,  # descriptor
    row: tl.tensor,
    column: tl.tensor,
    scales: tl.tensor | None,  # [A] uint8, exponents of this KV head; None: no codes are stored
    num_keys: tl.constexpr,  # C
    dtype: tl.constexpr,  # of the queries
) -> tl.tensor:
    """Keys or values [C, H]. A code times its scale, a power of two, is a number of `dtype`: nothing is rounded."""
    tile = stored.load([row, column])
    if scales is not None:
        exponents = tl.load(scales + row + tl.arange(0, num_keys)).to(tl.int32)
        # By way of float32: FP8 becomes float16 first, and only one number at a time can go from there to bfloat16.
        tile = (tile.to(tl.float32) * (exponents << 23).to(tl.float32, bitcast=True)[:, None]).to(dtype)
    return tile


@jit
def _tile_at(
    starts: tl.tensor, lens: tl.tensor, segments: tl.tensor, tile: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """First token, tokens, and the first token of the segment."""
    return tl.load(starts + tile).to(tl.int64), tl.load(lens + tile), tl.load(segments + tile).to(tl.int64)


@jit
def self_attention_kernel(
    counts: tl.tensor,  # [5] int32: tiles of each kind
    starts: tl.tensor,  # [tiles] int32: first token
    lens: tl.tensor,  # [tiles] int32: tokens
    segments: tl.tensor,  # [tiles] int32: first token of the segment
    qkv: tl.tensor,  # [T, N + 2 K, H]
    out: tl.tensor,  # [T, N, H], tokens `out_stride` apart
    codes: tl.tensor | None,  # [T, N, H] FP8, the same rounded further; None: not needed
    lse: tl.tensor,  # [T, N] float32, base 2
    scale: tl.constexpr,  # of the scores, times log2(e)
    softcap: tl.constexpr,  # of the scores, times log2(e); 0: they are not capped
    window: tl.constexpr,  # how many tokens a token sees, itself included; 0: all before it
    kind: tl.constexpr,  # index in `counts`
    width: tl.constexpr,  # tokens of a tile, and keys of a tile of keys
    out_stride: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads of a KV head
    padded_group: tl.constexpr,  # the power of two that holds them
    head_size: tl.constexpr,
    padded_head_size: tl.constexpr,
) -> None:
    """Self-attention within each segment. Programs stride over the tiles of all KV heads.

    A tile is first attended to itself, then to the tiles before it in its segment: short segments have none, and load
    all that they need at once. Where the next tile lies is loaded meanwhile.
    """
    num_heads: tl.constexpr = num_kv_heads * group
    row_size: tl.constexpr = (num_heads + 2 * num_kv_heads) * head_size
    rows = tl.arange(0, width * padded_group)
    offset, head_in_group = rows // padded_group, rows % padded_group
    columns = tl.arange(0, padded_head_size)
    key = tl.arange(0, width)
    num_work = tl.load(counts + kind) * num_kv_heads
    first_tile = tl.minimum(tl.program_id(0), tl.maximum(num_work - 1, 0)) // num_kv_heads
    start, length, segment = _tile_at(starts, lens, segments, first_tile)
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        kv_head = work % num_kv_heads
        next_tile = tl.minimum(work + tl.num_programs(0), num_work - 1) // num_kv_heads
        next_start, next_length, next_segment = _tile_at(starts, lens, segments, next_tile)
        is_real = (offset < length) & (head_in_group < group)
        head = kv_head * group + head_in_group
        inside = is_real[:, None] & (columns < head_size)[None, :]
        q_at = qkv + start * row_size + (offset * row_size + head * head_size)[:, None] + columns[None, :]
        q = tl.load(q_at, mask=inside, other=0.0)
        l_i = tl.zeros([width * padded_group], tl.float32)
        m_i, acc = l_i - float("inf"), tl.zeros([width * padded_group, padded_head_size], tl.float32)

        keys_at = qkv + (num_heads + kv_head) * head_size + (key * row_size)[:, None] + columns[None, :]
        is_column = (columns < head_size)[None, :] & (key >= 0)[:, None]
        seen = is_column & (key < length)[:, None]
        keys = tl.load(keys_at + start * row_size, mask=seen, other=0.0)
        values = tl.load(keys_at + start * row_size + num_kv_heads * head_size, mask=seen, other=0.0)
        unseen = offset[:, None] < key[None, :]
        if window > 0:
            unseen = unseen | (offset[:, None] - key[None, :] >= window)
        acc, m_i, l_i = _softmax_step(acc, m_i, l_i, q, keys, values, unseen, scale, softcap, True)
        before = (start - segment).to(tl.int32)
        first = 0
        if window > 0:
            first = tl.maximum(before - window + 1, 0) // width
        for number in range(first, before // width):
            tile_at = keys_at + (segment + number * width) * row_size
            keys = tl.load(tile_at, mask=is_column, other=0.0)
            values = tl.load(tile_at + num_kv_heads * head_size, mask=is_column, other=0.0)
            if window > 0:
                far = before + offset[:, None] - (number * width + key)[None, :] >= window
                acc, m_i, l_i = _softmax_step(acc, m_i, l_i, q, keys, values, far, scale, softcap, True)
            else:
                acc, m_i, l_i = _softmax_step(acc, m_i, l_i, q, keys, values, 0, scale, softcap, False)

        rounded = (acc / l_i[:, None]).to(out.dtype.element_ty)
        out_at = out + start * out_stride + (offset * out_stride + head * head_size)[:, None]
        tl.store(out_at + columns[None, :], rounded, mask=inside)
        if codes is not None:
            codes_at = codes + (start + offset)[:, None] * (num_heads * head_size) + (head * head_size)[:, None]
            tl.store(codes_at + columns[None, :], rounded.to(tl.float32).to(codes.dtype.element_ty), mask=inside)
        tl.store(lse + start * num_heads + offset * num_heads + head, m_i + tl.log2(l_i), mask=is_real)
        start, length, segment = next_start, next_length, next_segment


@jit
def take_scored_kernel(
    counts: tl.tensor,  # [5] int32
    tokens: tl.tensor,  # [T] int32: the scored ones
    qkv: tl.tensor,  # [T, N + 2 K, H]
    out: tl.tensor,  # [T, N, H], tokens `out_stride` apart: of self-attention
    lse: tl.tensor,  # [T, N] float32
    positions: tl.tensor,  # [T] int32
    scored_queries: tl.tensor,  # [T, N, H]; only the first rows of this and of the others are written
    scored_out: tl.tensor,  # [T, N, H]
    scored_lse: tl.tensor,  # [T, N] float32
    scored_positions: tl.tensor,  # [T] int32
    num_kind: tl.constexpr,  # index in `counts` of how many there are
    row_size: tl.constexpr,  # (N + 2 K) * H
    out_stride: tl.constexpr,
    num_heads: tl.constexpr,
    size: tl.constexpr,  # N * H
    padded_heads: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    """What prefix attention reads of the scored tokens, one behind the other. Programs stride over them."""
    columns, heads = tl.arange(0, padded_size), tl.arange(0, padded_heads)
    num_rows = tl.load(counts + num_kind)
    for first in range(0, num_rows, tl.num_programs(0)):
        row = (first + tl.program_id(0)).to(tl.int64)
        if row < num_rows:
            token = tl.load(tokens + row).to(tl.int64)
            queries = tl.load(qkv + token * row_size + columns, mask=columns < size)
            tl.store(scored_queries + row * size + columns, queries, mask=columns < size)
            attended = tl.load(out + token * out_stride + columns, mask=columns < size)
            tl.store(scored_out + row * size + columns, attended, mask=columns < size)
            of_heads = tl.load(lse + token * num_heads + heads, mask=heads < num_heads)
            tl.store(scored_lse + row * num_heads + heads, of_heads, mask=heads < num_heads)
            tl.store(scored_positions + row, tl.load(positions + token))


@jit
def prefix_kernel(
    counts: tl.tensor,  # [5] int32: tiles of each kind
    starts: tl.tensor,  # [tiles] int32: first token
    lens: tl.tensor,  # [tiles] int32: tokens
    reads: tl.tensor,  # [tiles] int32: how many prefix tokens each of them reads
    lists: tl.tensor,  # [tiles] int32: where in `addresses` the pages of their prefix begin
    addresses: tl.tensor,  # [pages] int32: the page table, first row of each page in `keys` and `values`
    queries: tl.tensor,  # [T, N, H], tokens `query_stride` apart
    keys: tl.tensor,  # descriptor of [A, heads * H], loaded as [C, H]
    values: tl.tensor,  # descriptor of [A, heads * H], loaded as [C, H]
    out: tl.tensor,  # [T, N, H], tokens `out_stride` apart: of self-attention
    result: tl.tensor,  # [T, N, H], tokens `result_stride` apart: both parts; `out` itself, or FP8
    lse: tl.tensor,  # [T, N] float32, base 2, of self-attention
    positions: tl.tensor,  # [T] int32, of tokens behind the start of their prefix; not read without a window
    key_scales: tl.tensor | None,  # [K, A] uint8, exponents; None: keys and values have no scales
    value_scales: tl.tensor | None,  # [K, A] uint8
    num_slots: tl.tensor | None,  # A
    first_key_head: tl.constexpr,  # where the KV heads begin in a row of `keys`
    first_value_head: tl.constexpr,
    scale: tl.constexpr,  # of the scores, times log2(e)
    softcap: tl.constexpr,  # of the scores, times log2(e); 0: they are not capped
    window: tl.constexpr,  # how many tokens a token sees, itself included; 0: all before it
    kind: tl.constexpr,  # index in `counts`
    width: tl.constexpr,  # tokens of a tile
    num_keys: tl.constexpr,  # C
    page_size: tl.constexpr,  # tokens of a page
    query_stride: tl.constexpr,
    out_stride: tl.constexpr,
    result_stride: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads of a KV head
    padded_group: tl.constexpr,  # the power of two that holds them
    head_size: tl.constexpr,
    padded_head_size: tl.constexpr,
) -> None:
    """Prefix attention: tokens over the prefix that they read.

    Where the head size is no power of two, the columns after it belong to the next head of the same tokens: queries are
    zero there, and the output is not stored.
    """
    num_heads: tl.constexpr = num_kv_heads * group
    per_page: tl.constexpr = page_size // num_keys
    dtype: tl.constexpr = queries.dtype.element_ty
    rows = tl.arange(0, width * padded_group)
    offset, head_in_group = rows // padded_group, rows % padded_group
    columns = tl.arange(0, padded_head_size)
    num_programs = tl.num_programs(0)
    num_work = tl.load(counts + kind) * num_kv_heads
    for first_work in range(0, num_work, num_programs):
        # Tiles with long prefixes come last where KV blocks of one prefix read each other. So tiles are taken from the
        # end, and every second round in reverse, so that a program that had a long prefix gets a short one next.
        is_odd = (first_work // num_programs) % 2
        program = tl.where(is_odd == 1, num_programs - 1 - tl.program_id(0), tl.program_id(0))
        work = num_work - 1 - first_work - program
        if work >= 0:
            tile, kv_head = work // num_kv_heads, work % num_kv_heads
            start, length = tl.load(starts + tile).to(tl.int64), tl.load(lens + tile)
            num_read, list_at = tl.load(reads + tile), addresses + tl.load(lists + tile)
            is_real = (offset < length) & (head_in_group < group)
            head = kv_head * group + head_in_group
            inside = is_real[:, None] & (columns < head_size)[None, :]
            q_at = queries + start * query_stride + (offset * query_stride + head * head_size)[:, None]
            q = tl.load(q_at + columns[None, :], mask=inside, other=0.0)
            out_at = out + start * out_stride + (offset * out_stride + head * head_size)[:, None]
            out_at += columns[None, :]
            acc = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
            m_i = tl.load(lse + start * num_heads + offset * num_heads + head, mask=is_real, other=0.0)
            l_i = tl.full([width * padded_group], 1.0, tl.float32)

            key_column = (first_key_head + kv_head) * head_size
            value_column = (first_value_head + kv_head) * head_size
            head_key_scales, head_value_scales = key_scales, value_scales
            if key_scales is not None:
                head_key_scales = key_scales + kv_head.to(tl.int64) * num_slots
                head_value_scales = value_scales + kv_head.to(tl.int64) * num_slots
            num_whole = num_read // num_keys
            first = 0
            if window > 0:
                key = tl.arange(0, num_keys)
                position = tl.load(positions + start + offset, mask=offset < length, other=_FAR)
                first = tl.minimum(tl.maximum(tl.min(position, 0) - window + 1, 0) // num_keys, num_whole)
            for number in range(first, num_whole):
                row = tl.load(list_at + number // per_page) + number % per_page * num_keys
                tile_keys = _load_tile(keys, row, key_column, head_key_scales, num_keys, dtype)
                tile_values = _load_tile(values, row, value_column, head_value_scales, num_keys, dtype)
                if window > 0:
                    far = position[:, None] - (number * num_keys + key)[None, :] >= window
                    acc, m_i, l_i = _softmax_step(acc, m_i, l_i, q, tile_keys, tile_values, far, scale, softcap, True)
                else:
                    acc, m_i, l_i = _softmax_step(acc, m_i, l_i, q, tile_keys, tile_values, 0, scale, softcap, False)
            num_left = num_read - num_whole * num_keys
            if num_left > 0:
                row = tl.load(list_at + num_whole // per_page) + num_whole % per_page * num_keys
                is_left = tl.arange(0, num_keys) < num_left
                tile_keys = _load_tile(keys, row, key_column, head_key_scales, num_keys, dtype)
                tile_values = _load_tile(values, row, value_column, head_value_scales, num_keys, dtype)
                # After the prefix the page may hold NaN, which a weight of 0 would not remove.
                tile_values = tl.where(is_left[:, None], tile_values, 0.0)
                unseen = ~is_left[None, :]
                if window > 0:
                    unseen = unseen | (position[:, None] - (num_whole * num_keys + key)[None, :] >= window)
                acc, m_i, l_i = _softmax_step(acc, m_i, l_i, q, tile_keys, tile_values, unseen, scale, softcap, True)
            # Loaded again, so that no address is held in registers while the loop runs over keys.
            start, length = tl.load(starts + tile, volatile=True).to(tl.int64), tl.load(lens + tile, volatile=True)
            inside = ((offset < length) & (head_in_group < group))[:, None] & (columns < head_size)[None, :]
            rounded = (acc / l_i[:, None]).to(out.dtype.element_ty).to(tl.float32).to(result.dtype.element_ty)
            result_at = result + start * result_stride + (offset * result_stride + head * head_size)[:, None]
            tl.store(result_at + columns[None, :], rounded, mask=inside)
