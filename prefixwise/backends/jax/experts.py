"""A mixture of experts in JAX: tiles of rows of one expert, as many as the batch needs, in a loop compiled once.

Every choice (a token and one of its experts) gets a *slot*. The slots of an expert lie together and begin with a tile,
so that all rows of a tile have the same weights:

    choices of tokens   0:a 0:c 1:a 1:b 2:c 2:a      tiles of 2 rows
    slots               [a0 a1] [a2 --] [b1 --] [c0 c2]

A tile has one number of rows whatever the batch, and a token's outputs are added in the order of its own experts, so
its bits do not depend on how many rows an expert got. With several devices each holds a part of every expert's inner
dimension, like a dense MLP's, and the weighted sums are added once over the devices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.backends.jax.row_tiles import from_bits
from prefixwise.models.config import ExpertsConfig


class Routing(NamedTuple):
    """The experts of each token, the one with the largest weight first."""

    weights: jax.Array  # [T, experts per token] float32
    numbers: jax.Array  # [T, experts per token] int32


class Slots(NamedTuple):
    """Where the choices of all tokens are computed. Slots that no choice has read token 0."""

    tokens: jax.Array  # [slots] int32
    experts: jax.Array  # [slots] int32, the same within a tile
    of_choices: jax.Array  # [T, experts per token] int32
    num_tiles: jax.Array  # int32: tiles that hold a choice


def route(logits: jax.Array, config: ExpertsConfig) -> Routing:
    """logits [T, E] float32: softmax over all experts, then the largest."""
    weights, numbers = lax.top_k(jax.nn.softmax(logits, axis=-1), config.experts_per_token)
    return Routing(weights / weights.sum(-1, keepdims=True) if config.norms_weights else weights, numbers)


def max_tiles(num_choices: int, num_experts: int, tile_rows: int) -> int:
    """The tiles of so many choices at most: all but one tile of each expert are full."""
    return min(num_choices, num_choices // tile_rows + num_experts)


def assign_slots(numbers: jax.Array, num_tokens: Any, num_experts: int, tile_rows: int) -> Slots:
    """Give every choice of the first `num_tokens` tokens a slot: numbers [T, experts per token]."""
    num_rows, per_token = numbers.shape
    num_choices = numbers.size
    is_used = jnp.arange(num_rows)[:, None] < num_tokens
    flat = jnp.where(is_used, numbers, num_experts).reshape(-1)  # choices of padding go last, behind all experts
    order = jnp.argsort(flat, stable=True)
    sorted_numbers = flat[order]
    edges = jnp.arange(num_experts + 1)
    first_choices = jnp.sum(flat[:, None] < edges, axis=0)  # of each expert, in that order; then of padding
    tiles = -(-(first_choices[1:] - first_choices[:-1]) // tile_rows)
    first_tiles = jnp.concatenate([jnp.zeros(1, tiles.dtype), jnp.cumsum(tiles)])
    num_slots = max_tiles(num_choices, num_experts, tile_rows) * tile_rows
    rank = jnp.arange(num_choices) - first_choices[sorted_numbers]
    slots = jnp.where(sorted_numbers < num_experts, first_tiles[sorted_numbers] * tile_rows + rank, num_slots)
    slots = slots.astype(jnp.int32)
    tokens = jnp.zeros(num_slots, jnp.int32).at[slots].set((order // per_token).astype(jnp.int32), mode="drop")
    of_choices = jnp.zeros(num_choices, jnp.int32).at[order].set(jnp.minimum(slots, num_slots - 1))
    of_tiles = jnp.sum(jnp.arange(num_slots // tile_rows)[:, None] >= first_tiles[1:], axis=1)
    return Slots(
        tokens,
        jnp.repeat(jnp.minimum(of_tiles, num_experts - 1).astype(jnp.int32), tile_rows),
        of_choices.reshape(numbers.shape),
        first_tiles[-1].astype(jnp.int32),
    )


def expert_matrix(stacked: jax.Array, layer: Any, expert: jax.Array, num_experts: int) -> jax.Array:
    """One expert's rows of [Ly, E x rows, columns], in one slice: all experts of a layer are never copied. bfloat16 may
    be stored as bits (`weights.expert_dtype`)."""
    num_rows = stacked.shape[1] // num_experts
    start = (jnp.asarray(layer, jnp.int32), expert * num_rows, jnp.int32(0))
    return from_bits(lax.dynamic_slice(stacked, start, (1, num_rows, stacked.shape[2]))[0], jnp.bfloat16)


def add_outputs(weights: jax.Array, outputs: jax.Array, of_choices: jax.Array) -> jax.Array:
    """weights and slots [T, k], outputs of slots [slots, D] to [T, D] float32, added in the order of k."""
    total = jnp.zeros((len(weights), outputs.shape[1]), jnp.float32)
    for number in range(weights.shape[1]):
        total += weights[:, number : number + 1] * outputs[of_choices[:, number]].astype(jnp.float32)
    return total
