"""The head: from the hidden state after an item to the logits of its labels, in float32, on one device of the mesh.

Only the label rows of the head are multiplied, unless a probability over the whole vocabulary is asked for; then its
log-sum-exp is taken in blocks of the vocabulary, and no [rows, V] array ever exists. All products have one fixed shape.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.backends.jax.mesh import TENSOR
from prefixwise.backends.jax.model import linear, look_up

LABEL_BLOCK = 16  # label rows of the head at a time
VOCAB_BLOCK = 8192  # vocabulary rows of the head at a time


def label_logits(head: jax.Array, hidden: jax.Array, label_ids: jax.Array, *, tp_size: int) -> jax.Array:
    """hidden [S, D] float32, head [V, D], label_ids [LABEL_BLOCK] to [S, LABEL_BLOCK] float32."""
    return linear(hidden, look_up(head, label_ids, tp_size).astype(jnp.float32))


def logsumexp(head: jax.Array, hidden: jax.Array, *, tp_size: int, vocab_size: int) -> jax.Array:
    """The log-sum-exp of all logits: hidden [S, D] float32, head [V, D] to [S] float32."""
    local_size = len(head)
    block_size = min(VOCAB_BLOCK, local_size)
    first_id = lax.axis_index(TENSOR) * local_size if tp_size > 1 else jnp.int32(0)

    def add(number: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """One block of the vocabulary to the highest logit and the sum behind each row."""
        start = jnp.minimum(number * block_size, local_size - block_size)
        ids = start + jnp.arange(block_size)
        # The last block is moved to fit, so its first columns were counted before; padding rows never count.
        is_counted = (ids >= number * block_size) & (first_id + ids < vocab_size)
        rows = lax.dynamic_slice_in_dim(head, start, block_size).astype(jnp.float32)
        logits = jnp.where(is_counted, linear(hidden, rows), -jnp.inf)
        peak, total = state
        new_peak = jnp.maximum(peak, logits.max(-1))
        finite = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        return new_peak, total * jnp.exp(peak - finite) + jnp.exp(logits - finite[:, None]).sum(-1)

    begun = (jnp.full(len(hidden), -jnp.inf, jnp.float32), jnp.zeros(len(hidden), jnp.float32))
    peak, total = lax.fori_loop(0, -(-local_size // block_size), add, begun)
    if tp_size > 1:
        highest = lax.pmax(peak, TENSOR)
        peak, total = highest, lax.psum(total * jnp.exp(peak - highest), TENSOR)
    return peak + jnp.log(total)
