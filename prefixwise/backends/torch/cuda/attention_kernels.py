"""Attention over segments as two Triton kernels. The tiles are those of `layout/tiles.py`.

`own` goes first and leaves each token's output and log-sum-exp; `prefix` takes them as the state that its own online
softmax starts from, so nothing is merged afterwards. The query heads of one KV head are rows of one product. A row's
arithmetic follows from its segment and its prefix: tiles are counted from the segment's start, key blocks from the
prefix's, and no sum is split between programs. What a program does when is data, so one launch serves every batch.

In the kernels: `R` rows of a tile (its tokens x query heads of one KV head, padded to a power of two), `C` keys of a
block. Sizes of the model are compile-time constants; nothing else chooses the compiled kernel.
"""

from __future__ import annotations

import triton.language as tl

from prefixwise.backends.torch.fused_elementwise import jit


@jit
def _step(
    out: tl.tensor,  # [R, H] float32
    peak: tl.tensor,  # [R] float32
    total: tl.tensor,  # [R] float32
    q: tl.tensor,  # [R, H]
    keys: tl.tensor,  # [C, H]
    values: tl.tensor,  # [C, H]
    hidden: tl.tensor,  # [R, C] or [1, C]: which keys a row does not see; not read unless `is_masked`
    scale: tl.constexpr,
    is_masked: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One block of keys into the online softmax, base 2. Every row has seen a key before, or sees one here."""
    scores = tl.dot(q, keys.T)
    if is_masked:
        scores = tl.where(hidden, float("-inf"), scores)
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(values.dtype), values, out * shrink[:, None])
    return out, new_peak, total


@jit
def self_attention_kernel(
    counts: tl.tensor,  # [3] int32: tiles of each kind
    starts: tl.tensor,  # [tiles] int32: first token
    lens: tl.tensor,  # [tiles] int32: tokens
    segments: tl.tensor,  # [tiles] int32: first token of the segment
    qkv: tl.tensor,  # [T, N + 2 K, H]
    out: tl.tensor,  # [T, N, H]
    lse: tl.tensor,  # [T, N] float32, base 2
    scale: tl.constexpr,  # of the scores, times log2(e)
    kind: tl.constexpr,  # place in `counts`
    is_wide: tl.constexpr,  # does a tile also see tiles of its segment before it?
    width: tl.constexpr,  # tokens of a tile, and keys of a block
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads of a KV head
    group_block: tl.constexpr,  # the power of two that holds them
    head_size: tl.constexpr,
    head_block: tl.constexpr,
) -> None:
    """Each segment's tokens over themselves. A program takes every so-many-th tile of a KV head."""
    num_heads: tl.constexpr = num_kv_heads * group
    row_size: tl.constexpr = (num_heads + 2 * num_kv_heads) * head_size
    rows = tl.arange(0, width * group_block)
    offset, head_in_group = rows // group_block, rows % group_block
    columns = tl.arange(0, head_block)
    key = tl.arange(0, width)
    for work in range(tl.program_id(0), tl.load(counts + kind) * num_kv_heads, tl.num_programs(0)):
        tile, kv_head = work // num_kv_heads, work % num_kv_heads
        start, length = tl.load(starts + tile).to(tl.int64), tl.load(lens + tile)
        is_real = (offset < length) & (head_in_group < group)
        head = kv_head * group + head_in_group
        inside = is_real[:, None] & (columns < head_size)[None, :]
        q_at = qkv + start * row_size + (offset * row_size + head * head_size)[:, None] + columns[None, :]
        q = tl.load(q_at, mask=inside, other=0.0)
        total = tl.zeros([width * group_block], tl.float32)
        peak, acc = total - float("inf"), tl.zeros([width * group_block, head_block], tl.float32)

        keys_at = qkv + (num_heads + kv_head) * head_size + (key * row_size)[:, None] + columns[None, :]
        is_column = (columns < head_size)[None, :] & (key >= 0)[:, None]
        if is_wide:
            segment = tl.load(segments + tile).to(tl.int64)
            for number in range((start - segment).to(tl.int32) // width):
                block_at = keys_at + (segment + number * width) * row_size
                keys = tl.load(block_at, mask=is_column, other=0.0)
                values = tl.load(block_at + num_kv_heads * head_size, mask=is_column, other=0.0)
                acc, peak, total = _step(acc, peak, total, q, keys, values, 0, scale, False)
        seen = is_column & (key < length)[:, None]
        keys = tl.load(keys_at + start * row_size, mask=seen, other=0.0)
        values = tl.load(keys_at + start * row_size + num_kv_heads * head_size, mask=seen, other=0.0)
        later = offset[:, None] < key[None, :]
        acc, peak, total = _step(acc, peak, total, q, keys, values, later, scale, True)

        out_at = out + start * num_heads * head_size + (offset * num_heads + head)[:, None] * head_size
        tl.store(out_at + columns[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
        tl.store(lse + start * num_heads + offset * num_heads + head, peak + tl.log2(total), mask=is_real)


@jit
def prefix_kernel(
    counts: tl.tensor,  # [3] int32: tiles of each kind
    starts: tl.tensor,  # [tiles] int32: first token
    lens: tl.tensor,  # [tiles] int32: tokens
    reads: tl.tensor,  # [tiles] int32: how many prefix tokens each of them reads
    lists: tl.tensor,  # [tiles] int32: where in `addresses` the blocks of their prefix begin
    addresses: tl.tensor,  # [blocks] int32: first row of each block in `keys` and `values`
    qkv: tl.tensor,  # [T, N + 2 K, H]: the queries
    keys: tl.tensor,  # descriptor of [A, heads * H], in blocks of [C, H]
    values: tl.tensor,  # descriptor of [A, heads * H], in blocks of [C, H]
    out: tl.tensor,  # [T, N, H]: the own part, overwritten with both
    lse: tl.tensor,  # [T, N] float32, base 2, of the own part
    first_key_head: tl.constexpr,  # where the KV heads begin in a row of `keys`
    first_value_head: tl.constexpr,
    scale: tl.constexpr,  # of the scores, times log2(e)
    kind: tl.constexpr,  # place in `counts`
    width: tl.constexpr,  # tokens of a tile
    num_keys: tl.constexpr,  # C
    page_size: tl.constexpr,  # tokens of a block in `addresses`
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads of a KV head
    group_block: tl.constexpr,  # the power of two that holds them
    head_size: tl.constexpr,
    head_block: tl.constexpr,
) -> None:
    """Tokens over the prefix that they read.

    Columns beyond the head size, where that is no power of two, are those of the next head of the same tokens: queries
    are zero there, and the output is not stored.
    """
    num_heads: tl.constexpr = num_kv_heads * group
    row_size: tl.constexpr = (num_heads + 2 * num_kv_heads) * head_size
    per_page: tl.constexpr = page_size // num_keys
    rows = tl.arange(0, width * group_block)
    offset, head_in_group = rows // group_block, rows % group_block
    columns = tl.arange(0, head_block)
    num_programs = tl.num_programs(0)
    num_work = tl.load(counts + kind) * num_kv_heads
    for first_work in range(0, num_work, num_programs):
        # Long prefixes are behind short ones where blocks of one prefix read each other. So from the end on, and to and
        # fro, so that who had a long one next gets a short one.
        is_odd = (first_work // num_programs) % 2
        turn = tl.where(is_odd == 1, num_programs - 1 - tl.program_id(0), tl.program_id(0))
        work = num_work - 1 - first_work - turn
        if work >= 0:
            tile, kv_head = work // num_kv_heads, work % num_kv_heads
            start, length = tl.load(starts + tile).to(tl.int64), tl.load(lens + tile)
            num_read, list_at = tl.load(reads + tile), addresses + tl.load(lists + tile)
            is_real = (offset < length) & (head_in_group < group)
            head = kv_head * group + head_in_group
            inside = is_real[:, None] & (columns < head_size)[None, :]
            q_at = qkv + start * row_size + (offset * row_size + head * head_size)[:, None] + columns[None, :]
            q = tl.load(q_at, mask=inside, other=0.0)
            out_at = out + start * num_heads * head_size + (offset * num_heads + head)[:, None] * head_size
            out_at += columns[None, :]
            acc = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
            peak = tl.load(lse + start * num_heads + offset * num_heads + head, mask=is_real, other=0.0)
            total = tl.full([width * group_block], 1.0, tl.float32)

            key_column = (first_key_head + kv_head) * head_size
            value_column = (first_value_head + kv_head) * head_size
            num_whole = num_read // num_keys
            for number in range(num_whole):
                row = tl.load(list_at + number // per_page) + number % per_page * num_keys
                block, block_values = keys.load([row, key_column]), values.load([row, value_column])
                acc, peak, total = _step(acc, peak, total, q, block, block_values, 0, scale, False)
            num_left = num_read - num_whole * num_keys
            if num_left > 0:
                row = tl.load(list_at + num_whole // per_page) + num_whole % per_page * num_keys
                is_left = tl.arange(0, num_keys) < num_left
                block, block_values = keys.load([row, key_column]), values.load([row, value_column])
                # Beyond the prefix there may be anything: a weight of 0 would not take a NaN out.
                block_values = tl.where(is_left[:, None], block_values, 0.0)
                acc, peak, total = _step(acc, peak, total, q, block, block_values, ~is_left[None, :], scale, True)
            # Read again, so that no address is held in registers while keys are walked.
            start, length = tl.load(starts + tile, volatile=True).to(tl.int64), tl.load(lens + tile, volatile=True)
            inside = ((offset < length) & (head_in_group < group))[:, None] & (columns < head_size)[None, :]
            out_at = out + start * num_heads * head_size + (offset * num_heads + head)[:, None] * head_size
            tl.store(out_at + columns[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
