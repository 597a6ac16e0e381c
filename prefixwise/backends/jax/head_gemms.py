"""The head in JAX: logits of labels, and passes over the whole vocabulary, as one device of the mesh sees them.

The head multiplies only the label rows, unless a request needs a probability over the whole vocabulary. Then the
logsumexp runs over tiles of the vocabulary, and no [rows, V] array exists. All GEMMs of the head have one fixed shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.backends.jax.linear import linear
from prefixwise.backends.jax.mesh import TENSOR
from prefixwise.backends.jax.model import look_up

LABEL_TILE = 16  # label rows of the head at a time
VOCAB_TILE = 8192  # vocabulary rows of the head at a time

State = TypeVar("State")
MaxAndSum = tuple[jax.Array, jax.Array]  # of the exponentials that were seen, [S] each: a sum beside its largest logit


def label_logits(
    head: jax.Array, hidden: jax.Array, label_ids: jax.Array, *, tp_size: int, softcap: float = 0.0
) -> jax.Array:
    """hidden [S, D] float32, head [V, D], label_ids [LABEL_TILE] to [S, LABEL_TILE] float32."""
    return _capped(linear(hidden, look_up(head, label_ids, tp_size).astype(jnp.float32)), softcap)


def logsumexp(head: jax.Array, hidden: jax.Array, *, tp_size: int, vocab_size: int, softcap: float = 0.0) -> jax.Array:
    """The logsumexp of all logits: hidden [S, D] float32, head [V, D] to [S] float32."""

    def add(logits: jax.Array, ids: jax.Array, state: MaxAndSum) -> MaxAndSum:
        return _add_exponentials(logits, state)

    return _logsumexp(_over_tiles(add, _nothing(hidden), head, hidden, tp_size, vocab_size, softcap), tp_size)


def score_vocabulary(
    head: jax.Array,
    hidden: jax.Array,
    token_ids: jax.Array,
    *,
    tp_size: int,
    vocab_size: int,
    top_k: int,
    softcap: float = 0.0,
) -> jax.Array:
    """One pass over the vocabulary: hidden [S, D] float32, head [V, D], token_ids [S] to [S, 2 + 2 K] float32.

    Columns: the logit of the given token, the logsumexp, the K largest logits, their token ids (below 2**24, so exact).
    """

    def add(logits: jax.Array, ids: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m_i, l_i, picked, tops, top_ids = state
        is_token = ids == token_ids[:, None]
        picked = jnp.maximum(picked, jnp.where(is_token, logits, -jnp.inf).max(-1))
        best, places = lax.top_k(logits, min(top_k, len(ids)))
        merged = jnp.concatenate([tops, best], 1), jnp.concatenate([top_ids, ids[places]], 1)
        return *_add_exponentials(logits, (m_i, l_i)), picked, *_largest(*merged, top_k)

    m_i, l_i = _nothing(hidden)
    no_ids = jnp.zeros((len(hidden), top_k), jnp.int32)
    begun: tuple[jax.Array, ...] = (m_i, l_i, m_i, jnp.repeat(m_i[:, None], top_k, 1), no_ids)
    m_i, l_i, picked, tops, top_ids = _over_tiles(add, begun, head, hidden, tp_size, vocab_size, softcap)
    if tp_size > 1:
        picked = lax.pmax(picked, TENSOR)
        gathered = [lax.all_gather(each, TENSOR, axis=1, tiled=True) for each in (tops, top_ids)]
        tops, top_ids = _largest(gathered[0], gathered[1], top_k)
    lse = _logsumexp((m_i, l_i), tp_size)
    return jnp.concatenate([picked[:, None], lse[:, None], tops, top_ids.astype(jnp.float32)], 1)


def _over_tiles(
    add: Callable[[jax.Array, jax.Array, State], State],
    state: State,
    head: jax.Array,
    hidden: jax.Array,
    tp_size: int,
    vocab_size: int,
    softcap: float,
) -> State:
    """The state after all tiles of this shard's vocabulary: `add` takes a tile's logits [S, tile], token ids, state."""
    local_size = len(head)
    tile_size = min(VOCAB_TILE, local_size)
    first_id = lax.axis_index(TENSOR) * local_size if tp_size > 1 else jnp.int32(0)

    def add_tile(number: jax.Array, state: State) -> State:
        start = jnp.minimum(number * tile_size, local_size - tile_size)
        ids = start + jnp.arange(tile_size)
        # The last tile is moved to fit, so its first columns were counted before; padding rows never count.
        is_counted = (ids >= number * tile_size) & (first_id + ids < vocab_size)
        rows = lax.dynamic_slice_in_dim(head, start, tile_size).astype(jnp.float32)
        return add(jnp.where(is_counted, _capped(linear(hidden, rows), softcap), -jnp.inf), first_id + ids, state)

    after: State = lax.fori_loop(0, -(-local_size // tile_size), add_tile, state)
    return after


def _nothing(hidden: jax.Array) -> MaxAndSum:
    return jnp.full(len(hidden), -jnp.inf, jnp.float32), jnp.zeros(len(hidden), jnp.float32)


def _add_exponentials(logits: jax.Array, state: MaxAndSum) -> MaxAndSum:
    m_i, l_i = state
    m_new = jnp.maximum(m_i, logits.max(-1))
    m_finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    return m_new, l_i * jnp.exp(m_i - m_finite) + jnp.exp(logits - m_finite[:, None]).sum(-1)


def _logsumexp(state: MaxAndSum, tp_size: int) -> jax.Array:
    """Of all shards."""
    m_i, l_i = state
    if tp_size > 1:
        m_all = lax.pmax(m_i, TENSOR)
        m_i, l_i = m_all, lax.psum(l_i * jnp.exp(m_i - m_all), TENSOR)
    return m_i + jnp.log(l_i)


def _capped(logits: jax.Array, softcap: float) -> jax.Array:
    """softcap * tanh(logits / softcap); 0: the logits themselves."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def _largest(logits: jax.Array, ids: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """The K largest of [S, n], and their ids."""
    best, places = lax.top_k(logits, top_k)
    return best, jnp.take_along_axis(ids, places, 1)
