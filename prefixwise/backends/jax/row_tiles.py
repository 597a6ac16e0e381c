"""How many rows a GEMM has: tiles of token rows, the sizes of programs, the widths of dense masks.

A GEMM may give a row other bits when the number of rows changes. On a CPU it does, so rows run in tiles of one fixed
size, as many as the batch has: one compiled program then serves every batch up to its capacity, at the cost of the rows
in use. On a GPU one tile holds all rows, unless `batch_invariant` asks for tiles of a fixed size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

CPU_TILE_ROWS = 128
CPU_SCORE_ROWS = 64
CPU_SMALLEST = 512  # tokens
ACCELERATOR_ROWS = 256  # from this many rows on, a GEMM adds in one order, at any number of rows
CPU_EXPERT_ROWS = 16
ACCELERATOR_EXPERT_ROWS = 128
INVARIANT_ROWS = 2048  # rows of a tile under `batch_invariant` on an accelerator
_LEAST_DENSE_COLUMNS = 512
CPU_STEP = 8  # from one bucket to the next; a program costs what is used of it, so a few serve all batches
COARSE_STEP = 4


def dense_columns(sequence_len: int) -> int:
    """The width of the dense mask for sequences of this length: a power of two."""
    return max(_LEAST_DENSE_COLUMNS, 1 << (sequence_len - 1).bit_length())


def dense_columns_up_to(longest_sequence: int) -> tuple[int, ...]:
    """All widths that sequences up to this length can have."""
    if not longest_sequence:
        return ()
    sizes = accumulate(repeat(2), mul, initial=_LEAST_DENSE_COLUMNS)
    found = [next(sizes)]
    while found[-1] < dense_columns(longest_sequence):
        found.append(next(sizes))
    return tuple(found)


@dataclass(frozen=True)
class RowTiles:
    """The sizes of tiles of token rows, of scored rows, and of the rows of one expert.

    A program behind the trunk computes one tile of scored rows, and the host starts it once for each tile. The host
    knows their number; a loop on a GPU would make the driver wait for it.
    """

    token_rows: int | None  # None: one tile holds all rows
    score_rows: int
    expert_rows: int = ACCELERATOR_EXPERT_ROWS

    def over_tokens(
        self, function: Callable[..., Any], num_tiles: jax.Array, *inputs: jax.Array, into: jax.Array | None = None
    ) -> Any:
        """A row-wise function over arrays of T rows; behind `num_tiles` tiles the output has the rows of `into`, or
        zeros."""
        if self.token_rows is None:
            return function(*inputs)
        return map_rows(function, self.token_rows, num_tiles, len(inputs[0]), inputs, into)


def map_rows(
    function: Callable[..., Any],
    size: int,
    num_tiles: jax.Array,
    num_rows: int,
    inputs: tuple[jax.Array, ...],
    into: Any = None,
) -> Any:
    """`function` over the first `num_tiles` tiles of `size` rows, into trees of arrays with `num_rows` rows. `into`:
    what these arrays hold before; None: zeros."""

    def take(number: jax.Array) -> list[jax.Array]:
        return [lax.dynamic_slice_in_dim(each, number * size, size) for each in inputs]

    def body(number: jax.Array, outputs: Any) -> Any:
        found = jax.tree.map(as_bits, function(*take(number)))
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, number * size, 0), outputs, found
        )

    if into is None:
        shapes = jax.eval_shape(lambda: function(*take(jnp.int32(0))))
        into = jax.tree.map(lambda shape: jnp.zeros((num_rows, *shape.shape[1:]), shape.dtype), shapes)
    outputs = lax.fori_loop(0, num_tiles, body, jax.tree.map(as_bits, into))
    return jax.tree.map(lambda before, whole: from_bits(whole, before.dtype), into, outputs)


def as_bits(array: jax.Array) -> jax.Array:
    """bfloat16 as the integers of its bits: to write a part of a bfloat16 array, XLA on a CPU would convert the whole
    array to float32 and back."""
    return lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.bfloat16 else array


def from_bits(array: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_bits`."""
    return lax.bitcast_convert_type(array, dtype) if array.dtype == jnp.uint16 else array
