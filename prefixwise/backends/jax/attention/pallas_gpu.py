"""Attention on NVIDIA GPUs in half precision: Pallas kernels that Triton compiles.

Self-attention runs first (`gpu_self_attention.py`). The online softmax of the prefix attention starts from its output
and logsumexp, so there is no merge afterwards. The query heads of one KV head are rows of one GEMM. A row's arithmetic
follows from its segment and its prefix: tiles are counted from the segment's start, key tiles from the prefix's, and no
sum is split between programs.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from prefixwise.backends.jax.attention.base import PLAIN, AttentionImplementation, Heads, Scoring, Source
from prefixwise.backends.jax.attention.gpu_self_attention import (
    LEAST_TOKENS,
    MAX_PROGRAMS,
    TILE_ROWS,
    Ref,
    Rows,
    SelfAttention,
    State,
    for_each_tile,
    load_keys,
    online_step,
    self_attention,
    self_tile_tokens,
)
from prefixwise.forward.tiles import KEY_TILE, PREFIX, DeviceTiles, TileSizes


class PallasGpuAttention(AttentionImplementation):
    """See the module. `interpret` runs the kernels in the interpreter on any device, for tests."""

    name = "pallas_gpu"
    needs_padding_tiles = True

    def __init__(self, *, interpret: bool = False) -> None:
        self._interpret = interpret

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        if platform not in ("gpu", "hopper") and not self._interpret:
            return f"it needs an NVIDIA GPU of compute capability 8.0 or later, and this is: {platform}"
        if dtype not in (jnp.bfloat16, jnp.float16) and not self._interpret:
            return f"it computes in bfloat16 or float16, and this is {dtype}"
        if not 16 <= head_size <= 256:
            return f"it takes head sizes from 16 to 256, and this is {head_size}"
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        tokens = self_tile_tokens(heads_per_kv)
        prefix = max(LEAST_TOKENS, TILE_ROWS // pl.next_power_of_2(heads_per_kv))
        return TileSizes(tokens, tokens, prefix, has_token_arrays=False)

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles, scoring: Scoring = PLAIN) -> jax.Array:
        assert scoring.is_plain, "this implementation has no sliding windows and no capped scores"
        sizes = self.tile_sizes(heads.heads_per_kv)
        self_part = self_attention(heads, tiles, sizes, interpret=self._interpret)
        return self._with_prefix(heads, source or heads.as_source(), self_part, tiles, sizes.prefix)

    def _with_prefix(
        self, heads: Heads, source: Source, self_part: SelfAttention, tiles: DeviceTiles, width: int
    ) -> jax.Array:
        # Queries and the keys and values in flight must fit a multiprocessor's shared memory.
        num_keys, num_warps, num_stages = (64, 4, 3) if heads.qkv.shape[-1] <= 128 else (32, 8, 2)
        inputs = [
            tiles.counts,
            tiles.prefix_start,
            tiles.prefix_len,
            tiles.prefix_read,
            tiles.prefix_list,
            tiles.key_tile_addresses,
            source.base.reshape(1),
            heads.qkv,
            source.keys,
            source.values,
            self_part.out,
            self_part.lse,
        ]
        kernel = partial(
            _prefix_kernel,
            width=width,
            num_keys=num_keys,
            heads_per_kv=heads.heads_per_kv,
            first_heads=(source.first_key, source.first_value),
        )
        out: jax.Array = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(self_part.out.shape, self_part.out.dtype),
            grid=(min(MAX_PROGRAMS, len(heads.qkv)), heads.num_kv_heads),
            input_output_aliases={10: 0},  # the output of tokens that read no prefix stays
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=self._interpret,
            name="prefix_attention",
        )(*inputs)
        return out


def _prefix_kernel(
    counts_ref: Ref,  # [3] int32
    starts_ref: Ref,  # [tiles] int32
    lens_ref: Ref,  # [tiles] int32
    read_ref: Ref,  # [tiles] int32
    lists_ref: Ref,  # [tiles] int32
    addresses_ref: Ref,  # [key tiles] int32
    base_ref: Ref,  # [1] int32
    q_ref: Ref,  # [T, N + 2 K, H]
    k_ref: Ref,  # [A, heads, H], of which `first_heads[0]` is the first KV head's
    v_ref: Ref,  # [A, heads, H], of which `first_heads[1]` is the first KV head's
    self_ref: Ref,  # [T, N, H]
    self_lse_ref: Ref,  # [N, T] float32
    out_ref: Ref,  # [T, N, H]
    *,
    width: int,
    num_keys: int,
    heads_per_kv: int,
    first_heads: tuple[int, int],
) -> None:
    head_size, kv_head = q_ref.shape[-1], pl.program_id(1)
    scale, tiles_per_address = 1 / math.sqrt(head_size), KEY_TILE // num_keys

    def attend(tile: jax.Array) -> None:
        start, num_read = starts_ref[tile], read_ref[tile]
        rows = Rows(kv_head, start, lens_ref[tile], width, heads_per_kv, head_size)
        q, first_address = rows.load(q_ref), lists_ref[tile]
        m_i = rows.load_scalars(self_lse_ref)

        def key_tile(number: jax.Array, state: State, *, is_whole: bool) -> State:
            address = addresses_ref[first_address + lax.div(number, tiles_per_address)]
            first = base_ref[0] + address + lax.rem(number, tiles_per_address) * num_keys
            count = None if is_whole else num_read - number * num_keys
            keys, values = (
                load_keys(ref, first_head + kv_head, first, num_keys, count)
                for ref, first_head in zip((k_ref, v_ref), first_heads, strict=True)
            )
            seen = None if is_whole else (number * num_keys + jnp.arange(num_keys) < num_read)[None, :]
            return online_step(state, q, keys, values, scale, seen)

        state = (rows.load(self_ref).astype(jnp.float32), m_i, jnp.ones_like(m_i))
        num_whole = lax.div(num_read, num_keys)
        num_tiles = lax.div(num_read + num_keys - 1, num_keys)
        state = lax.fori_loop(0, num_whole, partial(key_tile, is_whole=True), state)
        out, _, l_i = lax.fori_loop(num_whole, num_tiles, partial(key_tile, is_whole=False), state)
        rows.store(out_ref, out / l_i[:, None])

    for_each_tile(counts_ref[PREFIX], attend)
