"""The arithmetic of attention on TPUs: one block of keys into an online softmax, and where its state is kept.

The query heads of one KV head are rows of one product, head by head: row `g * tokens + t`. Products of float32 are
whole ones, and what is masked adds exactly nothing.
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
    """A softmax under way, of R rows, base 2. What is one number for a row fills its lanes, which are never spread."""

    out: jax.Array  # [R, H] float32
    peak: jax.Array  # [R, LANES] float32, the same in all lanes
    total: jax.Array  # [R, LANES] float32, to be summed over the lanes

    @classmethod
    def empty(cls, num_rows: int, head_size: int) -> State:
        lanes = (num_rows, LANES)
        return cls(jnp.zeros((num_rows, head_size), jnp.float32), jnp.full(lanes, -jnp.inf), jnp.zeros(lanes))


class Block(NamedTuple):
    """Rows of queries, and the keys that they are multiplied with."""

    q: jax.Array  # [R, H]
    keys: jax.Array  # [C, H]
    values: jax.Array  # [C, H]; those that nobody sees must be finite


def accumulate(state: State, block: Block, seen: jax.Array | None, *, sees_some: bool = True) -> State:
    """With `seen` [R, C], or all. `sees_some`: every row that counts sees one of these keys, or has seen one before."""
    q, keys, values = block
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    scores = _product(q, keys, (1, 1), precision) * (LOG2_E / math.sqrt(q.shape[-1]))
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)  # not added: a hidden score may be NaN
    peak = jnp.maximum(state.peak, scores.max(axis=1, keepdims=True))
    finite_peak = peak if sees_some else jnp.where(peak == -jnp.inf, 0.0, peak)
    weights, shrink = jnp.exp2(scores - widened(finite_peak, len(keys))), jnp.exp2(state.peak - finite_peak)
    gained = _product(weights.astype(values.dtype), values, (1, 0), precision)
    total = state.total * shrink + _in_lanes(weights)
    return State(state.out * widened(shrink, values.shape[-1]) + gained, peak, total)


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


def _product(left: jax.Array, right: jax.Array, axes: tuple[int, int], precision: lax.Precision) -> jax.Array:
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class TokenRows:
    """Rows of heads in VMEM that are read and written from any token on.

    That needs 32 bits for each number, and heads that fill no more than one row of lanes; larger ones are in parts.
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
    """The softmaxes of all query heads and the tokens of a tile, in VMEM."""

    out: TokenRows
    peak: TokenRows
    total: TokenRows

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
        return self.out, self.peak, self.total


def as_rows(by_head: jax.Array) -> jax.Array:
    """[heads, tokens, H] to [heads * tokens, H]."""
    return by_head.reshape(-1, by_head.shape[-1])


def row_tokens(num_heads: int, num_tokens: int, width: int) -> jax.Array:
    """Which of the tokens each row is of: [num_heads * num_tokens, width]."""
    return as_rows(lax.broadcasted_iota(jnp.int32, (num_heads, num_tokens, width), 1))


def kept_where(is_changed: Callable[[int], jax.Array], new: State, old: State) -> State:
    """`new` for some of the rows; `is_changed` gives [R, width] for a width."""
    return State(*(jnp.where(is_changed(b.shape[1]), a, b) for a, b in zip(new, old, strict=True)))
