"""Attention on NVIDIA GPUs in half precision: two Pallas kernels that Triton compiles.

`own` goes first and leaves each token's output and log-sum-exp; `prefix` takes them as the state that its own online
softmax starts from, so nothing is merged afterwards. The query heads of one KV head are rows of one product. A row's
arithmetic follows from its segment and its prefix: tiles are counted from the segment's start, key blocks from the
prefix's, and no sum is split between programs.

In the kernels: `R` rows of a tile (tokens x query heads of one KV head, padded to a power of two), `C` keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from itemwise.backends.jax.attention.base import AttentionImplementation, Partial, Source
from itemwise.backends.layout.tiles import KEY_BLOCK, NARROW, PREFIX, WIDE, DeviceTiles, TileSizes

MAX_PROGRAMS = 1056  # per KV head, 8 for each of an H200's multiprocessors; each takes every so-many-th tile
TILE_ROWS = 128
LEAST_TOKENS = 16  # of a tile: as keys they are a side of a product
LOG2_E = math.log2(math.e)

# What Triton takes for its refs; Pallas has no public type for them.
Ref = Any
State = tuple[jax.Array, jax.Array, jax.Array]  # output [R, H], peak [R] and total [R], of an online softmax, base 2


class PallasGpuAttention(AttentionImplementation):
    """See the module. `interpret` runs the kernels step by step on any device, for tests."""

    name = "pallas_gpu"
    needs_padding_tiles = True

    def __init__(self, *, interpret: bool = False) -> None:
        self._interpret = interpret

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        if platform != "gpu" and not self._interpret:
            return f"it needs an NVIDIA GPU of compute capability 8.0 or later, and this is: {platform}"
        if dtype not in (jnp.bfloat16, jnp.float16) and not self._interpret:
            return f"it computes in bfloat16 or float16, and this is {dtype}"
        if not 16 <= head_size <= 256:
            return f"it takes head sizes from 16 to 256, and this is {head_size}"
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        tokens = max(LEAST_TOKENS, TILE_ROWS // pl.next_power_of_2(heads_per_kv))
        return TileSizes(narrow=min(32, tokens), wide=min(64, tokens), prefix=tokens)

    def batch_source(self, k: jax.Array, v: jax.Array) -> Source:
        return Source(k, v, jnp.int32(0))

    def own(self, q: jax.Array, k: jax.Array, v: jax.Array, tiles: DeviceTiles) -> Partial:
        sizes = self.tile_sizes(q.shape[1] // k.shape[1])
        narrow = (tiles.narrow_start, tiles.narrow_len, tiles.narrow_start)
        found = self._own_tiles(NARROW, sizes.narrow, narrow, q, k, v, tiles.counts, None)
        wide = (tiles.wide_start, tiles.wide_len, tiles.wide_segment)
        return self._own_tiles(WIDE, sizes.wide, wide, q, k, v, tiles.counts, found)

    def _own_tiles(
        self,
        kind: int,
        width: int,
        arrays: tuple[jax.Array, ...],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        counts: jax.Array,
        found: Partial | None,
    ) -> Partial:
        """The tiles of one kind, written into what the other kind's have left."""
        num_kv_heads = k.shape[1]
        inputs = [counts, *arrays, q, k, v, *(found or ())]
        out, lse = pl.pallas_call(
            partial(_own_kernel, kind=kind, width=width, heads_per_kv=q.shape[1] // num_kv_heads),
            out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)],
            grid=(min(MAX_PROGRAMS, len(arrays[0])), num_kv_heads),
            input_output_aliases={} if found is None else {7: 0, 8: 1},
            compiler_params=plgpu.CompilerParams(num_warps=4 if q.shape[-1] <= 128 else 8, num_stages=2),
            interpret=self._interpret,
            name="own_attention",
        )(*inputs)
        return Partial(out, lse)

    def with_prefix(self, q: jax.Array, source: Source, own: Partial, tiles: DeviceTiles) -> jax.Array:
        num_kv_heads, head_size = source.keys.shape[1:]
        heads_per_kv = q.shape[1] // num_kv_heads
        # Queries and the keys and values under way have to fit a multiprocessor's shared memory.
        num_keys, num_warps, num_stages = (64, 4, 3) if head_size <= 128 else (32, 8, 2)
        width = self.tile_sizes(heads_per_kv).prefix
        inputs = [
            tiles.counts,
            tiles.prefix_start,
            tiles.prefix_len,
            tiles.prefix_read,
            tiles.token_prefix_list,
            tiles.block_addresses,
            source.base.reshape(1),
            q,
            source.keys,
            source.values,
            own.out,
            own.lse,
        ]
        out: jax.Array = pl.pallas_call(
            partial(_prefix_kernel, width=width, num_keys=num_keys, heads_per_kv=heads_per_kv),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(min(MAX_PROGRAMS, len(q)), num_kv_heads),
            input_output_aliases={10: 0},  # tokens that read no prefix keep their own part
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=self._interpret,
            name="prefix_attention",
        )(*inputs)
        return out


