"""The arithmetic of attention on TPUs: one block of keys into an online softmax, and where its state is kept.

The query heads of one KV head are rows of one product, head by head: row `g * tokens + t`. Products of float32 are
whole ones, and what is masked adds exactly nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from itemwise.backends.jax.attention.tpu_copies import Ref

LANES = 128


class State(NamedTuple):
    """A softmax under way, of R rows."""

    out: jax.Array  # [R, H] float32
    peak: jax.Array  # [R, 1] float32
    total: jax.Array  # [R, 1] float32


def accumulate(state: State, q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> State:
    """q [R, H] over keys and values [C, H] with `seen` [R, C]. Values that nobody sees must be finite."""
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    scores = _product(q, keys, (1, 1), precision) * (1 / math.sqrt(q.shape[-1]))
    scores = jnp.where(seen, scores, -jnp.inf)  # not added: a hidden score may be NaN
    peak = jnp.maximum(state.peak, scores.max(axis=1, keepdims=True))
    finite_peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights, shrink = jnp.exp(scores - finite_peak), jnp.exp(state.peak - finite_peak)
    gained = _product(weights.astype(values.dtype), values, (1, 0), precision)
    total = state.total * shrink + weights.sum(axis=1, keepdims=True)
    return State(state.out * shrink + gained, peak, total)


def _product(left: jax.Array, right: jax.Array, axes: tuple[int, int], precision: lax.Precision) -> jax.Array:
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class TokenRows:
    """Rows of heads in VMEM that are read and written from any token on.

    That needs 32 bits for each number, and heads that fill no more than one row of lanes; larger ones are in parts.
    """

    ref: Ref  # [parts, heads, tokens, at most LANES] float32

    def load(self, first_head: jax.Array | int, num_heads: int, tokens: pl.Slice) -> jax.Array:
        """To [heads, tokens, H]."""
        parts = [self.ref[part, pl.ds(first_head, num_heads), tokens] for part in range(len(self.ref))]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)

    def store(self, first_head: jax.Array | int, tokens: pl.Slice, rows: jax.Array) -> None:
        """From [heads, tokens, H]."""
        width = self.ref.shape[-1]
        for part in range(len(self.ref)):
            piece = rows[:, :, part * width : (part + 1) * width]
            self.ref[part, pl.ds(first_head, len(rows)), tokens] = piece


@dataclass(frozen=True)
class States:
    """The softmaxes of all query heads and the tokens of a tile, in VMEM."""

    out: TokenRows
    peak: TokenRows  # each number in all lanes
    total: TokenRows

    def clear(self) -> None:
        for rows, start in ((self.out, 0.0), (self.peak, -jnp.inf), (self.total, 0.0)):
            rows.ref[...] = jnp.full(rows.ref.shape, start, jnp.float32)

    def load(self, first_head: jax.Array | int, num_heads: int, tokens: pl.Slice) -> State:
        out, peak, total = (
            as_rows(rows.load(first_head, num_heads, tokens)) for rows in (self.out, self.peak, self.total)
        )
        return State(out, peak[:, :1], total[:, :1])

    def store(self, first_head: jax.Array | int, num_heads: int, tokens: pl.Slice, state: State) -> None:
        lanes = (len(state.out), LANES)
        columns = (jnp.broadcast_to(state.peak, lanes), jnp.broadcast_to(state.total, lanes))
        for rows, found in zip((self.out, self.peak, self.total), (state.out, *columns), strict=True):
            rows.store(first_head, tokens, found.reshape(num_heads, -1, found.shape[-1]))


def as_rows(by_head: jax.Array) -> jax.Array:
    """[heads, tokens, H] to [heads * tokens, H]."""
    return by_head.reshape(-1, by_head.shape[-1])


def kept_where(is_changed: jax.Array, new: State, old: State) -> State:
    """`new` for some of the rows: [R, 1]."""
    return State(*(jnp.where(is_changed, after, before) for after, before in zip(new, old, strict=True)))
