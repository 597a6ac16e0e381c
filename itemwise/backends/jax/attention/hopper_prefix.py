"""The prefix part of attention on Hopper GPUs (H100, H200): one Mosaic GPU kernel, after FlashAttention-3.

A block of threads is three warpgroups. One copies keys and values from the pages of the pool into shared memory, two
blocks ahead; the other two compute, each on 64 rows, and take turns: while one multiplies, the other is at its softmax.
Blocks of threads stay and take every so-many-th *unit* of work, so that the next unit's queries are under way while
this one's rows are written:

    unit = tile of tokens that read the same tokens of one prefix x one query head, or two of one KV head

Every key block is a page, copied by one instruction, as are the queries of a tile: copies begin at multiples of eight
tokens, so a tile may have rows at its edges that are another's, which are computed and not written. The own part
(`own_gpu.py`) was computed before; it is merged at a unit's end by the log-sum-exps. A row's arithmetic follows from
its query and its prefix alone: key blocks are counted from the prefix's start, and no sum is split.

Keys of a last, partly filled block are masked, and its values are set to zero in shared memory: what lies there may be
anybody's, NaN included.

In the kernel: `R` = 64 rows of a warpgroup, `C` = KEY_BLOCK keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from itemwise.backends.layout.tiles import KEY_BLOCK, PREFIX

ROWS = 64  # of a warpgroup: a side of its products
ALIGNMENT = 8  # tokens: copies begin at a multiple of so many
NUM_COMPUTE = 2  # warpgroups that compute
NUM_SLOTS = 2  # key blocks in shared memory
NUM_BLOCKS = 132  # of threads: one for each multiprocessor of an H100 or H200
COMPUTE_REGISTERS, COPY_REGISTERS = 232, 40
LOG2_E = math.log2(math.e)

Ref = Any  # Pallas has no public type for references
_Accumulator: Any = plgpu.ACC  # type: ignore[attr-defined]  # public, by a way that type checkers do not see


class Inputs(NamedTuple):
    """References in device memory, in the order of the kernel's arguments."""

    counts: Ref  # [3] int32
    starts: Ref  # [tiles] int32: first token
    lens: Ref  # [tiles] int32: tokens
    reads: Ref  # [tiles] int32: prefix tokens that each of them reads
    lists: Ref  # [tiles] int32: where the prefix's blocks begin in `addresses`
    addresses: Ref  # [blocks] int32
    base: Ref  # [1] int32, added to every address
    q: Ref  # [T, heads, H], the query heads first
    k: Ref  # [A, heads, H], KV heads from `Shape.first_key` on
    v: Ref  # [A, heads, H], KV heads from `Shape.first_value` on
    own: Ref  # [T, N, H]
    own_lse: Ref  # [N, T] float32, base 2


class Buffers(NamedTuple):
    """In shared memory, `W` = NUM_COMPUTE."""

    q: Ref  # [W, R, H]
    out: Ref  # [W, R, H]: the own part comes in here, and what is merged goes out
    rows: Ref  # [W, R, H], row after row, for tiles that are not whole
    lse: Ref  # [W, R] float32
    k: Ref  # [NUM_SLOTS, C, H]
    v: Ref  # [NUM_SLOTS, C, H]


class Barriers(NamedTuple):
    """Who waits for whom."""

    q: Ref  # [W]: queries have come
    own: Ref  # [W]: the own part and its log-sum-exps have come
    k: Ref  # [NUM_SLOTS]: keys have come
    v: Ref  # [NUM_SLOTS]
    q_free: Ref  # both have read their queries
    out_free: Ref  # both have written their rows
    k_free: Ref  # [NUM_SLOTS]: both have read the keys
    v_free: Ref  # [NUM_SLOTS]
    turn: Ref  # the two that compute take turns at the tensor cores
    cleaned: Ref  # [NUM_SLOTS]: the first has set values to zero that the second is to read, too


