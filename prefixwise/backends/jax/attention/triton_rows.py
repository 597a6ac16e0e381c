"""What the Triton kernels of attention share: rows of a tile, keys of a block, one step of an online softmax.

In the kernels: `R` rows of a tile (tokens x query heads of one KV head, padded to a power of two), `C` keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LOG2_E = math.log2(math.e)

# What Triton takes for its refs; Pallas has no public type for them.
Ref = Any
State = tuple[jax.Array, jax.Array, jax.Array]  # output [R, H], peak [R] and total [R], of an online softmax, base 2


class Rows:
    """The rows of a tile in one KV head: where they lie in [T, N, H], and which of them are real."""

    def __init__(
        self, kv_head: jax.Array, start: jax.Array, length: jax.Array, width: int, heads_per_kv: int, head_size: int
    ) -> None:
        padded_heads = pl.next_power_of_2(heads_per_kv)
        row, lane = jnp.arange(width * padded_heads), jnp.arange(pl.next_power_of_2(head_size))
        head_in_group = row % padded_heads
        self.offset = row // padded_heads  # of its token in the tile
        self.token = start + self.offset
        self.head = kv_head * heads_per_kv + head_in_group
        self.is_real = (self.offset < length) & (head_in_group < heads_per_kv)
        self._index = (self.token[:, None], self.head[:, None], lane[None, :])
        self._mask = self.is_real[:, None] & (lane < head_size)[None, :]

    def load(self, ref: Ref) -> jax.Array:
        """[R, H] of a [T, N or more, H] array."""
        return plgpu.load(ref.at[self._index], mask=self._mask, other=0.0)

    def load_scalars(self, ref: Ref) -> jax.Array:
        """[R] of an [N, T] array."""
        return plgpu.load(ref.at[self.head, self.token], mask=self.is_real, other=0.0)

    def store(self, ref: Ref, rows: jax.Array) -> None:
        plgpu.store(ref.at[self._index], rows.astype(ref.dtype), mask=self._mask)

    def store_scalars(self, ref: Ref, values: jax.Array) -> None:
        plgpu.store(ref.at[self.head, self.token], values, mask=self.is_real)

    def empty_state(self) -> State:
        total = jnp.zeros(self.offset.shape, jnp.float32)
        return jnp.zeros(self._mask.shape, jnp.float32), total - jnp.inf, total


def load_keys(ref: Ref, head: jax.Array, first: jax.Array, num_keys: int, count: jax.Array | None) -> jax.Array:
    """[C, H] of one head of an [A, heads, H] array; beyond `count` keys zeros, whatever is there."""
    head_size = ref.shape[-1]
    key, lane = jnp.arange(num_keys), jnp.arange(pl.next_power_of_2(head_size))
    where = ref.at[(first + key)[:, None], head, lane[None, :]]
    if count is None and head_size == len(lane):
        return plgpu.load(where)
    mask = jnp.broadcast_to((lane < head_size)[None, :], (num_keys, len(lane)))
    if count is not None:
        mask = mask & (key < count)[:, None]
    return plgpu.load(where, mask=mask, other=0.0)


def online_step(
    state: State, q: jax.Array, keys: jax.Array, values: jax.Array, scale: float, seen: jax.Array | None
) -> State:
    """One block of keys into the online softmax. Every row sees at least one key of its first block."""
    out, peak, total = state
    scores = plgpu.dot(q, keys.T)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * (scale * LOG2_E))
    weights = jnp.exp2(scores * (scale * LOG2_E) - new_peak[:, None])  # one fused multiply-add each
    shrink = jnp.exp2(peak - new_peak)
    out = out * shrink[:, None] + plgpu.dot(weights.astype(values.dtype), values)
    return out, new_peak, total * shrink + jnp.sum(weights, axis=1)


def for_each_tile(count: jax.Array, attend: Callable[[jax.Array], None]) -> None:
    """Every so-many-th tile of `count`, beginning with this program's own."""
    first, stride = pl.program_id(0), pl.num_programs(0)

    def one(number: jax.Array, nothing: None) -> None:
        attend(first + number * stride)
        return nothing

    lax.fori_loop(0, lax.div(count - first + stride - 1, stride), one, None)
