"""Attention in plain XLA: runs anywhere, memory linear in tokens. The default on a CPU.

Loops run over the tiles and key tiles of the batch. Their counts are data, so a program serves every batch that fits
it. Every GEMM has one fixed shape, and a masked key adds exactly zero, so a token's bits follow from its segment and
its prefix. Key tiles that a sliding window hides from every token of a tile are skipped. All arithmetic is float32.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.backends.jax.attention.base import PLAIN, AttentionImplementation, Heads, Partial, Scoring, Source
from prefixwise.forward.tiles import KEY_TILE, NARROW, PREFIX, WIDE, DeviceTiles, TileSizes

SIZES = TileSizes(narrow=32, wide=128, prefix=64)
NARROW_GROUP = 8  # narrow tiles that run together

# Online softmax of R rows per KV head: output [K, R, H], running max [K, R], running sum [K, R].
State = tuple[jax.Array, jax.Array, jax.Array]


class Visible(Protocol):
    """Which keys a token may see, where the tile alone does not decide it."""

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Tokens of the batch, [.., Q] and [.., C], to [.., Q, C] booleans."""


class XlaAttention(AttentionImplementation):
    """See the module. `visible` masks every tile (`dense.py`)."""

    name = "xla"
    needs_padding_tiles = False
    takes_scorings = True
    takes_bidirectional = True

    def __init__(self, visible: Visible | None = None) -> None:
        self._visible = visible

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        return SIZES

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles, scoring: Scoring = PLAIN) -> jax.Array:
        q, k, v = heads.q, heads.k, heads.v
        self_part = self.self_attention(q, k, v, tiles, scoring)
        return self.with_prefix(q, source or self.batch_source(k, v), self_part, tiles, scoring)

    def batch_source(self, k: jax.Array, v: jax.Array) -> Source:
        """The batch's own keys and values [T, K, H], for prefixes in the batch."""
        return Source(with_room(k, KEY_TILE), with_room(v, KEY_TILE), jnp.int32(0))

    def self_attention(self, q: jax.Array, k: jax.Array, v: jax.Array, tiles: DeviceTiles, scoring: Scoring) -> Partial:
        """Self-attention within each segment: q [T, N, H], k and v [T, K, H]."""
        # Room for a whole tile behind the last token: `dynamic_slice` would move a slice that does not fit.
        state = Partial(jnp.zeros((len(q) + SIZES.wide, *q.shape[1:]), jnp.float32), _no_sum(q, SIZES.wide))
        state = self._narrow(q, k, v, tiles, state, scoring)
        wide_q, wide_k, wide_v = (with_room(each, SIZES.wide) for each in (q, k, v))
        state = self._wide(wide_q, wide_k, wide_v, tiles, state, scoring)
        return Partial(state.out[: len(q)], state.lse[: len(q)])

    def _narrow(
        self, q: jax.Array, k: jax.Array, v: jax.Array, tiles: DeviceTiles, state: Partial, scoring: Scoring
    ) -> Partial:
        """Segments of one tile each, several at a time."""
        column = jnp.arange(SIZES.narrow)

        def group(number: jax.Array, state: Partial) -> Partial:
            first = number * NARROW_GROUP
            start = lax.dynamic_slice(tiles.narrow_start, (first,), (NARROW_GROUP,))
            is_real = column < lax.dynamic_slice(tiles.narrow_len, (first,), (NARROW_GROUP,))[:, None]
            tokens = jnp.minimum(start[:, None] + column, len(q) - 1)
            is_before = (column[:, None] >= column) & scoring.seen(column[:, None] - column)
            seen = is_before if scoring.is_causal else is_real[:, None, :]
            seen = jnp.broadcast_to(seen, (NARROW_GROUP, SIZES.narrow, SIZES.narrow))
            if self._visible is not None:
                seen = seen & self._visible(tokens, tokens)
            found = jax.vmap(partial(_attend_narrow, scoring))(q[tokens], k[tokens], v[tokens], is_real, seen)
            place = jnp.where(is_real, tokens, len(state.out))  # out of range: dropped
            return Partial(*(whole.at[place].set(part, mode="drop") for whole, part in zip(state, found, strict=True)))

        return lax.fori_loop(0, -(-tiles.counts[NARROW] // NARROW_GROUP), group, state)

    def _wide(
        self, q: jax.Array, k: jax.Array, v: jax.Array, tiles: DeviceTiles, state: Partial, scoring: Scoring
    ) -> Partial:
        """Wide tiles of longer segments, one at a time, over the segment's key tiles up to the tile itself, or all."""
        offset, ends = jnp.arange(SIZES.wide), tiles.wide_start + tiles.wide_len

        def tile(number: jax.Array, state: Partial) -> Partial:
            start, length, segment = (each[number] for each in (tiles.wide_start, tiles.wide_len, tiles.wide_segment))
            queries, tokens = _rows(q, start, SIZES.wide, k.shape[1], scoring), start + offset
            end = start + length  # of the keys that the tile sees
            if not scoring.is_causal:
                end = jnp.where(tiles.wide_segment == segment, ends, 0).max()

            def key_tile(j: jax.Array, softmax: State) -> State:
                keys = segment + j * SIZES.wide + offset
                seen = (tokens[:, None] >= keys) & scoring.seen(tokens[:, None] - keys)
                if not scoring.is_causal:
                    seen = jnp.broadcast_to(keys < end, seen.shape)
                if self._visible is not None:
                    seen = seen & self._visible(tokens, keys)
                return _step(softmax, queries, k, v, keys[0], seen, keys < end, scoring)

            first = scoring.first_seen(start - segment) // SIZES.wide
            softmax = lax.fori_loop(first, -(-(end - segment) // SIZES.wide), key_tile, _empty(queries))
            return _store(state, softmax, start, offset < length)

        return lax.fori_loop(0, tiles.counts[WIDE], tile, state)

    def with_prefix(
        self, q: jax.Array, source: Source, self_part: Partial, tiles: DeviceTiles, scoring: Scoring
    ) -> jax.Array:
        """Prefix attention, merged with the self part: [T, N, H] in q's dtype."""
        num_tokens, dtype = len(q), q.dtype
        q, state = with_room(q, SIZES.prefix), Partial(*(with_room(each, SIZES.prefix) for each in self_part))
        offset, column = jnp.arange(SIZES.prefix), jnp.arange(KEY_TILE)

        def tile(number: jax.Array, state: Partial) -> Partial:
            start, num_read = tiles.prefix_start[number], tiles.prefix_read[number]
            queries = _rows(q, start, SIZES.prefix, source.keys.shape[1], scoring)
            is_real = offset < tiles.prefix_len[number]
            tokens = jnp.where(is_real, start + offset, start)
            position = num_read + tokens - tiles.token_segment[tokens]

            def key_tile(j: jax.Array, softmax: State) -> State:
                address = tiles.key_tile_addresses[tiles.token_prefix_list[start] + j]
                is_read = j * KEY_TILE + column < num_read
                seen = is_read & scoring.seen(position[:, None] - (j * KEY_TILE + column))
                seen = jnp.broadcast_to(seen, (SIZES.prefix, KEY_TILE))
                if self._visible is not None:
                    seen = seen & self._visible(start + offset, address + column)
                at = source.base + address
                return _step(softmax, queries, source.keys, source.values, at, seen, is_read, scoring)

            begun = _resume(state, start, source.keys.shape[1])
            first = scoring.first_seen(position.min()) // KEY_TILE
            softmax = lax.fori_loop(first, -(-num_read // KEY_TILE), key_tile, begun)
            return _store(state, softmax, start, is_real)

        state = lax.fori_loop(0, tiles.counts[PREFIX], tile, state)
        return state.out[:num_tokens].astype(dtype)


def _no_sum(q: jax.Array, room: int) -> jax.Array:
    return jnp.full((len(q) + room, q.shape[1]), -jnp.inf, jnp.float32)


def with_room(array: jax.Array, room: int) -> jax.Array:
    """`room` more rows of zeros at the end."""
    return jnp.pad(array, ((0, room), *[(0, 0)] * (array.ndim - 1)))


def _rows(q: jax.Array, start: jax.Array, width: int, num_kv_heads: int, scoring: Scoring) -> jax.Array:
    """Tokens of q [T, N, H] to rows per KV head: [K, width * G, H] float32, scaled."""
    taken = lax.dynamic_slice(q, (start, 0, 0), (width, *q.shape[1:])).astype(jnp.float32)
    return _by_kv_head(scoring.scaled(taken), num_kv_heads)


def _by_kv_head(tokens: jax.Array, num_kv_heads: int) -> jax.Array:
    """[W, N, ..] to [K, W * G, ..]: the query heads of one KV head become rows."""
    width, num_heads, *rest = tokens.shape
    split = tokens.reshape(width, num_kv_heads, num_heads // num_kv_heads, *rest)
    return jnp.moveaxis(split, 1, 0).reshape(num_kv_heads, -1, *rest)


def _by_token(rows: jax.Array, width: int) -> jax.Array:
    """[K, W * G, ..] back to [W, N, ..]."""
    num_kv_heads, _, *rest = rows.shape
    split = rows.reshape(num_kv_heads, width, -1, *rest)
    return jnp.moveaxis(split, 0, 1).reshape(width, -1, *rest)


def _empty(rows: jax.Array) -> State:
    m_i = jnp.full(rows.shape[:2], -jnp.inf, jnp.float32)
    return jnp.zeros_like(rows), m_i, jnp.zeros_like(m_i)


def _resume(state: Partial, start: jax.Array, num_kv_heads: int) -> State:
    """The self part of a tile's tokens, as the state from which the online softmax continues."""
    out = lax.dynamic_slice(state.out, (start, 0, 0), (SIZES.prefix, *state.out.shape[1:]))
    m_i = _by_kv_head(lax.dynamic_slice(state.lse, (start, 0), (SIZES.prefix, state.lse.shape[1])), num_kv_heads)
    return _by_kv_head(out.astype(jnp.float32), num_kv_heads), m_i, jnp.ones_like(m_i)


def _step(
    softmax: State,
    queries: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    seen: jax.Array,
    is_real: jax.Array,
    scoring: Scoring,
) -> State:
    """One key tile, first.. of k and v [A, K, H], into the online softmax.

    `seen` [W, C] is for the tile's tokens; keys that are not `is_real` [C] may hold anything, NaN included.
    """
    keys, values = (as_float32(_take_tokens(each, first, len(is_real))) for each in (k, v))
    values = jnp.where(is_real[:, None, None], values, 0.0)
    seen = jnp.repeat(seen, queries.shape[1] // len(seen), axis=0)
    return accumulate(softmax, queries, keys, values, seen, scoring)


def _take_tokens(array: jax.Array, first: jax.Array, num_tokens: int) -> jax.Array:
    """Tokens first.. of [A, K, H]. On a TPU they are gathered: the compiler would give a slice's operand the layout of
    the GEMM's, and so copy all of the KV cache in every layer."""

    def gather(array: jax.Array, first: jax.Array) -> jax.Array:
        return array.at[first + jnp.arange(num_tokens)].get(mode="clip")

    def cut(array: jax.Array, first: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, first, num_tokens)

    taken: jax.Array = lax.platform_dependent(array, first, tpu=gather, default=cut)
    return taken


def as_float32(array: jax.Array) -> jax.Array:
    """Convert any dtype to float32; the KV cache of a CPU holds bfloat16 as the integers of its bits."""
    if array.dtype == jnp.uint16:
        array = lax.bitcast_convert_type(array, jnp.bfloat16)
    return array.astype(jnp.float32)


def accumulate(
    softmax: State, queries: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array, scoring: Scoring
) -> State:
    """queries [K, R, H] over keys and values [C, K, H] with `seen` [R, C]."""
    out, m_i, l_i = softmax
    scores = jnp.einsum("krh,ckh->krc", queries, keys, precision=lax.Precision.HIGHEST)
    scores = jnp.where(seen, scoring.capped(scores), -jnp.inf)  # not added: a masked score may be NaN
    m_new = jnp.maximum(m_i, scores.max(-1))
    m_finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    weights, alpha = jnp.exp(scores - m_finite[..., None]), jnp.exp(m_i - m_finite)
    gained = jnp.einsum("krc,ckh->krh", weights, values, precision=lax.Precision.HIGHEST)
    return out * alpha[..., None] + gained, m_new, l_i * alpha + weights.sum(-1)


def _finish(softmax: State, width: int) -> Partial:
    out, m_i, l_i = softmax
    is_empty = l_i == 0
    divided = out / jnp.where(is_empty, 1.0, l_i)[..., None]
    lse = jnp.where(is_empty, -jnp.inf, m_i + jnp.log(jnp.where(is_empty, 1.0, l_i)))
    return Partial(_by_token(divided, width), _by_token(lse, width))


def _attend_narrow(
    scoring: Scoring, q: jax.Array, k: jax.Array, v: jax.Array, is_real: jax.Array, seen: jax.Array
) -> Partial:
    """One whole segment: q [W, N, H], k and v [W, K, H]."""
    queries = _by_kv_head(scoring.scaled(q.astype(jnp.float32)), k.shape[1])
    values = jnp.where(is_real[:, None, None], v.astype(jnp.float32), 0.0)
    seen = jnp.repeat(seen, q.shape[1] // k.shape[1], axis=0)
    softmax = accumulate(_empty(queries), queries, k.astype(jnp.float32), values, seen, scoring)
    return _finish(softmax, len(q))


def _store(state: Partial, softmax: State, start: jax.Array, is_real: jax.Array) -> Partial:
    """Write a tile's finished rows to `state`, without padding."""
    return _write(state, _finish(softmax, len(is_real)), start, is_real)


def _write(state: Partial, found: Partial, start: jax.Array, is_real: jax.Array) -> Partial:
    def write(whole: jax.Array, part: jax.Array) -> jax.Array:
        before = lax.dynamic_slice_in_dim(whole, start, len(part))
        is_written = is_real.reshape(-1, *[1] * (part.ndim - 1))
        return lax.dynamic_update_slice_in_dim(whole, jnp.where(is_written, part, before), start, 0)

    return Partial(write(state.out, found.out), write(state.lse, found.lse))


def merge_tile(
    state: Partial,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query: jax.Array,
    key: jax.Array,
    seen: jax.Array,
    *,
    is_query: jax.Array,
    is_key: jax.Array,
    scoring: Scoring,
) -> Partial:
    """One tile of queries over one tile of keys, both tokens of the batch, merged into `state`."""
    queries = _rows(q, query[0], len(query), k.shape[1], scoring)
    softmax = _step(_empty(queries), queries, k, v, key[0], seen, is_key, scoring)
    found = _finish(softmax, len(query))
    before = Partial(*(lax.dynamic_slice_in_dim(each, query[0], len(query)) for each in state))
    merged = _merge(before, found)
    return _write(state, merged, query[0], is_query)


def _merge(first: Partial, second: Partial) -> Partial:
    """Merge two softmaxes over disjoint keys by LSE; an empty second one leaves the first bit for bit."""
    m_both = jnp.maximum(first.lse, second.lse)
    m_both = jnp.where(m_both == -jnp.inf, 0.0, m_both)
    weights = [jnp.exp(each.lse - m_both) for each in (first, second)]
    l_both = weights[0] + weights[1]
    is_alone = second.lse == -jnp.inf
    out = (first.out * weights[0][..., None] + second.out * weights[1][..., None]) / l_both[..., None]
    lse = jnp.where(is_alone, first.lse, m_both + jnp.log(l_both))
    return Partial(jnp.where(is_alone[..., None], first.out, out), lse)
