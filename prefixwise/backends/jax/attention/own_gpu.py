"""The own part of attention on NVIDIA GPUs in half precision: every segment's tokens over themselves.

A Triton kernel, once for the narrow tiles and once for the wide ones (both in one kernel took longer than two). It
leaves each token's output and log-sum-exp, from which the prefix part goes on (`pallas_gpu.py`, `hopper_prefix.py`).
Tiles are counted from their segment's start, so a row's arithmetic follows from its segment alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from prefixwise.backends.jax.attention.base import Heads
from prefixwise.backends.jax.attention.triton_rows import Ref, Rows, State, for_each_tile, load_keys, online_step
from prefixwise.forward.tiles import NARROW, WIDE, DeviceTiles, TileSizes

MAX_PROGRAMS = 1056  # per KV head, 8 for each of an H200's multiprocessors; each takes every so-many-th tile
TILE_ROWS = 128
LEAST_TOKENS = 16  # of a tile: as keys they are a side of a product


@dataclass(frozen=True)
class SelfAttentionTuning:
    """What the kernel is compiled with, and its numbers do not depend on."""

    num_warps: int
    num_stages: int = 2


# For narrow and for wide tiles, from an H200 (`benchmarks/tune_jax_kernels.py`); larger heads need more threads.
TUNING = {NARROW: SelfAttentionTuning(num_warps=4), WIDE: SelfAttentionTuning(num_warps=4)}
LARGE_HEAD_TUNING = SelfAttentionTuning(num_warps=8)


class SelfAttention(NamedTuple):
    """A softmax over a segment's own keys: its output, and the log-sum-exp of its scores to merge it by."""

    out: jax.Array  # [T, N, H]
    lse: jax.Array  # [N, T] float32, base 2


def own_tokens(heads_per_kv: int) -> tuple[int, int]:
    """Tokens of a narrow and of a wide tile."""
    tokens = max(LEAST_TOKENS, TILE_ROWS // pl.next_power_of_2(heads_per_kv))
    return min(32, tokens), min(64, tokens)


def self_attention(heads: Heads, tiles: DeviceTiles, sizes: TileSizes, *, interpret: bool) -> SelfAttention:
    """Every token must be in a tile."""
    narrow = (tiles.narrow_start, tiles.narrow_len, tiles.narrow_start)
    found = _own_tiles(NARROW, sizes.narrow, narrow, heads, tiles.counts, None, interpret=interpret)
    wide = (tiles.wide_start, tiles.wide_len, tiles.wide_segment)
    return _own_tiles(WIDE, sizes.wide, wide, heads, tiles.counts, found, interpret=interpret)


def _own_tiles(
    kind: int,
    width: int,
    arrays: tuple[jax.Array, ...],
    heads: Heads,
    counts: jax.Array,
    found: SelfAttention | None,
    *,
    interpret: bool,
) -> SelfAttention:
    """The tiles of one kind, written into what the other kind's have left."""
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

        def block(number: jax.Array, state: State) -> State:
            return online_step(state, q, *load(segment + number * width, None), scale, None)

        state = rows.empty_state()
        if kind == WIDE:  # the segment's blocks before this tile are seen whole
            state = lax.fori_loop(0, lax.div(start - segment, width), block, state)
        seen = rows.offset[:, None] >= jnp.arange(width)[None, :]
        out, peak, total = online_step(state, q, *load(start, length), scale, seen)
        rows.store(out_ref, out / total[:, None])
        rows.store_scalars(lse_ref, peak + jnp.log2(total))

    for_each_tile(counts_ref[kind], attend)
