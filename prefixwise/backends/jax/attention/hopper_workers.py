"""The warpgroups of the Hopper kernel: one copies, two compute. See `hopper_prefix.py`.

`R` = ROWS rows of a warpgroup, `C` = KEY_TILE keys of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from prefixwise.backends.jax.attention.hopper_units import (
    NUM_COMPUTE,
    NUM_SLOTS,
    ROWS,
    Barriers,
    Buffers,
    Inputs,
    Ref,
    Shape,
    Unit,
    place_of,
    slot_of,
)
from prefixwise.forward.tiles import KEY_TILE

LOG2_E = math.log2(math.e)

_Accumulator: Any = plgpu.ACC  # type: ignore[attr-defined]  # public, but hidden from type checkers
State = tuple[
    jax.Array, jax.Array, jax.Array
]  # online softmax, base 2: output [R, H], running max [R], running sum [R]


@dataclass(frozen=True)
class CopyWorker:
    """The warpgroup that fills shared memory."""

    inputs: Inputs
    buffers: Buffers
    barriers: Barriers
    shape: Shape

    def load(self, unit: Unit, number: jax.Array, step: jax.Array) -> None:
        inputs, buffers, barriers = self.inputs, self.buffers, self.barriers
        pl.when(number > 0)(lambda: plgpu.barrier_wait(barriers.q_free))
        for group in range(NUM_COMPUTE):
            token, head = place_of(unit, group, self.shape)
            source = inputs.q.at[pl.ds(token, ROWS), head]
            plgpu.copy_gmem_to_smem(source, buffers.q.at[group], barriers.q.at[group])

        def one(index: jax.Array, nothing: None) -> None:
            self._load_keys(unit, index, step + index)
            return nothing

        lax.fori_loop(0, unit.num_steps, one, None)
        self._load_self_part(unit, number)

    def _load_keys(self, unit: Unit, index: jax.Array, step: jax.Array) -> None:
        inputs, buffers, barriers, shape = self.inputs, self.buffers, self.barriers, self.shape
        slot, kv_head = slot_of(step), lax.div(unit.head, jnp.int32(shape.heads_per_kv))
        page = pl.ds(inputs.base[0] + inputs.addresses[unit.first_address + index], KEY_TILE)
        is_used = step >= NUM_SLOTS
        pl.when(is_used)(lambda: plgpu.barrier_wait(barriers.k_free.at[slot]))
        keys = inputs.k.at[page, shape.first_key + kv_head]
        plgpu.copy_gmem_to_smem(keys, buffers.k.at[slot], barriers.k.at[slot])
        pl.when(is_used)(lambda: plgpu.barrier_wait(barriers.v_free.at[slot]))
        values = inputs.v.at[page, shape.first_value + kv_head]
        plgpu.copy_gmem_to_smem(values, buffers.v.at[slot], barriers.v.at[slot])

    def _load_self_part(self, unit: Unit, number: jax.Array) -> None:
        inputs, buffers, barriers = self.inputs, self.buffers, self.barriers
        pl.when(number > 0)(lambda: plgpu.barrier_wait(barriers.out_free))
        for group in range(NUM_COMPUTE):
            token, head = place_of(unit, group, self.shape)
            tokens = pl.ds(token, ROWS)
            barrier = barriers.self_part.at[group]
            plgpu.copy_gmem_to_smem(inputs.self_out.at[tokens, head], buffers.out.at[group], barrier)
            plgpu.copy_gmem_to_smem(inputs.self_lse.at[head, tokens], buffers.lse.at[group], barrier)

    def drain(self, num_units: jax.Array, num_steps: jax.Array) -> None:
        """Wait for the last arrivals, so that every barrier ends as it began."""
        barriers = self.barriers
        for free in (barriers.q_free, barriers.out_free):
            pl.when(num_units > 0)(partial(plgpu.barrier_wait, free))
        for slot in range(NUM_SLOTS):
            for free in (barriers.k_free, barriers.v_free):
                pl.when(num_steps > slot)(partial(plgpu.barrier_wait, free.at[slot]))


@dataclass(frozen=True)
class ComputeWorker:
    """A warpgroup that computes."""

    inputs: Inputs
    out: Ref
    buffers: Buffers
    barriers: Barriers
    shape: Shape
    group: jax.Array

    def take_turns(self) -> None:
        self.end_turn()
        self.wait_for_turn()

    def end_turn(self) -> None:
        """Leave the tensor cores to the other warpgroup."""
        plgpu.barrier_arrive(self.barriers.turn)

    def wait_for_turn(self) -> None:
        plgpu.barrier_wait(self.barriers.turn)

    def compute(self, unit: Unit, number: jax.Array, step: jax.Array) -> None:
        del number
        num_steps, num_whole = unit.num_steps, lax.div(unit.num_read, jnp.int32(KEY_TILE))
        plgpu.barrier_wait(self.barriers.q.at[self.group])
        pl.when(num_steps > 0)(lambda: plgpu.barrier_wait(self.barriers.k.at[slot_of(step)]))
        whole = partial(self._step, unit=unit, first_step=step, is_whole=True)
        partly = partial(self._step, unit=unit, first_step=step, is_whole=False)
        state = lax.fori_loop(0, num_whole, whole, self._empty_state())
        state = lax.fori_loop(num_whole, num_steps, partly, state)
        # Before the rows are merged and written: the other warpgroup continues meanwhile.
        pl.when(num_steps > 0)(self.end_turn)
        pl.when(num_steps == 0)(lambda: plgpu.barrier_arrive(self.barriers.q_free))
        plgpu.barrier_wait(self.barriers.self_part.at[self.group])
        self._store(unit, self._merged(state))
        plgpu.barrier_arrive(self.barriers.out_free)

    def _empty_state(self) -> State:
        rows, wide = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
        out = jnp.zeros((ROWS, self.shape.head_size), jnp.float32)
        m_i, l_i = jnp.full(ROWS, -jnp.inf, jnp.float32), jnp.zeros(ROWS, jnp.float32)
        return self._laid_out(out, wide), self._laid_out(m_i, rows), self._laid_out(l_i, rows)

    def _laid_out(self, array: jax.Array, layout: Any) -> jax.Array:
        return array if self.shape.is_interpreted else plgpu.layout_cast(array, layout)

    def _step(self, index: jax.Array, state: State, *, unit: Unit, first_step: jax.Array, is_whole: bool) -> State:
        """One key tile into the online softmax. Every row sees at least its first key."""
        out, m_i, l_i = state
        barriers, slot = self.barriers, slot_of(first_step + index)
        count = unit.num_read - index * KEY_TILE
        if not is_whole:
            self._clean_values(slot, count)
        scores = self._scores(slot, is_first=index == 0)
        plgpu.barrier_arrive(barriers.k_free.at[slot])
        # As soon as the queries were read for the last time: the next unit's are copied while this one ends.
        pl.when(index + 1 == unit.num_steps)(lambda: plgpu.barrier_arrive(barriers.q_free))
        if not is_whole:
            column = self._laid_out(lax.broadcasted_iota(jnp.int32, scores.shape, 1), plgpu.Layout.WGMMA)
            scores = jnp.where(column < count, scores, -jnp.inf)
        factor = LOG2_E / math.sqrt(self.shape.head_size)
        m_new = jnp.maximum(m_i, scores.max(axis=1) * factor)
        alpha = jnp.exp2(m_i - m_new)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(m_new, scores.shape, [0]))
        out = out * lax.broadcast_in_dim(alpha, out.shape, [0])
        l_i = l_i * alpha + weights.sum(axis=1)
        rounded = weights.astype(self.buffers.v.dtype)
        out, l_i, m_new, rounded = lax.optimization_barrier((out, l_i, m_new, rounded))
        self.end_turn()  # done with the softmax
        if is_whole:
            plgpu.barrier_wait(barriers.v.at[slot])
        self.wait_for_turn()  # until the tensor cores are free
        if not is_whole:
            pl.when(self.group == 1)(lambda: plgpu.barrier_wait(barriers.cleaned.at[slot]))

        def wait_for_next() -> None:
            following = barriers.k.at[slot_of(first_step + index + 1)]
            pl.when(index + 1 < unit.num_steps)(lambda: plgpu.barrier_wait(following))

        out = self._add_values(out, rounded, slot, wait_for_next)
        plgpu.barrier_arrive(barriers.v_free.at[slot])
        return out, m_new, l_i

    def _scores(self, slot: jax.Array, *, is_first: jax.Array) -> jax.Array:
        """[R, C] float32. The turn before a unit's first step ended with the unit before it."""
        q, keys = self.buffers.q.at[self.group], self.buffers.k.at[slot]
        if self.shape.is_interpreted:
            scores = jnp.dot(q[...], keys[...].T, preferred_element_type=jnp.float32)
            pl.when(jnp.logical_not(is_first))(self.end_turn)
            self.wait_for_turn()
            return scores

        def multiply(scores: Ref) -> jax.Array:
            plgpu.wgmma(scores, q, keys.transpose((1, 0)))
            pl.when(jnp.logical_not(is_first))(self.end_turn)
            self.wait_for_turn()
            found: jax.Array = scores[...]
            return found

        found: jax.Array = pl.run_scoped(multiply, _Accumulator((ROWS, KEY_TILE), jnp.float32))
        return found

    def _add_values(self, out: jax.Array, weights: jax.Array, slot: jax.Array, meanwhile: Callable[[], None]) -> Any:
        """out [R, H] + weights [R, C] times the values of a slot."""
        values = self.buffers.v.at[slot]
        if self.shape.is_interpreted:
            meanwhile()
            return out + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)

        def multiply(accumulator: Ref) -> None:
            plgpu.wgmma(accumulator, weights, values)
            meanwhile()

        return pl.run_state(multiply)(_Accumulator.init(out))

    def _clean_values(self, slot: jax.Array, count: jax.Array) -> None:
        """Zero the values behind `count`; the first warpgroup does it for both."""
        plgpu.barrier_wait(self.barriers.v.at[slot])

        @pl.when(self.group == 0)
        def _clean() -> None:
            for first in range(0, KEY_TILE, ROWS):
                values = self.buffers.v.at[slot, pl.ds(first, ROWS)]
                found = self._laid_out(values[...], plgpu.Layout.WGMMA)
                row = self._laid_out(lax.broadcasted_iota(jnp.int32, found.shape, 0), plgpu.Layout.WGMMA)
                values[...] = jnp.where(first + row < count, found, jnp.zeros_like(found))
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.barriers.cleaned.at[slot])

    def _merged(self, state: State) -> jax.Array:
        """[R, H]: the prefix part and the self part merged by LSE, in the dtype of the queries."""
        out, m_i, l_i = state
        self_out = self._laid_out(self.buffers.out.at[self.group][...], plgpu.Layout.WGMMA).astype(jnp.float32)
        lse = self._laid_out(self.buffers.lse.at[self.group][...], plgpu.Layout.WGMMA.reduce(1))
        m_both = jnp.maximum(m_i, lse)
        weight, self_weight = jnp.exp2(m_i - m_both), jnp.exp2(lse - m_both)
        share = 1 / (l_i * weight + self_weight)
        prefix_share = lax.broadcast_in_dim(weight * share, out.shape, [0])
        self_share = lax.broadcast_in_dim(self_weight * share, out.shape, [0])
        return (out * prefix_share + self_out * self_share).astype(self.out.dtype)

    def _store(self, unit: Unit, rows: jax.Array) -> None:
        """Store a whole tile by one copy, and a partial one row by row, since the rows beside it are another tile's."""
        token, head = place_of(unit, self.group, self.shape)
        first, stop = jnp.maximum(unit.start - token, 0), jnp.minimum(unit.start + unit.length - token, ROWS)
        is_whole = (first == 0) & (stop == ROWS)
        buffer, by_row = self.buffers.out.at[self.group], self.buffers.rows.at[self.group]

        @pl.when(is_whole)
        def _whole() -> None:
            buffer[...] = rows
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, self.out.at[pl.ds(token, ROWS), head])

        @pl.when(jnp.logical_not(is_whole))
        def _partly() -> None:
            by_row[...] = rows
            plgpu.commit_smem()

            def store(row: jax.Array, nothing: None) -> None:
                plgpu.copy_smem_to_gmem(by_row.at[row], self.out.at[token + row, head])
                return nothing

            lax.fori_loop(first, stop, store, None)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
