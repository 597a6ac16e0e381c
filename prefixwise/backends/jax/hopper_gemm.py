"""The MLP's first GEMM on Hopper GPUs (H100, H200), one Mosaic GPU kernel: activation(gate) * up.

A CTA is three warpgroups. One copies tiles of x and of the weights to shared memory, NUM_BUFFERS steps ahead, also into
the next tile. The other two multiply, each half of a tile's rows, by the same columns of gate and of up. So a thread
has both, and gate and up themselves never leave the multiprocessor. While one activates, the other multiplies.

CTAs are persistent. The kernel reads the weights of all layers, and the layer's number is data: XLA copies a layer's
matrix before a GEMM of a library.

A row's bits depend neither on its place nor on the number of rows: an element is summed over k in order, in float32, by
one accumulator. Roundings are those of a GEMM and `linear.activate`.

In the kernel: `R` = 64 rows of a warpgroup, `C` = 128 columns of gate, and of up, in a tile, `S` = 64 columns of x in a
step, `P` = 64 columns of the output in a part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from prefixwise.models.config import Activation

ROWS, COLUMNS, STEP = 64, 128, 64  # R, C, S
NUM_COMPUTE = 2  # warpgroups that multiply
TILE_ROWS = NUM_COMPUTE * ROWS
NUM_BUFFERS = 4  # steps in shared memory
PART = 64  # P
NUM_PARTS = COLUMNS // PART  # of a tile
BAND_TILES = 16  # rows of tiles that share the weights' columns before the next ones' turn
COMPUTE_REGISTERS, COPY_REGISTERS = 240, 24
NUM_CTAS = 132  # one for each multiprocessor of an H100 or H200
_INTERPRETED_CTAS = 2
LOG2_E = math.log2(math.e)
GELU_FACTOR, GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715

_LAYOUT: Any = plgpu.Layout.WGMMA
_Accumulator: Any = plgpu.ACC  # type: ignore[attr-defined]  # public, but hidden from type checkers
Ref = Any  # Pallas has no public type for references


class Buffers(NamedTuple):
    """In shared memory."""

    x: Ref  # [NUM_BUFFERS, 2 R, S]
    weight: Ref  # [NUM_BUFFERS, 2 C, S], gate and then up
    out: Ref  # [NUM_COMPUTE, NUM_PARTS, R, P]
    sums: Ref  # [NUM_COMPUTE, R, 2 C] float32, of the interpreter, whose WGMMA cannot transpose; else None


class Barriers(NamedTuple):
    """[NUM_BUFFERS] each."""

    loaded: Ref
    free: Ref  # both groups have multiplied it


class Place(NamedTuple):
    """Of a tile; int32 scalars."""

    row: jax.Array
    column: jax.Array  # of the result


@dataclass(frozen=True)
class Shape:
    """Sizes and choices that are fixed when the kernel is compiled."""

    num_rows: int  # T
    num_columns: int  # F
    inner: int  # D
    activation: Activation
    is_interpreted: bool  # the interpreter has no layouts

    @property
    def num_row_tiles(self) -> int:
        return self.num_rows // TILE_ROWS

    @property
    def num_column_tiles(self) -> int:
        return self.num_columns // COLUMNS

    @property
    def num_tiles(self) -> int:
        return self.num_row_tiles * self.num_column_tiles

    @property
    def num_ctas(self) -> int:
        return min(self.num_tiles, _INTERPRETED_CTAS if self.is_interpreted else NUM_CTAS)

    @property
    def num_steps(self) -> int:
        """Of a tile."""
        return self.inner // STEP

    def place(self, number: jax.Array) -> Place:
        """Of this CTA's tile. Tiles go down the columns of a band, then to the next band: CTAs that run at the same
        time share rows and columns, so these come from the GPU's cache."""
        tile = lax.axis_index("cta") + number * self.num_ctas
        band_size = BAND_TILES * self.num_column_tiles
        first, in_band = lax.div(tile, band_size) * BAND_TILES, lax.rem(tile, band_size)
        height = jnp.minimum(self.num_row_tiles - first, BAND_TILES)
        return Place((first + lax.rem(in_band, height)) * TILE_ROWS, lax.div(in_band, height) * COLUMNS)

    def num_own_tiles(self) -> jax.Array:
        """Of this CTA; every CTA has one."""
        return lax.div(self.num_tiles - 1 - lax.axis_index("cta"), self.num_ctas) + 1


