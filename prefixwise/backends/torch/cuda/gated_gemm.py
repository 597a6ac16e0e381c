"""The MLP's first GEMM and its activation in one kernel, for NVIDIA's Hopper, in Gluon: activation(gate) * up.

One warp loads tiles of x and of the weight, which holds gate and up one above the other; groups of four warps each
multiply some of a tile's rows. An accumulator holds the same columns of gate and up side by side, so a thread has both
and writes their product: gate and up themselves never leave the multiprocessor. Programs are persistent, and the
loading warp runs ahead into the next tile.

The activation takes as long as two or three steps of a GEMM. So a group may defer it: it rounds its accumulator and
starts the next tile, and activates while the matrix units work on that.

A row's bits depend neither on its place nor on the number of rows: an element is summed over k in order, 16 at a time,
by one accumulator, and is then rounded as `gate_kernel` rounds it.

In the kernel: `R` rows of a group, `C` columns of `out` in a tile, `S` columns of x in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from prefixwise.backends.torch.cuda.attention import HOPPER
from prefixwise.backends.torch.cuda.elementwise_kernels import activate
from prefixwise.backends.torch.cuda.hopper import describe
from prefixwise.models.config import Activation


@dataclass(frozen=True)
class GemmTuning:
    """Tiles and their order; none of it changes a bit of the result."""

    num_groups: int = 2  # of four warps
    group_rows: int = 64  # R
    num_columns: int = 128  # C
    step_size: int = 64  # S
    num_buffers: int = 4  # steps in flight
    num_parts: int = 4  # columns of a tile are activated and stored in so many parts
    defers: bool = True  # activate while the next tile is multiplied?
    lead: int = 0  # steps that each group is ahead of the next one
    num_band_tiles: int = 16  # rows of tiles that share columns of the weight before the next columns' turn
    per_processor: int = 1  # programs of a multiprocessor
    num_registers: int = 240  # of a thread of a group

    @property
    def tile_rows(self) -> int:
        return self.num_groups * self.group_rows


TUNING = GemmTuning()
MIN_INNER = 512  # D, so that a tile has more steps than buffers
MIN_ROWS = 2048  # fewer do not make tiles for all multiprocessors: cuBLAS, which has smaller ones, is faster


def jit(function: Callable[..., Any]) -> Any:
    """`gluon.jit`, with a type; sizes do not choose the compiled kernel."""
    sizes = ("num_row_tiles", "num_column_tiles", "num_steps")
    return gluon.jit(do_not_specialize=sizes)(function)


@jit
def _place_of(
    tile: gl.tensor, num_row_tiles: gl.tensor, num_column_tiles: gl.tensor, num_band_tiles: gl.constexpr
) -> gl.tuple:
    """Row and column of a tile, in tiles. Tiles go down the columns of a band, then to the next band: programs that run
    at the same time share rows and columns, so these come from the GPU's cache."""
    band, in_band = tile // (num_band_tiles * num_column_tiles), tile % (num_band_tiles * num_column_tiles)
    first = band * num_band_tiles
    height = gl.minimum(num_row_tiles - first, num_band_tiles)
    return first + in_band % height, in_band // height