@dataclass(frozen=True)
class Shape:
    """What is fixed when the kernel is compiled."""

    num_heads: int  # N
    heads_per_kv: int  # G
    head_size: int  # H
    first_key: int  # head of `k` that is the first KV head's
    first_value: int  # head of `v`
    num_blocks: int  # of threads
    is_interpreted: bool  # the interpreter has no layouts, and multiplies in its own way

    @property
    def heads_per_unit(self) -> int:
        """Two heads that read the same keys share a unit where there are such."""
        return NUM_COMPUTE if self.heads_per_kv % NUM_COMPUTE == 0 else 1


def tile_tokens(heads_per_kv: int) -> int:
    """Tokens of a tile: the warpgroups have a head each, or one head and half of the tokens each."""
    return ROWS if heads_per_kv % NUM_COMPUTE == 0 else NUM_COMPUTE * ROWS


class Unit(NamedTuple):
    """A piece of work; int32 scalars."""

    start: jax.Array  # first token
    length: jax.Array  # tokens
    num_read: jax.Array  # prefix tokens
    first_address: jax.Array  # in `Inputs.addresses`
    head: jax.Array  # first query head

    @property
    def num_steps(self) -> jax.Array:
        return lax.div(self.num_read + (KEY_BLOCK - 1), jnp.int32(KEY_BLOCK))


def prefix_attention(inputs: Inputs, shape: Shape, interpret: Any = None) -> jax.Array:
    """[T, N, H]: both parts, merged. `inputs` are arrays; every token must be in a tile."""
    q, own = inputs.q, inputs.own
    buffers = _buffers(q.dtype, shape)

    def entry(*refs: Ref) -> None:
        *in_refs, out = refs
        pl.run_scoped(
            lambda b, s: _kernel(Inputs(*in_refs), out, Buffers(*b), Barriers(*s), shape),
            tuple(buffers),
            tuple(_barriers()),
            collective_axes="wg",
        )

    out: jax.Array = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(own.shape, own.dtype),
        grid=(shape.num_blocks,),
        grid_names=("block",),
        num_threads=NUM_COMPUTE + 1,
        thread_name="wg",
        compiler_params=_compiler_params(),
        **({} if interpret is None else {"interpret": interpret}),
    )(*inputs)
    return out


def _compiler_params() -> plgpu.CompilerParams:
    """Nothing here is summed across warps, so hardly any of the shared memory need be kept for that."""
    return plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=512, lowering_semantics=plgpu.LoweringSemantics.Lane
    )


def _buffers(dtype: Any, shape: Shape) -> Buffers:
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    rows = (NUM_COMPUTE, ROWS, shape.head_size)
    keys = (NUM_SLOTS, KEY_BLOCK, shape.head_size)
    return Buffers(
        q=plgpu.SMEM(rows, dtype, transforms=swizzled),
        out=plgpu.SMEM(rows, dtype, transforms=swizzled),
        rows=plgpu.SMEM(rows, dtype),
        lse=plgpu.SMEM(rows[:2], jnp.float32),
        k=plgpu.SMEM(keys, dtype, transforms=swizzled),
        v=plgpu.SMEM(keys, dtype, transforms=swizzled),
    )


def _barriers() -> Barriers:
    both = partial(plgpu.Barrier, num_arrivals=NUM_COMPUTE)
    return Barriers(
        q=plgpu.Barrier(num_barriers=NUM_COMPUTE),
        own=plgpu.Barrier(num_arrivals=2, num_barriers=NUM_COMPUTE),  # two copies
        k=plgpu.Barrier(num_barriers=NUM_SLOTS),
        v=plgpu.Barrier(num_barriers=NUM_SLOTS),
        q_free=both(),
        out_free=both(),
        k_free=both(num_barriers=NUM_SLOTS),
        v_free=both(num_barriers=NUM_SLOTS),
        turn=both(),
        cleaned=plgpu.Barrier(num_barriers=NUM_SLOTS),
    )