class _Rows:
    """The rows of a tile in one KV head: where they lie in [T, N, H], and which of them are real."""

    def __init__(
        self, kv_head: jax.Array, start: jax.Array, length: jax.Array, width: int, heads_per_kv: int, head_size: int
    ) -> None:
        padded_heads = pl.next_power_of_2(heads_per_kv)
        row, lane = jnp.arange(width * padded_heads), jnp.arange(pl.next_power_of_2(head_size))
        head_in_group = row % padded_heads
        self.offset = row // padded_heads  # of its token in the tile
        self.token = start + self.offset
        self.head = kv_head * heads_per_kv + head_in_group
        self.is_real = (self.offset < length) & (head_in_group < heads_per_kv)
        self._index = (self.token[:, None], self.head[:, None], lane[None, :])
        self._mask = self.is_real[:, None] & (lane < head_size)[None, :]

    def load(self, ref: Ref) -> jax.Array:
        """[R, H] of a [T, N, H] array."""
        return plgpu.load(ref.at[self._index], mask=self._mask, other=0.0)

    def load_scalars(self, ref: Ref) -> jax.Array:
        """[R] of a [T, N] array."""
        return plgpu.load(ref.at[self.token, self.head], mask=self.is_real, other=0.0)

    def store(self, ref: Ref, rows: jax.Array) -> None:
        plgpu.store(ref.at[self._index], rows.astype(ref.dtype), mask=self._mask)

    def store_scalars(self, ref: Ref, values: jax.Array) -> None:
        plgpu.store(ref.at[self.token, self.head], values, mask=self.is_real)

    def empty_state(self) -> State:
        total = jnp.zeros(self.offset.shape, jnp.float32)
        return jnp.zeros(self._mask.shape, jnp.float32), total - jnp.inf, total


def _load_keys(ref: Ref, kv_head: jax.Array, first: jax.Array, num_keys: int, count: jax.Array | None) -> jax.Array:
    """[C, H] of an [A, K, H] array; beyond `count` keys zeros, whatever is there."""
    head_size = ref.shape[-1]
    key, lane = jnp.arange(num_keys), jnp.arange(pl.next_power_of_2(head_size))
    where = ref.at[(first + key)[:, None], kv_head, lane[None, :]]
    if count is None and head_size == len(lane):
        return plgpu.load(where)
    mask = jnp.broadcast_to((lane < head_size)[None, :], (num_keys, len(lane)))
    if count is not None:
        mask = mask & (key < count)[:, None]
    return plgpu.load(where, mask=mask, other=0.0)


def _step(
    state: State, q: jax.Array, keys: jax.Array, values: jax.Array, scale: float, seen: jax.Array | None
) -> State:
    """One block of keys into the online softmax. Every row sees at least one key of its first block."""
    out, peak, total = state
    scores = plgpu.dot(q, keys.T)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * (scale * LOG2_E))
    weights = jnp.exp2(scores * (scale * LOG2_E) - new_peak[:, None])  # one fused multiply-add each
    shrink = jnp.exp2(peak - new_peak)
    out = out * shrink[:, None] + plgpu.dot(weights.astype(values.dtype), values)
    return out, new_peak, total * shrink + jnp.sum(weights, axis=1)


def _for_each_tile(count: jax.Array, attend: Callable[[jax.Array], None]) -> None:
    first, stride = pl.program_id(0), pl.num_programs(0)

    def one(number: jax.Array, nothing: None) -> None:
        attend(first + number * stride)
        return nothing

    lax.fori_loop(0, lax.div(count - first + stride - 1, stride), one, None)