@jit
def _load_steps(
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    buffers: gl.tuple,  # of x [num_buffers * groups, R, S] and of the weight [num_buffers, 2 C, S]
    barriers: gl.tuple,  # of each buffer, [num_buffers, 1] each: it is loaded, is consumed
    sizes: gl.tuple,  # num_row_tiles, num_column_tiles, num_steps
    num_groups: gl.constexpr,
    num_band_tiles: gl.constexpr,
) -> None:
    """Load every step of every tile of this program, in order."""
    x_buffers, weight_buffers = buffers
    ready, free, _ = barriers
    num_row_tiles, num_column_tiles, num_steps = sizes
    num_buffers: gl.constexpr = weight_buffers.shape[0]
    num_columns: gl.constexpr = weight_buffers.shape[1] // 2
    num_rows: gl.constexpr = x_buffers.shape[1]
    step_size: gl.constexpr = x_buffers.shape[2]
    first_up = num_column_tiles * num_columns
    step = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of(tile, num_row_tiles, num_column_tiles, num_band_tiles)
        row, column = row_tile * (num_groups * num_rows), column_tile * num_columns
        for number in range(num_steps):
            buffer, is_odd = step % num_buffers, (step // num_buffers) % 2
            at = number * step_size
            mbarrier.wait(free.index(buffer), is_odd ^ 1)
            loaded, halves = ready.index(buffer), weight_buffers.index(buffer)
            mbarrier.expect(loaded, num_groups * x.block_type.nbytes + 2 * weight.block_type.nbytes)
            for group in gl.static_range(num_groups):
                rows = x_buffers.index(buffer * num_groups + group)
                tma.async_copy_global_to_shared(x, [row + group * num_rows, at], loaded, rows)
            gates, ups = halves.slice(0, num_columns), halves.slice(num_columns, num_columns)
            tma.async_copy_global_to_shared(weight, [column, at], loaded, gates)
            tma.async_copy_global_to_shared(weight, [first_up + column, at], loaded, ups)
            step += 1


@jit
def _halves_of(columns: gl.tensor) -> gl.tuple:
    """[R, n] to two of [R, n / 2]: the same thread holds column i of both."""
    rows: gl.constexpr = columns.shape[0]
    half: gl.constexpr = columns.shape[1] // 2
    return columns.reshape([rows, 2, half]).permute([0, 2, 1]).split()


@jit
def _round(acc: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """[R, 2 C] float32 to [R, C] int32: gate, rounded, in the lower half of a number, up in the upper."""
    gate, up = _halves_of(acc)
    is_bfloat16: gl.constexpr = dtype == gl.bfloat16
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $2;" if is_bfloat16 else "cvt.rn.f16x2.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(convert, "=r,r,r", [up, gate], gl.int32, is_pure=True, pack=1)


@jit
def _activate(rounded: gl.tensor, dtype: gl.constexpr, is_silu: gl.constexpr) -> gl.tensor:
    """activation(gate) * up, with the roundings of `gate_kernel`."""
    if dtype == gl.bfloat16:
        gate = (rounded << 16).to(gl.float32, bitcast=True)
        up = (rounded & -65536).to(gl.float32, bitcast=True)
        # bfloat16 is the upper half of a float32, and two of them are rounded faster than one.
        convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;"
        activated = gl.inline_asm_elementwise(
            convert, "=r,r", [activate(gate, is_silu)], gl.float32, is_pure=True, pack=1
        )
    else:
        gate = rounded.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        up = (rounded >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        activated = activate(gate, is_silu).to(dtype).to(gl.float32)
    return (activated * up).to(dtype)


@jit
def _store_part(
    part: gl.constexpr,
    group: gl.constexpr,
    rounded: gl.tensor,  # [R, C]
    row: gl.tensor,
    column: gl.tensor,
    out: tma.tensor_descriptor,
    stored: gl.shared_memory_descriptor,  # [groups * num_parts, R, C / num_parts]
    num_parts: gl.constexpr,
    is_silu: gl.constexpr,
) -> None:
    """Activate and store some columns. Rows that `out` has not are not stored."""
    if num_parts >= 2:
        left, right = _halves_of(rounded)
        rounded = left if part < num_parts // 2 else right
    if num_parts == 4:
        inner_left, inner_right = _halves_of(rounded)
        rounded = inner_left if part % 2 == 0 else inner_right
    gated = _activate(rounded, out.dtype, is_silu)
    tma.store_wait(num_parts - 1)  # this part of the tile before
    buffer = stored.index(group * num_parts + part)
    buffer.store(gated)
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column + part * stored.shape[2]], buffer)


@jit
def _multiply(
    work: gl.tuple,  # out, stored [groups * num_parts, R, C / num_parts], and buffers, barriers and sizes of the loader
    group: gl.constexpr,
    num_groups: gl.constexpr,
    num_parts: gl.constexpr,
    defers: gl.constexpr,
    lead: gl.constexpr,
    num_band_tiles: gl.constexpr,
    is_silu: gl.constexpr,
) -> None:
    """The rows of one group, of every tile of this program."""
    out, stored, buffers, barriers, sizes = work
    x_buffers, weight_buffers = buffers
    ready, free, ahead = barriers
    num_row_tiles, num_column_tiles, num_steps = sizes
    num_buffers: gl.constexpr = weight_buffers.shape[0]
    num_rows: gl.constexpr = stored.shape[1]
    num_columns: gl.constexpr = weight_buffers.shape[1] // 2
    dtype: gl.constexpr = out.dtype
    # Columns of an instruction: 256 need more registers than a thread of 16 warps is launched with.
    width: gl.constexpr = 128 if num_groups == 3 else 2 * num_columns
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, width, 16])
    before: gl.constexpr = num_parts + 1 if defers else 1
    peeled: gl.constexpr = lead if lead > before else before  # steps with something else to do

    nothing = gl.zeros([num_rows, 2 * num_columns], gl.float32, of_acc)
    # What is deferred: at first nothing, below the last row of `out`.
    rounded = _round(nothing, dtype)
    row, column = num_row_tiles * num_groups * num_rows, 0
    step, turn = 0, 0
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        if lead > 0 and group > 0:
            mbarrier.wait(ahead.index(group - 1), turn % 2)
        acc = nothing
        for number in gl.static_range(peeled):
            buffer, is_odd = step % num_buffers, (step // num_buffers) % 2
            mbarrier.wait(ready.index(buffer), is_odd)
            rows = x_buffers.index(buffer * num_groups + group)
            token = warpgroup_mma(
                rows, weight_buffers.index(buffer).permute((1, 0)), acc, use_acc=number > 0, is_async=True
            )
            if lead > 0 and number == lead - 1 and group < num_groups - 1:
                mbarrier.arrive(ahead.index(group))
            if defers and number > 0 and number <= num_parts:
                _store_part(number - 1, group, rounded, row, column, out, stored, num_parts, is_silu)
            acc = warpgroup_mma_wait(1, deps=[token])
            if number > 0:
                mbarrier.arrive(free.index((step - 1) % num_buffers))
            step += 1
        for number in range(peeled, num_steps):  # noqa: B007  # `_` is a tensor here
            buffer, is_odd = step % num_buffers, (step // num_buffers) % 2
            mbarrier.wait(ready.index(buffer), is_odd)
            rows = x_buffers.index(buffer * num_groups + group)
            token = warpgroup_mma(rows, weight_buffers.index(buffer).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[token])
            mbarrier.arrive(free.index((step - 1) % num_buffers))
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((step - 1) % num_buffers))

        row_tile, column_tile = _place_of(tile, num_row_tiles, num_column_tiles, num_band_tiles)
        row, column = (row_tile * num_groups + group) * num_rows, column_tile * num_columns
        rounded = _round(acc, dtype)
        if not defers:
            for part in gl.static_range(num_parts):
                _store_part(part, group, rounded, row, column, out, stored, num_parts, is_silu)
        turn += 1  # noqa: SIM113  # not in Gluon
    if defers:
        for part in gl.static_range(num_parts):
            _store_part(part, group, rounded, row, column, out, stored, num_parts, is_silu)
    tma.store_wait(0)


@jit
def gated_gemm_kernel(
    x: tma.tensor_descriptor,  # of [T, D], loaded as [R, S]
    weight: tma.tensor_descriptor,  # of [2 F, D], loaded as [C, S]: gate, then up
    out: tma.tensor_descriptor,  # of [T, F], stored as [R, C / num_parts]
    num_row_tiles: gl.tensor,
    num_column_tiles: gl.tensor,
    num_steps: gl.tensor,
    num_groups: gl.constexpr,
    group_rows: gl.constexpr,
    num_columns: gl.constexpr,
    num_buffers: gl.constexpr,
    num_parts: gl.constexpr,
    defers: gl.constexpr,
    lead: gl.constexpr,
    num_band_tiles: gl.constexpr,
    num_registers: gl.constexpr,
    is_silu: gl.constexpr,
) -> None:
    """Some tiles of `out`."""
    step_size: gl.constexpr = x.block_type.shape[1]
    x_buffers = gl.allocate_shared_memory(x.dtype, [num_buffers * num_groups, group_rows, step_size], x.layout)
    weight_buffers = gl.allocate_shared_memory(x.dtype, [num_buffers, 2 * num_columns, step_size], weight.layout)
    part_size: gl.constexpr = num_columns // num_parts
    stored = gl.allocate_shared_memory(x.dtype, [num_groups * num_parts, group_rows, part_size], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [num_buffers, 1], mbarrier.MBarrierLayout())
    ahead = gl.allocate_shared_memory(gl.int64, [num_groups, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(num_buffers):
        mbarrier.init(ready.index(number), count=1)
        mbarrier.init(free.index(number), count=num_groups)
    for number in gl.static_range(num_groups):
        mbarrier.init(ahead.index(number), count=1)

    buffers, barriers = (x_buffers, weight_buffers), (ready, free, ahead)
    sizes = (num_row_tiles, num_column_tiles, num_steps)
    work = (out, stored, buffers, barriers, sizes)
    if num_groups == 1:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, num_groups, num_parts, defers, lead, num_band_tiles, is_silu)),
                (_load_steps, (x, weight, buffers, barriers, sizes, num_groups, num_band_tiles)),
            ],
            [1],
            [24],
        )
    elif num_groups == 2:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, num_groups, num_parts, defers, lead, num_band_tiles, is_silu)),
                (_multiply, (work, 1, num_groups, num_parts, defers, lead, num_band_tiles, is_silu)),
                (_load_steps, (x, weight, buffers, barriers, sizes, num_groups, num_band_tiles)),
            ],
            [4, 1],
            [num_registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (work, 0, num_groups, num_parts, defers, lead, num_band_tiles, is_silu)),
                (_multiply, (work, 1, num_groups, num_parts, defers, lead, num_band_tiles, is_silu)),
                (_multiply, (work, 2, num_groups, num_parts, defers, lead, num_band_tiles, is_silu)),
                (_load_steps, (x, weight, buffers, barriers, sizes, num_groups, num_band_tiles)),
            ],
            [4, 4, 1],
            [num_registers, num_registers, 24],
        )


