"""Attention in its plainest form: for every token, one softmax over its segment and one over its prefix, merged.

Slow, and its memory grows with the square of the tokens. The tests compare the other implementations with it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.backends.jax.attention.base import PLAIN, AttentionImplementation, Heads, Partial, Scoring, Source
from prefixwise.backends.jax.attention.xla import as_float32
from prefixwise.forward.tiles import KEY_TILE, DeviceTiles, TileSizes


class ReferenceAttention(AttentionImplementation):
    """Token by token, in float32."""

    name = "reference"
    needs_padding_tiles = False
    takes_scorings = True

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        return TileSizes(narrow=32, wide=128, prefix=64)  # it reads no tiles

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles, scoring: Scoring = PLAIN) -> jax.Array:
        q, k, v = heads.q, heads.k, heads.v
        self_part = self._self_attention(q, k, v, tiles, scoring)
        return self._with_prefix(q, source or Source(k, v, jnp.int32(0)), self_part, tiles, scoring)

    def _self_attention(
        self, q: jax.Array, k: jax.Array, v: jax.Array, tiles: DeviceTiles, scoring: Scoring
    ) -> Partial:
        place = jnp.arange(len(q))

        def attend(token: jax.Array) -> Partial:
            seen = (place >= tiles.token_segment[token]) & (place <= token) & scoring.seen(token - place)
            return _attend(q[token], k, v, seen, scoring)

        return lax.map(attend, place)

    def _with_prefix(
        self, q: jax.Array, source: Source, self_part: Partial, tiles: DeviceTiles, scoring: Scoring
    ) -> jax.Array:
        key_tiles = jnp.arange(len(tiles.key_tile_addresses))
        column = jnp.arange(KEY_TILE)
        place = (key_tiles[:, None] * KEY_TILE + column).reshape(-1)  # of each key in the prefix

        def attend(token: jax.Array) -> jax.Array:
            addresses = jnp.take(tiles.key_tile_addresses, tiles.token_prefix_list[token] + key_tiles, mode="clip")
            keys = (source.base + addresses[:, None] + column).reshape(-1)
            keys = jnp.minimum(keys, len(source.keys) - 1)
            num_read = tiles.token_prefix_len[token]
            seen = (place < num_read) & scoring.seen(num_read + token - tiles.token_segment[token] - place)
            part = _attend(q[token], source.keys[keys], source.values[keys], seen, scoring)
            return _merge(Partial(self_part.out[token], self_part.lse[token]), part)

        return lax.map(attend, jnp.arange(len(q))).astype(q.dtype)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scoring: Scoring) -> Partial:
    """One token: q [N, H] over the keys and values [C, K, H] that `seen` [C] selects."""
    num_heads, head_size = q.shape
    queries = scoring.scaled(q.astype(jnp.float32)).reshape(k.shape[1], -1, head_size)  # [K, G, H]
    values = jnp.where(seen[:, None, None], as_float32(v), 0.0)  # 0 x NaN is NaN
    scores = jnp.einsum("kgh,ckh->kgc", queries, as_float32(k), precision=lax.Precision.HIGHEST)
    scores = jnp.where(seen, scoring.capped(scores), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    out = jnp.einsum("kgc,ckh->kgh", weights, values, precision=lax.Precision.HIGHEST)
    return Partial(out.reshape(q.shape), lse.reshape(num_heads))


def _merge(first: Partial, second: Partial) -> jax.Array:
    share = jax.nn.sigmoid(first.lse - second.lse)[:, None]
    return first.out * share + second.out * (1 - share)
