"""The arithmetic of attention on TPUs: one key tile into an online softmax, and its state in VMEM.

The query heads of one KV head are rows of one GEMM, head by head: row `g * tokens + t`. GEMMs of float32 run at full
precision, and a masked key adds exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from prefixwise.backends.jax.attention.tpu_copies import Range, Ref

LANES = 128
LOG2_E = math.log2(math.e)


class State(NamedTuple):
    """An online softmax of R rows, base 2. A scalar of a row fills all lanes, so no step broadcasts it."""

    out: jax.Array  # [R, H] float32
    m_i: jax.Array  # running max [R, LANES] float32, the same in all lanes
    l_i: jax.Array  # running sum [R, LANES] float32, still to be summed over the lanes

    @classmethod
    def empty(cls, num_rows: int, head_size: int) -> State:
        lanes = (num_rows, LANES)
        return cls(jnp.zeros((num_rows, head_size), jnp.float32), jnp.full(lanes, -jnp.inf), jnp.zeros(lanes))


class KeyTile(NamedTuple):
    """Rows of queries, and one tile of keys and values."""

    q: jax.Array  # [R, H]
    keys: jax.Array  # [C, H]
    values: jax.Array  # [C, H]; masked values must be finite


def accumulate(state: State, tile: KeyTile, seen: jax.Array | None, *, sees_some: bool = True) -> State:
    """One key tile into the online softmax. `seen` [R, C]; None: all keys. `sees_some`: every row that is used sees one
    of these keys, or has seen one before."""
    q, keys, values = tile
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    scores = _gemm(q, keys, (1, 1), precision) * (LOG2_E / math.sqrt(q.shape[-1]))
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)  # not added: a masked score may be NaN
    m_new = jnp.maximum(state.m_i, scores.max(axis=1, keepdims=True))
    m_finite = m_new if sees_some else jnp.where(m_new == -jnp.inf, 0.0, m_new)
    weights, alpha = jnp.exp2(scores - widened(m_finite, len(keys))), jnp.exp2(state.m_i - m_finite)
    gained = _gemm(weights.astype(values.dtype), values, (1, 0), precision)
    l_new = state.l_i * alpha + _in_lanes(weights)
    return State(state.out * widened(alpha, values.shape[-1]) + gained, m_new, l_new)


def widened(rows: jax.Array, width: int) -> jax.Array:
    """[R, LANES], the same in all lanes, to [R, width]."""
    if width <= LANES:
        return rows[:, :width]
    return jnp.concatenate([rows] * (width // LANES), axis=1)


def _in_lanes(weights: jax.Array) -> jax.Array:
    """[R, C] to [R, LANES] of the same sum."""
    if weights.shape[1] == LANES:
        return weights
    lane = lax.broadcasted_iota(jnp.int32, (len(weights), LANES), 1)
    return jnp.where(lane == 0, weights.sum(axis=1, keepdims=True), 0.0)


def _gemm(left: jax.Array, right: jax.Array, axes: tuple[int, int], precision: lax.Precision) -> jax.Array:
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class TokenRows:
    """Rows of heads in VMEM that can be read and written from any token on.

    That needs 32-bit numbers, and heads of at most LANES numbers; larger heads are split into parts.
    """

    ref: Ref  # [parts, heads, tokens, at most LANES] float32

    def load(self, first_head: jax.Array | int, num_heads: int, tokens: Range) -> jax.Array:
        """To [heads, tokens, H]."""
        parts = [self.ref[part, pl.ds(first_head, num_heads), tokens] for part in range(len(self.ref))]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)

    def store(self, first_head: jax.Array | int, tokens: Range, rows: jax.Array) -> None:
        """From [heads, tokens, H]."""
        width = self.ref.shape[-1]
        for part in range(len(self.ref)):
            piece = rows[:, :, part * width : (part + 1) * width]
            self.ref[part, pl.ds(first_head, len(rows)), tokens] = piece


@dataclass(frozen=True)
class States:
    """The softmax states of all query heads and tokens of a tile, in VMEM."""

    out: TokenRows
    m_i: TokenRows
    l_i: TokenRows

    def clear(self) -> None:
        for rows, start in zip(self._all, (0.0, -jnp.inf, 0.0), strict=True):
            rows.ref[...] = jnp.full(rows.ref.shape, start, jnp.float32)

    def load(self, first_head: jax.Array | int, num_heads: int, tokens: Range) -> State:
        return State(*(as_rows(rows.load(first_head, num_heads, tokens)) for rows in self._all))

    def store(self, first_head: jax.Array | int, num_heads: int, tokens: Range, state: State) -> None:
        for rows, found in zip(self._all, state, strict=True):
            rows.store(first_head, tokens, found.reshape(num_heads, -1, found.shape[-1]))

    @property
    def _all(self) -> tuple[TokenRows, TokenRows, TokenRows]:
        return self.out, self.m_i, self.l_i


def as_rows(by_head: jax.Array) -> jax.Array:
    """[heads, tokens, H] to [heads * tokens, H]."""
    return by_head.reshape(-1, by_head.shape[-1])


def row_tokens(num_heads: int, num_tokens: int, width: int) -> jax.Array:
    """The token of each row: [num_heads * num_tokens, width]."""
    return as_rows(lax.broadcasted_iota(jnp.int32, (num_heads, num_tokens, width), 1))


def select_rows(is_new: Callable[[int], jax.Array], new: State, old: State) -> State:
    """`new` for the rows that `is_new` selects, else `old`; `is_new` gives [R, width] for a width."""
    return State(*(jnp.where(is_new(b.shape[1]), a, b) for a, b in zip(new, old, strict=True)))
