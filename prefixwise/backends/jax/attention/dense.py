"""The `dense` mask of packed rows: one [T, C] array that says which tokens of its row each token sees.

It serves as the baseline that `segment` is measured against. The tiles are those of `segment` with their masks read
from the array, and no pair is skipped: what the tiles do not visit is scored and masked, block by block. Hidden pairs
add exactly nothing, so both masks give the same bits; dense pays with memory and time that grow with the square of the
row, which is why it refuses long rows (`plan/algorithms.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from prefixwise.backends.jax.attention.base import Heads, Partial
from prefixwise.backends.jax.attention.xla import SIZES, XlaAttention, merge_block, with_room
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.batch import ForwardBatch
from prefixwise.forward.tiles import DeviceTiles

BLOCK = SIZES.wide  # tokens on a side of the blocks in which the pairs outside all tiles are scored


class DenseMask(NamedTuple):
    """On the device, inside a program."""

    mask: jax.Array  # [T, C] bool: may token t see the c-th token of its row?
    token_row: jax.Array  # [T]: first token of the row
    row_starts: jax.Array  # [rows + 1, or more]: first token of each row, and the end of the last
    num_rows: jax.Array

    def visible(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Tokens [.., Q] and [.., C] to [.., Q, C]."""
        last_token, last_column = (size - 1 for size in self.mask.shape)
        query = jnp.minimum(query, last_token)[..., None]
        column = jnp.clip(key[..., None, :] - self.token_row[query], 0, last_column)
        return self.mask[query, column]


def make_mask(batch: ForwardBatch, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """[T, C] on the host; what is beyond the batch's tokens and its rows is hidden."""
    mask = np.zeros(shape, np.bool_)
    row_of = np.searchsorted(batch.row_starts, batch.segment_starts[:-1], side="right") - 1
    for segment, row in enumerate(row_of):
        start, stop = (int(edge) for edge in batch.segment_starts[segment : segment + 2])
        row_start = int(batch.row_starts[row])
        mask[start:stop, start - row_start : stop - row_start] = np.tri(stop - start, dtype=np.bool_)
        if batch.prefix_index[segment] >= 0:
            source = batch.prefixes[int(batch.prefix_index[segment])]
            assert source.segment is not None and not source.blocks, "a packed row holds its own prefix"
            prefix = int(batch.segment_starts[source.segment]) - row_start
            mask[start:stop, prefix : prefix + int(batch.prefix_lens[segment])] = True
    return mask


def token_rows(batch: ForwardBatch) -> Int32Array:
    """[T]: the first token of every token's row."""
    return np.repeat(batch.row_starts[:-1], np.diff(batch.row_starts)).astype(np.int32)


def dense_attention(heads: Heads, tiles: DeviceTiles, dense: DenseMask) -> jax.Array:
    """Packed attention through the mask, to [T, N, H]."""
    attention, (q, k, v) = XlaAttention(dense.visible), (heads.q, heads.k, heads.v)
    own = _attend_rest(q, k, v, tiles, dense, attention.own(q, k, v, tiles))
    return attention.with_prefix(q, attention.batch_source(k, v), own, tiles)


def _attend_rest(
    q: jax.Array, k: jax.Array, v: jax.Array, tiles: DeviceTiles, dense: DenseMask, own: Partial
) -> Partial:
    """Every pair of every row that no tile visits: hidden, unless the mask shows what the tiles left out."""
    num_tokens = len(q)
    q, k, v = (with_room(each, BLOCK) for each in (q, k, v))
    state = Partial(*(with_room(each, BLOCK) for each in own))
    offset = jnp.arange(BLOCK)

    def unvisited(query: jax.Array, key: jax.Array) -> jax.Array:
        token, column = jnp.minimum(query, num_tokens - 1)[:, None], key[None, :]
        in_own = (column >= tiles.token_segment[token]) & (column <= token)
        prefix = tiles.key_tile_addresses[tiles.token_prefix_list[token]]
        in_prefix = (column >= prefix) & (column < prefix + tiles.token_prefix_len[token])
        return dense.visible(query, key) & ~in_own & ~in_prefix

    def row(number: jax.Array, state: Partial) -> Partial:
        start, stop = dense.row_starts[number], dense.row_starts[number + 1]
        num_blocks = -(-(stop - start) // BLOCK)

        def block(pair: jax.Array, state: Partial) -> Partial:
            query, key = (start + index * BLOCK + offset for index in (pair // num_blocks, pair % num_blocks))
            seen = unvisited(query, key) & (key < stop)
            return merge_block(state, q, k, v, query, key, seen, is_query=query < stop, is_key=key < stop)

        return lax.fori_loop(0, num_blocks * num_blocks, block, state)

    state = lax.fori_loop(0, dense.num_rows, row, state)
    return Partial(state.out[:num_tokens], state.lse[:num_tokens])