def _own_kernel(
    counts_ref: Ref,  # [3] int32
    starts_ref: Ref,  # [tiles] int32
    lens_ref: Ref,  # [tiles] int32
    segments_ref: Ref,  # [tiles] int32
    q_ref: Ref,  # [T, N, H]
    k_ref: Ref,  # [T, K, H]
    v_ref: Ref,  # [T, K, H]
    *outputs: Ref,  # aliased inputs, if any; then [T, N, H], and [T, N] float32
    kind: int,
    width: int,
    heads_per_kv: int,
) -> None:
    out_ref, lse_ref = outputs[-2:]
    head_size, kv_head = q_ref.shape[-1], pl.program_id(1)
    scale = 1 / math.sqrt(head_size)

    def attend(tile: jax.Array) -> None:
        start, length, segment = starts_ref[tile], lens_ref[tile], segments_ref[tile]
        rows = _Rows(kv_head, start, length, width, heads_per_kv, head_size)
        q = rows.load(q_ref)

        def block(number: jax.Array, state: State) -> State:
            keys, values = (_load_keys(r, kv_head, segment + number * width, width, None) for r in (k_ref, v_ref))
            return _step(state, q, keys, values, scale, None)

        state = rows.empty_state()
        if kind == WIDE:  # the segment's blocks before this tile are seen whole
            state = lax.fori_loop(0, lax.div(start - segment, width), block, state)
        keys, values = (_load_keys(r, kv_head, start, width, length) for r in (k_ref, v_ref))
        seen = rows.offset[:, None] >= jnp.arange(width)[None, :]
        out, peak, total = _step(state, q, keys, values, scale, seen)
        rows.store(out_ref, out / total[:, None])
        rows.store_scalars(lse_ref, peak + jnp.log2(total))

    _for_each_tile(counts_ref[kind], attend)


def _prefix_kernel(
    counts_ref: Ref,  # [3] int32
    starts_ref: Ref,  # [tiles] int32
    lens_ref: Ref,  # [tiles] int32
    read_ref: Ref,  # [tiles] int32
    token_lists_ref: Ref,  # [T] int32
    addresses_ref: Ref,  # [blocks] int32
    base_ref: Ref,  # [1] int32
    q_ref: Ref,  # [T, N, H]
    k_ref: Ref,  # [A, K, H]
    v_ref: Ref,  # [A, K, H]
    own_ref: Ref,  # [T, N, H]
    own_lse_ref: Ref,  # [T, N] float32
    out_ref: Ref,  # [T, N, H]
    *,
    width: int,
    num_keys: int,
    heads_per_kv: int,
) -> None:
    head_size, kv_head = q_ref.shape[-1], pl.program_id(1)
    scale, blocks_per_address = 1 / math.sqrt(head_size), KEY_BLOCK // num_keys

    def attend(tile: jax.Array) -> None:
        start, num_read = starts_ref[tile], read_ref[tile]
        rows = _Rows(kv_head, start, lens_ref[tile], width, heads_per_kv, head_size)
        q, first_address = rows.load(q_ref), token_lists_ref[start]
        peak = rows.load_scalars(own_lse_ref)

        def block(number: jax.Array, state: State, *, is_whole: bool) -> State:
            address = addresses_ref[first_address + lax.div(number, blocks_per_address)]
            first = base_ref[0] + address + lax.rem(number, blocks_per_address) * num_keys
            count = None if is_whole else num_read - number * num_keys
            keys, values = (_load_keys(r, kv_head, first, num_keys, count) for r in (k_ref, v_ref))
            seen = None if is_whole else (number * num_keys + jnp.arange(num_keys) < num_read)[None, :]
            return _step(state, q, keys, values, scale, seen)

        state = (rows.load(own_ref).astype(jnp.float32), peak, jnp.ones_like(peak))
        num_whole = lax.div(num_read, num_keys)
        num_blocks = lax.div(num_read + num_keys - 1, num_keys)
        state = lax.fori_loop(0, num_whole, partial(block, is_whole=True), state)
        out, _, total = lax.fori_loop(num_whole, num_blocks, partial(block, is_whole=False), state)
        rows.store(out_ref, out / total[:, None])

    _for_each_tile(counts_ref[PREFIX], attend)