def _kernel(inputs: Inputs, out: Ref, buffers: Buffers, barriers: Barriers, shape: Shape) -> None:
    group = lax.axis_index("wg")

    @pl.when(group < NUM_COMPUTE)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        worker = _Compute(inputs, out, buffers, barriers, shape, group)
        pl.when(group == 1)(worker.take_turns)  # half a step behind the other
        worker.end_turn()
        _for_each_unit(inputs, shape, worker.compute)
        worker.wait_for_turn()
        pl.when(group == 0)(worker.take_turns)

    @pl.when(group == NUM_COMPUTE)
    def _copy() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        worker = _Copy(inputs, buffers, barriers, shape)
        worker.wait_for_the_last(*_for_each_unit(inputs, shape, worker.load))


def _for_each_unit(
    inputs: Inputs, shape: Shape, function: Callable[[Unit, jax.Array, jax.Array], None]
) -> tuple[jax.Array, jax.Array]:
    """`function` of every unit of this block of threads, its number, and how many key blocks went before it.

    Returns the number of units, and of all their key blocks. A unit is looked up while the one before it is worked at.
    """
    per_tile, capacity = shape.num_heads // shape.heads_per_unit, len(inputs.starts)
    block = lax.axis_index("block")

    def look_up(number: jax.Array) -> Unit:
        index = block + number * shape.num_blocks
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
    num_units = lax.div(total - block + (shape.num_blocks - 1), jnp.int32(shape.num_blocks))
    num_steps, _ = lax.fori_loop(0, num_units, one, (jnp.int32(0), first))
    return num_units, num_steps


def _slot(step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(NUM_SLOTS))


def _place(unit: Unit, group: Any, shape: Shape) -> tuple[Any, Any]:
    """First token and head of a warpgroup's rows."""
    window = lax.div(unit.start, jnp.int32(ALIGNMENT)) * ALIGNMENT
    if not shape.is_interpreted:
        window = pl.multiple_of(window, ALIGNMENT)
    if shape.heads_per_unit == NUM_COMPUTE:
        return window, unit.head + group
    return window + group * ROWS, unit.head


@dataclass(frozen=True)
class _Copy:
    """The warpgroup that fills shared memory."""

    inputs: Inputs
    buffers: Buffers
    barriers: Barriers
    shape: Shape

    def load(self, unit: Unit, number: jax.Array, step: jax.Array) -> None:
        inputs, buffers, barriers = self.inputs, self.buffers, self.barriers
        pl.when(number > 0)(lambda: plgpu.barrier_wait(barriers.q_free))
        for group in range(NUM_COMPUTE):
            token, head = _place(unit, group, self.shape)
            source = inputs.q.at[pl.ds(token, ROWS), head]
            plgpu.copy_gmem_to_smem(source, buffers.q.at[group], barriers.q.at[group])

        def one(index: jax.Array, nothing: None) -> None:
            self._load_keys(unit, index, step + index)
            return nothing

        lax.fori_loop(0, unit.num_steps, one, None)
        self._load_own(unit, number)

    def _load_keys(self, unit: Unit, index: jax.Array, step: jax.Array) -> None:
        inputs, buffers, barriers, shape = self.inputs, self.buffers, self.barriers, self.shape
        slot, kv_head = _slot(step), lax.div(unit.head, jnp.int32(shape.heads_per_kv))
        block = pl.ds(inputs.base[0] + inputs.addresses[unit.first_address + index], KEY_BLOCK)
        is_used = step >= NUM_SLOTS
        pl.when(is_used)(lambda: plgpu.barrier_wait(barriers.k_free.at[slot]))
        keys = inputs.k.at[block, shape.first_key + kv_head]
        plgpu.copy_gmem_to_smem(keys, buffers.k.at[slot], barriers.k.at[slot])
        pl.when(is_used)(lambda: plgpu.barrier_wait(barriers.v_free.at[slot]))
        values = inputs.v.at[block, shape.first_value + kv_head]
        plgpu.copy_gmem_to_smem(values, buffers.v.at[slot], barriers.v.at[slot])

    def _load_own(self, unit: Unit, number: jax.Array) -> None:
        inputs, buffers, barriers = self.inputs, self.buffers, self.barriers
        pl.when(number > 0)(lambda: plgpu.barrier_wait(barriers.out_free))
        for group in range(NUM_COMPUTE):
            token, head = _place(unit, group, self.shape)
            tokens = pl.ds(token, ROWS)
            barrier = barriers.own.at[group]
            plgpu.copy_gmem_to_smem(inputs.own.at[tokens, head], buffers.out.at[group], barrier)
            plgpu.copy_gmem_to_smem(inputs.own_lse.at[head, tokens], buffers.lse.at[group], barrier)

    def wait_for_the_last(self, num_units: jax.Array, num_steps: jax.Array) -> None:
        """Every barrier is left as it was found: with nothing that was not waited for."""
        barriers = self.barriers
        for free in (barriers.q_free, barriers.out_free):
            pl.when(num_units > 0)(partial(plgpu.barrier_wait, free))
        for slot in range(NUM_SLOTS):
            for free in (barriers.k_free, barriers.v_free):
                pl.when(num_steps > slot)(partial(plgpu.barrier_wait, free.at[slot]))


