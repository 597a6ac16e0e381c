"""Self-attention within the segment on NVIDIA GPUs in half precision, and what the Triton kernels of attention share.

One Triton kernel, started once for the narrow tiles and once for the wide ones (both in one launch took longer). It
leaves each token's output and logsumexp, from which the prefix attention continues (`pallas_gpu.py`,
`hopper_prefix.py`). Tiles are counted from their segment's start, so a row's arithmetic follows from its segment alone.

In the kernels: `R` rows of a tile (tokens x query heads of one KV head, padded to a power of two), `C` keys of a key
tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from prefixwise.backends.jax.attention.base import Heads
from prefixwise.forward.tiles import NARROW, WIDE, DeviceTiles, TileSizes

LOG2_E = math.log2(math.e)
MAX_PROGRAMS = 1056  # per KV head, 8 for each of an H200's multiprocessors; each loops over the tiles with this stride
TILE_ROWS = 128
LEAST_TOKENS = 16  # of a tile: as keys they are a side of a GEMM

Ref = Any  # Pallas has no public type for references
State = tuple[
    jax.Array, jax.Array, jax.Array
]  # online softmax, base 2: output [R, H], running max [R], running sum [R]


@dataclass(frozen=True)
class SelfAttentionTuning:
    """Constants that the kernel is compiled with. The results do not depend on them."""

    num_warps: int
    num_stages: int = 1


# For narrow and for wide tiles, from an H200 (`benchmarks/tune_jax_kernels.py`); larger heads need more threads.
TUNING = {NARROW: SelfAttentionTuning(num_warps=4), WIDE: SelfAttentionTuning(num_warps=4)}
LARGE_HEAD_TUNING = SelfAttentionTuning(num_warps=8, num_stages=2)


class SelfAttention(NamedTuple):
    """A softmax over the keys of the token's segment: its output, and the logsumexp of its scores to merge it by."""

    out: jax.Array  # [T, N, H]
    lse: jax.Array  # [N, T] float32, base 2


def self_tile_tokens(heads_per_kv: int) -> int:
    """Tokens of a tile, narrow or wide. Wide tiles of 64 take a third longer for KV blocks (docs/decisions.md)."""
    return min(32, max(LEAST_TOKENS, TILE_ROWS // pl.next_power_of_2(heads_per_kv)))


def self_attention(heads: Heads, tiles: DeviceTiles, sizes: TileSizes, *, interpret: bool) -> SelfAttention:
    """Every segment's tokens over themselves. Every token must be in a tile."""
    narrow = (tiles.narrow_start, tiles.narrow_len, tiles.narrow_start)
    found = _self_tiles(NARROW, sizes.narrow, narrow, heads, tiles.counts, None, interpret=interpret)
    wide = (tiles.wide_start, tiles.wide_len, tiles.wide_segment)
    return _self_tiles(WIDE, sizes.wide, wide, heads, tiles.counts, found, interpret=interpret)


def _self_tiles(
    kind: int,
    width: int,
    arrays: tuple[jax.Array, ...],
    heads: Heads,
    counts: jax.Array,
    found: SelfAttention | None,
    *,
    interpret: bool,
) -> SelfAttention:
    """The tiles of one kind, written into the output of the other kind."""
    num_tokens, _, head_size = heads.qkv.shape
    tuning = TUNING[kind] if head_size <= 128 else LARGE_HEAD_TUNING
    inputs = [counts, *arrays, heads.qkv, *(found or ())]
    out, lse = pl.pallas_call(
        partial(_kernel, kind=kind, width=width, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads),
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, heads.num_heads, head_size), heads.qkv.dtype),
            jax.ShapeDtypeStruct((heads.num_heads, num_tokens), jnp.float32),
        ],
        grid=(min(MAX_PROGRAMS, len(arrays[0])), heads.num_kv_heads),
        input_output_aliases={} if found is None else {5: 0, 6: 1},
        compiler_params=plgpu.CompilerParams(num_warps=tuning.num_warps, num_stages=tuning.num_stages),
        interpret=interpret,
        name="self_attention",
    )(*inputs)
    return SelfAttention(out, lse)


