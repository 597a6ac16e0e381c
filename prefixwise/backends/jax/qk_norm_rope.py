"""Between a layer's projection and its attention: norms of queries and keys, RoPE, and the write to the KV cache.

`qk_norm_rope` and `write_cache` are plain array operations. `qk_norm_rope_and_cache` is one Triton kernel for NVIDIA
GPUs in half precision, which also writes the KV cache: it reads each head once and overwrites it in place. Both compute
in float32 and round at the same places.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from prefixwise.backends.jax.kv_cache import KVCacheArrays
from prefixwise.backends.jax.row_tiles import as_bits
from prefixwise.forward.kv_pages import NOT_CACHED

Ref = Any  # what Triton takes; Pallas has no public type for it


@dataclass(frozen=True)
class QkNormRopeTuning:
    """Constants that the kernel is compiled with."""

    num_heads: int  # heads of one token per program; a power of two
    num_warps: int


TUNING = QkNormRopeTuning(num_heads=8, num_warps=4)  # from an H200 (`benchmarks/tune_jax_kernels.py`)


class RopeTable(NamedTuple):
    """Cosines and sines of each token's position, [T, 1, H / 2], float32."""

    cos: jax.Array
    sin: jax.Array


class HeadNorms(NamedTuple):
    """Weights of the QK norms of all layers, [Ly, H] each; None where the model has no QK norm."""

    q: jax.Array | None
    k: jax.Array | None


class CacheWrite(NamedTuple):
    """Where a layer's keys and values are written."""

    kv_cache: KVCacheArrays
    slots: jax.Array  # [T] int32: a token's slot in the layer, NOT_CACHED for most tokens
    base: jax.Array  # int32 scalar: the layer's first slot


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMS norm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """RoPE of [T, heads, H]: the first half of each head pairs with the second half."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def qk_norm_rope(
    qkv: jax.Array, num_kv_heads: int, norms: tuple[jax.Array | None, jax.Array | None], eps: float, rope: RopeTable
) -> jax.Array:
    """QK norm and RoPE of [T, N + 2 K, H]; `norms`: this layer's weights [H] for queries and for keys."""
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = jnp.split(qkv, [num_heads, num_heads + num_kv_heads], axis=1)
    q_norm, k_norm = norms
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return jnp.concatenate([apply_rope(q, *rope), apply_rope(k, *rope), v], axis=1)


def write_cache(write: CacheWrite, k: jax.Array, v: jax.Array) -> KVCacheArrays:
    """Write keys and values [T, K, H] of the tokens that have a slot to the layer's KV cache; other tokens write out of
    range and are dropped."""
    kv_cache = write.kv_cache
    slot = jnp.where(write.slots == NOT_CACHED, len(kv_cache.keys), write.base + write.slots)

    def store(stored: jax.Array, new: jax.Array) -> jax.Array:
        return stored.at[slot].set(as_bits(new) if stored.dtype == jnp.uint16 else new, mode="drop")

    return KVCacheArrays(store(kv_cache.keys, k), store(kv_cache.values, v))


def qk_norm_rope_and_cache(
    qkv: jax.Array,
    num_kv_heads: int,
    norms: HeadNorms,
    layer: jax.Array,
    eps: float,
    rope: RopeTable,
    write: CacheWrite | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, KVCacheArrays | None]:
    """`qk_norm_rope`, and the write to the KV cache for tokens that have a slot. Overwrites qkv and the KV cache.

    Args:
        qkv: [T, N + 2 K, H].
        num_kv_heads: K.
        norms: weights of all layers.
        layer: int32 scalar, the layer's number.
        eps: of the norms.
        rope: cosines and sines of every token.
        write: None where nothing is cached.
        interpret: run the kernel in the interpreter, on any device.
    """
    num_tokens, num_all_heads, head_size = qkv.shape
    num_roped = num_all_heads - num_kv_heads
    has_norm = norms.q is not None and norms.k is not None
    weights = [norms.q, norms.k] if has_norm else []
    angles = [each.reshape(num_tokens, head_size // 2) for each in rope]
    inputs = [layer.reshape(1), *weights, *angles]
    outputs = [qkv]
    if write is not None:
        inputs += [write.slots, write.base.reshape(1)]
        outputs += [write.kv_cache.keys, write.kv_cache.values]
    kernel = partial(_kernel, num_heads=num_roped - num_kv_heads, num_kv_heads=num_kv_heads, eps=eps, has_norm=has_norm)
    found = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in outputs],
        grid=(num_tokens, pl.cdiv(num_roped, TUNING.num_heads)),
        input_output_aliases={len(inputs) + number: number for number in range(len(outputs))},
        compiler_params=plgpu.CompilerParams(num_warps=TUNING.num_warps, num_stages=1),
        interpret=interpret,
        name="qk_norm_rope",
    )(*inputs, *outputs)
    return found[0], None if write is None else KVCacheArrays(found[1], found[2])