State = tuple[jax.Array, jax.Array, jax.Array]  # output [R, H], peak [R] and total [R], of an online softmax, base 2


@dataclass(frozen=True)
class _Compute:
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
        """Leave the tensor cores to the other one."""
        plgpu.barrier_arrive(self.barriers.turn)

    def wait_for_turn(self) -> None:
        plgpu.barrier_wait(self.barriers.turn)

    def compute(self, unit: Unit, number: jax.Array, step: jax.Array) -> None:
        del number
        num_steps, num_whole = unit.num_steps, lax.div(unit.num_read, jnp.int32(KEY_BLOCK))
        plgpu.barrier_wait(self.barriers.q.at[self.group])
        pl.when(num_steps > 0)(lambda: plgpu.barrier_wait(self.barriers.k.at[_slot(step)]))
        whole = partial(self._step, unit=unit, first_step=step, is_whole=True)
        partly = partial(self._step, unit=unit, first_step=step, is_whole=False)
        state = lax.fori_loop(0, num_whole, whole, self._empty_state())
        state = lax.fori_loop(num_whole, num_steps, partly, state)
        # Before the rows are merged and written: the other one goes on meanwhile.
        pl.when(num_steps > 0)(self.end_turn)
        pl.when(num_steps == 0)(lambda: plgpu.barrier_arrive(self.barriers.q_free))
        plgpu.barrier_wait(self.barriers.own.at[self.group])
        self._store(unit, self._merged(state))
        plgpu.barrier_arrive(self.barriers.out_free)

    def _empty_state(self) -> State:
        rows, wide = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA
        out = jnp.zeros((ROWS, self.shape.head_size), jnp.float32)
        peak, total = jnp.full(ROWS, -jnp.inf, jnp.float32), jnp.zeros(ROWS, jnp.float32)
        return self._laid_out(out, wide), self._laid_out(peak, rows), self._laid_out(total, rows)

    def _laid_out(self, array: jax.Array, layout: Any) -> jax.Array:
        return array if self.shape.is_interpreted else plgpu.layout_cast(array, layout)

    def _step(self, index: jax.Array, state: State, *, unit: Unit, first_step: jax.Array, is_whole: bool) -> State:
        """One key block into the online softmax. Every row sees at least its first key."""
        out, peak, total = state
        barriers, slot = self.barriers, _slot(first_step + index)
        count = unit.num_read - index * KEY_BLOCK
        if not is_whole:
            self._clean_values(slot, count)
        scores = self._scores(slot, is_first=index == 0)
        plgpu.barrier_arrive(barriers.k_free.at[slot])
        # As soon as they were read for the last time: the next unit's are on their way while this one ends.
        pl.when(index + 1 == unit.num_steps)(lambda: plgpu.barrier_arrive(barriers.q_free))
        if not is_whole:
            column = self._laid_out(lax.broadcasted_iota(jnp.int32, scores.shape, 1), plgpu.Layout.WGMMA)
            scores = jnp.where(column < count, scores, -jnp.inf)
        factor = LOG2_E / math.sqrt(self.shape.head_size)
        new_peak = jnp.maximum(peak, scores.max(axis=1) * factor)
        shrink = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
        out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
        total = total * shrink + weights.sum(axis=1)
        rounded = weights.astype(self.buffers.v.dtype)
        out, total, new_peak, rounded = lax.optimization_barrier((out, total, new_peak, rounded))
        self.end_turn()  # done with the softmax
        if is_whole:
            plgpu.barrier_wait(barriers.v.at[slot])
        self.wait_for_turn()  # until the tensor cores are free
        if not is_whole:
            pl.when(self.group == 1)(lambda: plgpu.barrier_wait(barriers.cleaned.at[slot]))

        def wait_for_next() -> None:
            following = barriers.k.at[_slot(first_step + index + 1)]
            pl.when(index + 1 < unit.num_steps)(lambda: plgpu.barrier_wait(following))

        out = self._add_values(out, rounded, slot, wait_for_next)
        plgpu.barrier_arrive(barriers.v_free.at[slot])
        return out, new_peak, total

    def _scores(self, slot: jax.Array, *, is_first: jax.Array) -> jax.Array:
        """[R, C] float32. The turn before a unit's first step was ended with the unit before it."""
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

        found: jax.Array = pl.run_scoped(multiply, _Accumulator((ROWS, KEY_BLOCK), jnp.float32))
        return found

    def _add_values(self, out: jax.Array, weights: jax.Array, slot: jax.Array, meanwhile: Callable[[], None]) -> Any:
        """out [R, H] + weights [R, C] times the values of a slot."""
        values = self.buffers.v.at[slot]
        if self.shape.is_interpreted:
            meanwhile()
            return out + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)

        def multiply(total: Ref) -> None:
            plgpu.wgmma(total, weights, values)
            meanwhile()

        return pl.run_state(multiply)(_Accumulator.init(out))

    def _clean_values(self, slot: jax.Array, count: jax.Array) -> None:
        """Zeros for the values beyond `count`; the first warpgroup does it for both."""
        plgpu.barrier_wait(self.barriers.v.at[slot])

        @pl.when(self.group == 0)
        def _clean() -> None:
            for first in range(0, KEY_BLOCK, ROWS):
                values = self.buffers.v.at[slot, pl.ds(first, ROWS)]
                found = self._laid_out(values[...], plgpu.Layout.WGMMA)
                row = self._laid_out(lax.broadcasted_iota(jnp.int32, found.shape, 0), plgpu.Layout.WGMMA)
                values[...] = jnp.where(first + row < count, found, jnp.zeros_like(found))
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.barriers.cleaned.at[slot])

    def _merged(self, state: State) -> jax.Array:
        """[R, H]: the prefix part with the own part, in the dtype of the queries."""
        out, peak, total = state
        own = self._laid_out(self.buffers.out.at[self.group][...], plgpu.Layout.WGMMA).astype(jnp.float32)
        lse = self._laid_out(self.buffers.lse.at[self.group][...], plgpu.Layout.WGMMA.reduce(1))
        highest = jnp.maximum(peak, lse)
        weight, own_weight = jnp.exp2(peak - highest), jnp.exp2(lse - highest)
        share = 1 / (total * weight + own_weight)
        prefix_share = lax.broadcast_in_dim(weight * share, out.shape, [0])
        own_share = lax.broadcast_in_dim(own_weight * share, out.shape, [0])
        return (out * prefix_share + own * own_share).astype(self.out.dtype)

    def _store(self, unit: Unit, rows: jax.Array) -> None:
        """A whole tile by one copy; of another one each row, since those beside it are another tile's."""
        token, head = _place(unit, self.group, self.shape)
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