def _kernel(
    counts_ref: Ref,  # [3] int32
    starts_ref: Ref,  # [tiles] int32
    lens_ref: Ref,  # [tiles] int32
    segments_ref: Ref,  # [tiles] int32
    qkv_ref: Ref,  # [T, N + 2 K, H]
    *outputs: Ref,  # aliased inputs, if any; then [T, N, H], and [N, T] float32
    kind: int,
    width: int,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    out_ref, lse_ref = outputs[-2:]
    head_size, kv_head = qkv_ref.shape[-1], pl.program_id(1)
    heads_per_kv, scale = num_heads // num_kv_heads, 1 / math.sqrt(head_size)
    key_head, value_head = num_heads + kv_head, num_heads + num_kv_heads + kv_head

    def attend(tile: jax.Array) -> None:
        start, length, segment = starts_ref[tile], lens_ref[tile], segments_ref[tile]
        rows = Rows(kv_head, start, length, width, heads_per_kv, head_size)
        q = rows.load(qkv_ref)

        def load(first: jax.Array, count: jax.Array | None) -> tuple[jax.Array, jax.Array]:
            keys = load_keys(qkv_ref, key_head, first, width, count)
            return keys, load_keys(qkv_ref, value_head, first, width, count)

        def key_tile(number: jax.Array, state: State) -> State:
            return online_step(state, q, *load(segment + number * width, None), scale, None)

        state = rows.empty_state()
        if kind == WIDE:  # the segment's key tiles before this tile are seen whole
            state = lax.fori_loop(0, lax.div(start - segment, width), key_tile, state)
        seen = rows.offset[:, None] >= jnp.arange(width)[None, :]
        out, m_i, l_i = online_step(state, q, *load(start, length), scale, seen)
        rows.store(out_ref, out / l_i[:, None])
        rows.store_scalars(lse_ref, m_i + jnp.log2(l_i))

    for_each_tile(counts_ref[kind], attend)


class Rows:
    """The rows of a tile in one KV head: their indices in [T, N, H], and a mask of those that are no padding."""

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
        """[R, H] of a [T, N or more, H] array."""
        return plgpu.load(ref.at[self._index], mask=self._mask, other=0.0)

    def load_scalars(self, ref: Ref) -> jax.Array:
        """[R] of an [N, T] array."""
        return plgpu.load(ref.at[self.head, self.token], mask=self.is_real, other=0.0)

    def store(self, ref: Ref, rows: jax.Array) -> None:
        plgpu.store(ref.at[self._index], rows.astype(ref.dtype), mask=self._mask)

    def store_scalars(self, ref: Ref, values: jax.Array) -> None:
        plgpu.store(ref.at[self.head, self.token], values, mask=self.is_real)

    def empty_state(self) -> State:
        l_i = jnp.zeros(self.offset.shape, jnp.float32)
        return jnp.zeros(self._mask.shape, jnp.float32), l_i - jnp.inf, l_i


def load_keys(ref: Ref, head: jax.Array, first: jax.Array, num_keys: int, count: jax.Array | None) -> jax.Array:
    """[C, H] of one head of an [A, heads, H] array; zeros behind `count` keys, where memory may hold anything."""
    head_size = ref.shape[-1]
    key, lane = jnp.arange(num_keys), jnp.arange(pl.next_power_of_2(head_size))
    where = ref.at[(first + key)[:, None], head, lane[None, :]]
    if count is None and head_size == len(lane):
        return plgpu.load(where)
    mask = jnp.broadcast_to((lane < head_size)[None, :], (num_keys, len(lane)))
    if count is not None:
        mask = mask & (key < count)[:, None]
    return plgpu.load(where, mask=mask, other=0.0)


def online_step(
    state: State, q: jax.Array, keys: jax.Array, values: jax.Array, scale: float, seen: jax.Array | None
) -> State:
    """One key tile into the online softmax. Every row sees at least one key of its first tile."""
    out, m_i, l_i = state
    scores = plgpu.dot(q, keys.T)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    m_new = jnp.maximum(m_i, jnp.max(scores, axis=1) * (scale * LOG2_E))
    weights = jnp.exp2(scores * (scale * LOG2_E) - m_new[:, None])  # one fused multiply-add each
    alpha = jnp.exp2(m_i - m_new)
    out = out * alpha[:, None] + plgpu.dot(weights.astype(values.dtype), values)
    return out, m_new, l_i * alpha + jnp.sum(weights, axis=1)


def for_each_tile(count: jax.Array, attend: Callable[[jax.Array], None]) -> None:
    """Loop over this program's tiles: every n-th of `count`, where n is the number of programs."""
    first, stride = pl.program_id(0), pl.num_programs(0)

    def one(number: jax.Array, nothing: None) -> None:
        attend(first + number * stride)
        return nothing

    lax.fori_loop(0, lax.div(count - first + stride - 1, stride), one, None)