def gated_gemm(
    x: jax.Array, weights: jax.Array, layer: jax.Array, activation: Activation, interpret: Any = None
) -> jax.Array:
    """x [T, D] times one layer of weights [L, 2 F, D], gate and then up, to activation(gate) * up [T, F]. `interpret`
    (parameters of Pallas) interprets the kernel on any device, for tests."""
    num_rows, inner = x.shape
    assert num_rows % TILE_ROWS == 0, "rows behind the last whole tile would not be written"
    shape = Shape(num_rows, weights.shape[1] // 2, inner, activation, interpret is not None)

    def entry(number: Ref, x: Ref, weights: Ref, out: Ref) -> None:
        pl.run_scoped(
            lambda b, s: _kernel(number, x, weights, out, Buffers(*b), Barriers(*s), shape),
            tuple(_buffers(x.dtype, shape)),
            tuple(_barriers()),
            collective_axes="wg",
        )

    out: jax.Array = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((num_rows, shape.num_columns), x.dtype),
        grid=(shape.num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(layer.reshape(1), x, weights)
    return out


def _buffers(dtype: Any, shape: Shape) -> Buffers:
    def swizzled(num_columns: int) -> Any:
        num_bytes = num_columns * jnp.dtype(dtype).itemsize
        return plgpu.TilingTransform((8, num_columns)), plgpu.SwizzleTransform(num_bytes)

    return Buffers(
        x=plgpu.SMEM((NUM_BUFFERS, TILE_ROWS, STEP), dtype, transforms=swizzled(STEP)),
        weight=plgpu.SMEM((NUM_BUFFERS, 2 * COLUMNS, STEP), dtype, transforms=swizzled(STEP)),
        out=plgpu.SMEM((NUM_COMPUTE, NUM_PARTS, ROWS, PART), dtype, transforms=swizzled(PART)),
        sums=plgpu.SMEM((NUM_COMPUTE, ROWS, 2 * COLUMNS), jnp.float32) if shape.is_interpreted else None,
    )


def _barriers() -> Barriers:
    return Barriers(
        loaded=plgpu.Barrier(num_arrivals=3, num_barriers=NUM_BUFFERS),  # three copies
        free=plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=NUM_BUFFERS),
    )


def _kernel(
    number: Ref,  # [1] int32, of the layer
    x: Ref,  # [T, D]
    weights: Ref,  # [L, 2 F, D]
    out: Ref,  # [T, F]
    buffers: Buffers,
    barriers: Barriers,
    shape: Shape,
) -> None:
    group = lax.axis_index("wg")

    @pl.when(group < NUM_COMPUTE)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        ComputeWorker(out, buffers, barriers, shape, group).compute()

    @pl.when(group == NUM_COMPUTE)
    def _copy() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        _load_tiles(number[0], x, weights, buffers, barriers, shape)


def _load_tiles(layer: jax.Array, x: Ref, weights: Ref, buffers: Buffers, barriers: Barriers, shape: Shape) -> None:
    """Copy every step of every tile, in order."""

    def load(number: jax.Array, nothing: None) -> None:
        place = shape.place(number)

        def one(index: jax.Array, nothing: None) -> None:
            step = number * shape.num_steps + index
            slot, columns = _slot_of(step), pl.ds(index * STEP, STEP)
            pl.when(step >= NUM_BUFFERS)(lambda: plgpu.barrier_wait(barriers.free.at[slot]))
            loaded = barriers.loaded.at[slot]
            plgpu.copy_gmem_to_smem(x.at[pl.ds(place.row, TILE_ROWS), columns], buffers.x.at[slot], loaded)
            for half in range(2):
                source = weights.at[layer, pl.ds(place.column + half * shape.num_columns, COLUMNS), columns]
                target = buffers.weight.at[slot, pl.ds(half * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, target, loaded)
            return nothing

        return lax.fori_loop(0, shape.num_steps, one, nothing)

    lax.fori_loop(0, shape.num_own_tiles(), load, None)
    for slot in range(NUM_BUFFERS):  # so that every barrier ends as it began; a tile has more steps than that
        plgpu.barrier_wait(barriers.free.at[slot])


def _slot_of(step: jax.Array) -> jax.Array:
    """The slot in shared memory of this step."""
    return lax.rem(step, jnp.int32(NUM_BUFFERS))


@dataclass(frozen=True)
class ComputeWorker:
    """A warpgroup that multiplies."""

    out: Ref
    buffers: Buffers
    barriers: Barriers
    shape: Shape
    group: jax.Array

    def compute(self) -> None:
        """All tiles of this CTA."""

        def one(number: jax.Array, nothing: None) -> None:
            place, rounded = self.shape.place(number), self._multiply(number)
            for part in range(NUM_PARTS):
                self._store_part(place, rounded, part)
            return nothing

        lax.fori_loop(0, self.shape.num_own_tiles(), one, None)
        plgpu.wait_smem_to_gmem(0)

    def _multiply(self, number: jax.Array) -> jax.Array:
        """[R, 2 C] of a tile, gate and up, rounded."""
        first, last = number * self.shape.num_steps, (number + 1) * self.shape.num_steps - 1

        def multiply(sums: Ref) -> jax.Array:
            if self.shape.is_interpreted:
                sums[...] = jnp.zeros(sums.shape, sums.dtype)
            self._begin_step(sums, first)

            def one(step: jax.Array, nothing: None) -> None:
                self._begin_step(sums, step)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(self.barriers.free.at[_slot_of(step - 1)])
                return nothing

            lax.fori_loop(first + 1, last + 1, one, None)
            found = sums[...]
            plgpu.barrier_arrive(self.barriers.free.at[_slot_of(last)])
            return found.astype(self.out.dtype)

        if self.shape.is_interpreted:
            return multiply(self.buffers.sums.at[self.group])
        rounded: jax.Array = pl.run_scoped(multiply, _Accumulator((ROWS, 2 * COLUMNS), jnp.float32))
        return rounded

    def _begin_step(self, sums: Ref, step: jax.Array) -> None:
        """Begin to add the products of a step."""
        slot = _slot_of(step)
        plgpu.barrier_wait(self.barriers.loaded.at[slot])
        rows, columns = self.buffers.x.at[slot, pl.ds(self.group * ROWS, ROWS)], self.buffers.weight.at[slot]
        if self.shape.is_interpreted:
            sums[...] += jnp.dot(rows[...], columns[...].T, preferred_element_type=jnp.float32)
        else:
            plgpu.wgmma(sums, rows, columns.transpose((1, 0)))

    def _store_part(self, place: Place, rounded: jax.Array, part: int) -> None:
        """Some columns of a tile, activated, to `out`."""
        first = part * PART
        gate, up = rounded[:, first : first + PART], rounded[:, COLUMNS + first : COLUMNS + first + PART]
        buffer = self.buffers.out.at[self.group, part]
        plgpu.wait_smem_to_gmem(NUM_PARTS - 1, wait_read_only=True)  # what was in this buffer
        buffer[...] = self._activate(gate) * up
        plgpu.commit_smem()
        rows, columns = pl.ds(place.row + self.group * ROWS, ROWS), pl.ds(place.column + first, PART)
        plgpu.copy_smem_to_gmem(buffer, self.out.at[rows, columns])

    def _activate(self, gate: jax.Array) -> jax.Array:
        """Both activations are x * sigmoid(y): tanh(y / 2) is 2 * sigmoid(y) - 1."""
        wide = gate.astype(jnp.float32)
        if self.shape.activation == "silu":
            exponent = wide * -LOG2_E
        else:
            exponent = (wide + GELU_CUBIC * (wide * wide * wide)) * (-LOG2_E * GELU_FACTOR)
        return (wide * self._reciprocal(1 + jnp.exp2(exponent))).astype(gate.dtype)

    def _reciprocal(self, x: jax.Array) -> jax.Array:
        """One instruction, where a division takes many."""
        if self.shape.is_interpreted:
            return 1 / x

        def reciprocal(_: Any, values: Any) -> Any:
            return values._pointwise(values._lift_fast_instr("rcp.approx.f32"))

        result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_LAYOUT)
        found: jax.Array = plgpu.inline_mgpu(arg_types=(_LAYOUT,), return_type=result)(reciprocal)(x)
        return found