def _kernel(*refs: Ref, num_heads: int, num_kv_heads: int, eps: float, has_norm: bool) -> None:
    """Some heads of one token. Refs: the inputs of `qk_norm_rope_and_cache`, aliases of its outputs, its outputs."""
    layer_ref, *rest = refs
    q_norm_ref, k_norm_ref, *rest = rest if has_norm else (None, None, *rest)
    cos_ref, sin_ref, *rest = rest
    is_cached = len(rest) > 2
    slots_ref, base_ref = rest[:2] if is_cached else (None, None)
    out_refs = rest[-3:] if is_cached else rest[-1:]
    token, tile_number = pl.program_id(0), pl.program_id(1)
    slot = slots_ref[token] if slots_ref is not None else jnp.int32(NOT_CACHED)
    base = base_ref[0] if base_ref is not None else jnp.int32(0)
    num_roped = num_heads + num_kv_heads

    tile = _HeadTile(out_refs[0], token, tile_number * TUNING.num_heads, num_roped)
    first, second = tile.load()
    if q_norm_ref is not None and k_norm_ref is not None:
        scales = tile.load_scales(q_norm_ref, k_norm_ref, layer_ref[0], num_heads)
        first, second = tile.normed(first, second, scales, eps)
    cos, sin = tile.load_angles(cos_ref), tile.load_angles(sin_ref)
    roped = first * cos - second * sin, second * cos + first * sin
    tile.store(out_refs[0], token, 0, roped, is_wanted=tile.heads >= 0)
    if not is_cached:
        return
    is_key = (tile.heads >= num_heads) & (slot != NOT_CACHED)
    tile.store(out_refs[1], base + slot, num_heads, roped, is_wanted=is_key)

    def copy_values() -> None:
        for first in range(num_roped, num_roped + num_kv_heads, TUNING.num_heads):
            tile = _HeadTile(out_refs[0], token, first, num_roped + num_kv_heads)
            tile.store(out_refs[2], base + slot, num_roped, tile.load(), is_wanted=tile.heads >= 0)

    pl.when((tile_number == 0) & (slot != NOT_CACHED))(copy_values)


class _HeadTile:
    """Some heads of a token as two halves, [heads, half] each: RoPE pairs column i of both."""

    def __init__(self, ref: Ref, token: jax.Array, first_head: Any, stop_head: int) -> None:
        head_size = ref.shape[-1]
        self._half = head_size // 2
        self._ref, self._token = ref, token
        self.heads = (first_head + jnp.arange(TUNING.num_heads))[:, None]
        self._columns = jnp.arange(pl.next_power_of_2(self._half))[None, :]
        self._inside = (self.heads < stop_head) & (self._columns < self._half)

    def load(self) -> tuple[jax.Array, jax.Array]:
        """Both halves, in float32."""
        return self._load_half(0), self._load_half(self._half)

    def _load_half(self, offset: int) -> jax.Array:
        where = self._ref.at[self._token, self.heads, self._columns + offset]
        return plgpu.load(where, mask=self._inside, other=0.0).astype(jnp.float32)

    def load_angles(self, ref: Ref) -> jax.Array:
        """[1, half] of a [T, half] array."""
        return plgpu.load(ref.at[self._token, self._columns], mask=self._columns < self._half, other=0.0)

    def load_scales(self, q_ref: Ref, k_ref: Ref, layer: jax.Array, num_heads: int) -> tuple[jax.Array, jax.Array]:
        """Norm weights of both halves, [heads, half] float32: those of queries or of keys."""
        is_query = self.heads < num_heads

        def load(ref: Ref, offset: int) -> jax.Array:
            inside = self._columns < self._half
            found = plgpu.load(ref.at[layer, self._columns + offset], mask=inside, other=0.0)
            return found.astype(jnp.float32)

        first, second = (jnp.where(is_query, load(q_ref, o), load(k_ref, o)) for o in (0, self._half))
        return first, second

    def normed(
        self, first: jax.Array, second: jax.Array, scales: tuple[jax.Array, jax.Array], eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """RMS norm, rounded to the model's dtype, then float32 again."""
        mean_square = jnp.sum(first * first + second * second, axis=1, keepdims=True) / (2 * self._half)
        factor = lax.rsqrt(mean_square + eps)
        dtype = self._ref.dtype
        halves = ((half * factor * scale).astype(dtype) for half, scale in zip((first, second), scales, strict=True))
        first, second = (half.astype(jnp.float32) for half in halves)
        return first, second

    def store(
        self, ref: Ref, row: jax.Array, first_head: int, halves: tuple[jax.Array, jax.Array], is_wanted: jax.Array
    ) -> None:
        """Store into row `row` of an array whose head 0 is `first_head` here."""
        mask, heads = self._inside & is_wanted, jnp.maximum(self.heads - first_head, 0)
        for half, offset in zip(halves, (0, self._half), strict=True):
            plgpu.store(ref.at[row, heads, self._columns + offset], half.astype(ref.dtype), mask=mask)
