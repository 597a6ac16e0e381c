"""Attention in its plainest form: for every token, one softmax over its segment and one over its prefix, merged.

Slow, and its memory grows with the square of the tokens. The tests compare the other implementations with it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Partial, Source
from prefixwise.backends.jax.attention.xla import as_float32
from prefixwise.forward.tiles import KEY_TILE, DeviceTiles, TileSizes


class ReferenceAttention(AttentionImplementation):
    """Token by token, in float32."""

    name = "reference"
    needs_padding_tiles = False

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        return TileSizes(narrow=32, wide=128, prefix=64)  # it reads no tiles

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles) -> jax.Array:
        q, k, v = heads.q, heads.k, heads.v
        return self._with_prefix(q, source or Source(k, v, jnp.int32(0)), self._self_attention(q, k, v, tiles), tiles)

    def _self_attention(self, q: jax.Array, k: jax.Array, v: jax.Array, tiles: DeviceTiles) -> Partial:
        place = jnp.arange(len(q))

        def attend(token: jax.Array) -> Partial:
            return _attend(q[token], k, v, (place >= tiles.token_segment[token]) & (place <= token))

        return lax.map(attend, place)

    def _with_prefix(self, q: jax.Array, source: Source, self_part: Partial, tiles: DeviceTiles) -> jax.Array:
        key_tiles = jnp.arange(len(tiles.key_tile_addresses))
        column = jnp.arange(KEY_TILE)
        place = (key_tiles[:, None] * KEY_TILE + column).reshape(-1)  # of each key in the prefix

        def attend(token: jax.Array) -> jax.Array:
            addresses = jnp.take(tiles.key_tile_addresses, tiles.token_prefix_list[token] + key_tiles, mode="clip")
            keys = (source.base + addresses[:, None] + column).reshape(-1)
            keys = jnp.minimum(keys, len(source.keys) - 1)
            part = _attend(q[token], source.keys[keys], source.values[keys], place < tiles.token_prefix_len[token])
            return _merge(Partial(self_part.out[token], self_part.lse[token]), part)

        return lax.map(attend, jnp.arange(len(q))).astype(q.dtype)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> Partial:
    """One token: q [N, H] over the keys and values [C, K, H] that `seen` [C] selects."""
    num_heads, head_size = q.shape
    queries = q.astype(jnp.float32).reshape(k.shape[1], -1, head_size)  # [K, G, H]
    values = jnp.where(seen[:, None, None], as_float32(v), 0.0)  # 0 x NaN is NaN
    scores = jnp.einsum("kgh,ckh->kgc", queries, as_float32(k), precision=lax.Precision.HIGHEST)
    scores = jnp.where(seen, scores / math.sqrt(head_size), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    out = jnp.einsum("kgc,ckh->kgh", weights, values, precision=lax.Precision.HIGHEST)
    return Partial(out.reshape(q.shape), lse.reshape(num_heads))


def _merge(first: Partial, second: Partial) -> jax.Array:
    share = jax.nn.sigmoid(first.lse - second.lse)[:, None]
    return first.out * share + second.out * (1 - share)
