"""Everything but attention works on one token at a time; here is how many rows of them go through a product at once.

Matrix products may give other bits for the same row when the number of rows changes. On a CPU they do, so rows go in
blocks of one fixed size, as many as the batch has: one compiled program then serves every batch up to its capacity at
the cost of what is used. On a GPU one block holds everything, unless `batch_invariant` asks for fixed ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class RowBlocks:
    """How token rows are cut, and how the few rows are whose scores are wanted: a program each for one block of them,
    which the host starts as often as there are blocks. It knows that number; a GPU's driver would wait for it."""

    token_rows: int | None  # None: all in one block
    score_rows: int

    def over_tokens(self, function: Callable[..., Any], num_blocks: jax.Array, *inputs: jax.Array) -> Any:
        """A row-wise function over arrays of T rows; beyond `num_blocks` blocks the output is zeros."""
        if self.token_rows is None:
            return function(*inputs)
        return map_rows(function, self.token_rows, num_blocks, len(inputs[0]), inputs)


def map_rows(
    function: Callable[..., Any], size: int, num_blocks: jax.Array, num_rows: int, inputs: tuple[jax.Array, ...]
) -> Any:
    """`function` over the first `num_blocks` blocks of `size` rows, into trees of arrays with `num_rows` rows."""

    def take(number: jax.Array) -> list[jax.Array]:
        return [lax.dynamic_slice_in_dim(each, number * size, size) for each in inputs]

    def body(number: jax.Array, outputs: Any) -> Any:
        found = jax.tree.map(as_bits, function(*take(number)))
        return jax.tree.map(
            lambda total, part: lax.dynamic_update_slice_in_dim(total, part, number * size, 0), outputs, found
        )

    shapes = jax.eval_shape(lambda: function(*take(jnp.int32(0))))
    outputs = jax.tree.map(lambda shape: as_bits(jnp.zeros((num_rows, *shape.shape[1:]), shape.dtype)), shapes)
    outputs = lax.fori_loop(0, num_blocks, body, outputs)
    return jax.tree.map(lambda shape, total: from_bits(total, shape.dtype), shapes, outputs)


def as_bits(array: jax.Array) -> jax.Array:
    """bfloat16 as the integers of its bits: to write a part of an array, XLA on a CPU would take all of it through
    float32, there and back."""
    return lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.bfloat16 else array


def from_bits(array: jax.Array, dtype: Any) -> jax.Array:
    """`as_bits`, undone."""
    return lax.bitcast_convert_type(array, dtype) if array.dtype == jnp.uint16 else array