def gated_gemm(x: Tensor, weight: Tensor, activation: Activation, out: Tensor, tuning: GemmTuning = TUNING) -> None:
    """activation(x @ gate.T) * (x @ up.T): x [T, D] and weight [2 F, D] to the first F columns of `out`."""
    num_processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    arguments = kernel_arguments(x, weight, out, tuning)
    num_tiles = arguments[3] * arguments[4]
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        gated_gemm_kernel[(min(num_tiles, num_processors * tuning.per_processor),)](
            *arguments, **kernel_sizes(tuning), is_silu=activation == "silu"
        )


def kernel_arguments(x: Tensor, weight: Tensor, out: Tensor, tuning: GemmTuning) -> tuple[Any, ...]:
    """Descriptors, and the numbers of tiles and steps."""
    size, inner = len(weight) // 2, weight.shape[1]
    return (
        describe(x[:, :inner], [tuning.group_rows, tuning.step_size]),
        describe(weight, [tuning.num_columns, tuning.step_size]),
        describe(out[:, :size], [tuning.group_rows, tuning.num_columns // tuning.num_parts]),
        triton.cdiv(len(x), tuning.tile_rows),
        size // tuning.num_columns,
        inner // tuning.step_size,
    )


def kernel_sizes(tuning: GemmTuning) -> dict[str, int]:
    """Compile-time numbers, and the registers that a thread is launched with: all of a multiprocessor's."""
    names = ("num_groups", "group_rows", "num_columns", "num_buffers", "num_parts", "defers", "lead")
    sizes = {name: getattr(tuning, name) for name in (*names, "num_band_tiles", "num_registers")}
    num_threads = 128 * (tuning.num_groups + 1) * tuning.per_processor
    return {**sizes, "num_warps": 4, "maxnreg": 65536 // num_threads // 8 * 8}


def has_gated_gemm(weight: Tensor, tuning: GemmTuning = TUNING) -> bool:
    """Can the matrix [2 F, D] of gate and up be multiplied here?"""
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) != HOPPER:
        return False
    fits = len(weight) % (2 * tuning.num_columns) == 0 and weight.shape[1] % tuning.step_size == 0
    return fits and weight.shape[1] >= MIN_INNER and weight.dtype in (torch.bfloat16, torch.float16)
