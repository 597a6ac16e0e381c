"""Means over the tokens of segments, in an order that follows from each segment alone.

A segment is cut into chunks of CHUNK tokens from its own start. The chunks are added up, then their sums are, one after
the other. All loops have a length that is known when the program is compiled; chunks that do not exist add zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64  # tokens


def mean_of_segments(hidden: jax.Array, starts: jax.Array, lens: jax.Array) -> jax.Array:
    """hidden [T, D] float32, starts and lens [S] of segments that do not overlap to [S, D] float32."""
    num_tokens, num_rows = len(hidden), len(starts)
    num_chunks = -(-lens // CHUNK)
    behind = jnp.cumsum(num_chunks)  # [S]: the number of the first chunk behind the segment's
    first = behind - num_chunks
    chunk = jnp.arange(num_tokens // CHUNK + num_rows)  # as many as there may be
    row = jnp.minimum(jnp.searchsorted(behind, chunk, side="right"), num_rows - 1)
    token = (chunk - first[row])[:, None] * CHUNK + jnp.arange(CHUNK)
    is_real = (token < lens[row][:, None]) & (chunk < behind[-1])[:, None]
    places = jnp.where(is_real, starts[row][:, None] + token, 0)
    sums = jnp.where(is_real[..., None], hidden[places], 0.0).sum(1)

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        part = sums[jnp.minimum(first + number, len(sums) - 1)]
        return total + jnp.where((number < num_chunks)[:, None], part, 0.0)

    total = lax.fori_loop(0, -(-num_tokens // CHUNK), add, jnp.zeros((num_rows, hidden.shape[1]), jnp.float32))
    return total / jnp.maximum(lens, 1)[:, None].astype(jnp.float32)
