"""Shared by the warpgroups of the Hopper kernel: references, barriers, units of work. See `hopper_prefix.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from prefixwise.forward.tiles import KEY_TILE, PREFIX

ROWS = 64  # of a warpgroup: a side of its GEMMs
ALIGNMENT = 8  # tokens: copies begin at a multiple of so many
NUM_COMPUTE = 2  # warpgroups that compute
NUM_SLOTS = 2  # key tiles in shared memory
Ref = Any  # Pallas has no public type for references


class Inputs(NamedTuple):
    """References in device memory, in the order of the kernel's arguments."""

    counts: Ref  # [3] int32
    starts: Ref  # [tiles] int32: first token
    lens: Ref  # [tiles] int32: tokens
    reads: Ref  # [tiles] int32: prefix tokens that each of them reads
    lists: Ref  # [tiles] int32: where the prefix's key tiles begin in `addresses`
    addresses: Ref  # [key tiles] int32
    base: Ref  # [1] int32, added to every address
    q: Ref  # [T, heads, H], the query heads first
    k: Ref  # [A, heads, H], KV heads from `Shape.first_key` on
    v: Ref  # [A, heads, H], KV heads from `Shape.first_value` on
    self_out: Ref  # [T, N, H]
    self_lse: Ref  # [N, T] float32, base 2


class Buffers(NamedTuple):
    """In shared memory, `W` = NUM_COMPUTE."""

    q: Ref  # [W, R, H]
    out: Ref  # [W, R, H]: the self part comes in, the merged output goes out
    rows: Ref  # [W, R, H], not swizzled, for tiles that are not whole
    lse: Ref  # [W, R] float32
    k: Ref  # [NUM_SLOTS, C, H]
    v: Ref  # [NUM_SLOTS, C, H]


class Barriers(NamedTuple):
    """Each is waited for by the other side of a copy."""

    q: Ref  # [W]: queries have arrived
    self_part: Ref  # [W]: the self part and its logsumexp have arrived
    k: Ref  # [NUM_SLOTS]: keys have arrived
    v: Ref  # [NUM_SLOTS]
    q_free: Ref  # both compute warpgroups have read their queries
    out_free: Ref  # both have written their rows
    k_free: Ref  # [NUM_SLOTS]: both have read the keys
    v_free: Ref  # [NUM_SLOTS]
    turn: Ref  # the two compute warpgroups take turns at the tensor cores
    cleaned: Ref  # [NUM_SLOTS]: the first has zeroed the masked values, which the second reads too


@dataclass(frozen=True)
class Shape:
    """Sizes that are fixed when the kernel is compiled."""

    num_heads: int  # N
    heads_per_kv: int  # G
    head_size: int  # H
    first_key: int  # head of `k` that is the first KV head's
    first_value: int  # head of `v`
    num_ctas: int
    is_interpreted: bool  # the interpreter has no layouts and no WGMMA

    @property
    def heads_per_unit(self) -> int:
        """Two query heads of one KV head share a unit where their number is even."""
        return NUM_COMPUTE if self.heads_per_kv % NUM_COMPUTE == 0 else 1


def tile_tokens(heads_per_kv: int) -> int:
    """Tokens of a tile: each warpgroup has one head, or both have the same head and half of the tokens each."""
    return ROWS if heads_per_kv % NUM_COMPUTE == 0 else NUM_COMPUTE * ROWS


class Unit(NamedTuple):
    """A unit of work; int32 scalars."""

    start: jax.Array  # first token
    length: jax.Array  # tokens
    num_read: jax.Array  # prefix tokens
    first_address: jax.Array  # in `Inputs.addresses`
    head: jax.Array  # first query head

    @property
    def num_steps(self) -> jax.Array:
        return lax.div(self.num_read + (KEY_TILE - 1), jnp.int32(KEY_TILE))


def for_each_unit(
    inputs: Inputs, shape: Shape, function: Callable[[Unit, jax.Array, jax.Array], None]
) -> tuple[jax.Array, jax.Array]:
    """Call `function` with every unit of this CTA, its number, and the number of key tiles before it.

    Returns the number of units, and of all their key tiles. A unit is looked up while the one before it is computed.
    """
    per_tile, capacity = shape.num_heads // shape.heads_per_unit, len(inputs.starts)
    cta = lax.axis_index("cta")

    def look_up(number: jax.Array) -> Unit:
        index = cta + number * shape.num_ctas
        tile = jnp.minimum(lax.div(index, jnp.int32(per_tile)), capacity - 1)
        head = lax.rem(index, jnp.int32(per_tile)) * shape.heads_per_unit
        return Unit(inputs.starts[tile], inputs.lens[tile], inputs.reads[tile], inputs.lists[tile], head)

    def one(number: jax.Array, state: tuple[jax.Array, Unit]) -> tuple[jax.Array, Unit]:
        step, unit = state
        following = look_up(number + 1)
        function(unit, number, step)
        return step + unit.num_steps, following

    first = look_up(jnp.int32(0))
    total = inputs.counts[PREFIX] * per_tile
    num_units = lax.div(total - cta + (shape.num_ctas - 1), jnp.int32(shape.num_ctas))
    num_steps, _ = lax.fori_loop(0, num_units, one, (jnp.int32(0), first))
    return num_units, num_steps


def slot_of(step: jax.Array) -> jax.Array:
    """The slot in shared memory of this step's key tile."""
    return lax.rem(step, jnp.int32(NUM_SLOTS))


def place_of(unit: Unit, group: Any, shape: Shape) -> tuple[Any, Any]:
    """First token and head of a warpgroup's rows."""
    window = lax.div(unit.start, jnp.int32(ALIGNMENT)) * ALIGNMENT
    if not shape.is_interpreted:
        window = pl.multiple_of(window, ALIGNMENT)
    if shape.heads_per_unit == NUM_COMPUTE:
        return window, unit.head + group
    return window + group * ROWS, unit.head
