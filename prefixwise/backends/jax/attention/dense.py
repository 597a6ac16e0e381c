"""The `dense` mask of packed sequences: one [T, C] array that says which tokens of its sequence each token sees.

It is the baseline for `segment`. The tiles are those of `segment`, with their masks read from the array, and no pair is
skipped: pairs outside the tiles are scored and masked, tile by tile. Masked pairs add exactly zero, so both masks give
the same bits. Memory and time grow with the square of the sequence, so long sequences are refused
(`plan/algorithms.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from prefixwise.backends.jax.attention.base import PLAIN, Heads, Partial, Scoring
from prefixwise.backends.jax.attention.xla import SIZES, XlaAttention, merge_tile, with_room
from prefixwise.forward.batch import ForwardBatch
from prefixwise.forward.tiles import DeviceTiles

PAIR_TILE = SIZES.wide  # tokens on a side of the tiles in which pairs outside the segment's tiles are scored


class DenseMask(NamedTuple):
    """On the device, inside a program."""

    mask: jax.Array  # [T, C] bool: may token t see the c-th token of its sequence?
    token_sequence: jax.Array  # [T]: first token of the sequence
    sequence_starts: jax.Array  # [sequences + 1, or more]: first token of each sequence, and the end of the last
    num_sequences: jax.Array

    def visible(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Tokens [.., Q] and [.., C] to [.., Q, C]."""
        last_token, last_column = (size - 1 for size in self.mask.shape)
        query = jnp.minimum(query, last_token)[..., None]
        column = jnp.clip(key[..., None, :] - self.token_sequence[query], 0, last_column)
        return self.mask[query, column]


def make_mask(batch: ForwardBatch, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """[T, C] on the host; padding is masked out."""
    mask = np.zeros(shape, np.bool_)
    sequence_of = np.searchsorted(batch.sequence_starts, batch.segment_starts[:-1], side="right") - 1
    for segment, sequence in enumerate(sequence_of):
        start, stop = (int(edge) for edge in batch.segment_starts[segment : segment + 2])
        first = int(batch.sequence_starts[sequence])
        mask[start:stop, start - first : stop - first] = np.tri(stop - start, dtype=np.bool_)
        if batch.prefix_index[segment] >= 0:
            source = batch.prefixes[int(batch.prefix_index[segment])]
            assert source.segment is not None and not source.blocks, "a packed sequence holds its own prefix"
            prefix = int(batch.segment_starts[source.segment]) - first
            mask[start:stop, prefix : prefix + int(batch.prefix_lens[segment])] = True
    return mask


def dense_attention(heads: Heads, tiles: DeviceTiles, dense: DenseMask, scoring: Scoring = PLAIN) -> jax.Array:
    """Packed attention with the mask, to [T, N, H]. A sliding window hides more than the mask does, in the tiles."""
    attention, (q, k, v) = XlaAttention(dense.visible), (heads.q, heads.k, heads.v)
    self_part = attention.self_attention(q, k, v, tiles, scoring)
    self_part = _attend_rest(q, k, v, tiles, dense, self_part, scoring)
    return attention.with_prefix(q, attention.batch_source(k, v), self_part, tiles, scoring)


def _attend_rest(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: DeviceTiles,
    dense: DenseMask,
    self_part: Partial,
    scoring: Scoring,
) -> Partial:
    """Every pair of a sequence that no tile visits: masked out, unless the mask shows more than the tiles do."""
    num_tokens = len(q)
    q, k, v = (with_room(each, PAIR_TILE) for each in (q, k, v))
    state = Partial(*(with_room(each, PAIR_TILE) for each in self_part))
    offset = jnp.arange(PAIR_TILE)

    def unvisited(query: jax.Array, key: jax.Array) -> jax.Array:
        token, column = jnp.minimum(query, num_tokens - 1)[:, None], key[None, :]
        in_segment = (column >= tiles.token_segment[token]) & (column <= token)
        prefix = tiles.key_tile_addresses[tiles.token_prefix_list[token]]
        in_prefix = (column >= prefix) & (column < prefix + tiles.token_prefix_len[token])
        return dense.visible(query, key) & ~in_segment & ~in_prefix

    def sequence(number: jax.Array, state: Partial) -> Partial:
        start, stop = dense.sequence_starts[number], dense.sequence_starts[number + 1]
        num_tiles = -(-(stop - start) // PAIR_TILE)

        def tile(pair: jax.Array, state: Partial) -> Partial:
            query, key = (start + index * PAIR_TILE + offset for index in (pair // num_tiles, pair % num_tiles))
            seen = unvisited(query, key) & (key < stop)
            is_query, is_key = query < stop, key < stop
            return merge_tile(state, q, k, v, query, key, seen, is_query=is_query, is_key=is_key, scoring=scoring)

        return lax.fori_loop(0, num_tiles * num_tiles, tile, state)

    state = lax.fori_loop(0, dense.num_sequences, sequence, state)
    return Partial(state.out[:num_tokens], state.lse[:num_tokens])
