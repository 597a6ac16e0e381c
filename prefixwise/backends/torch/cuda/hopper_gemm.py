"""GEMMs for NVIDIA's Hopper that do the next step too, in Gluon: activation(gate) * up, and out += x @ weight.T.

Twelve warps: one loads tiles of x and of the weight, two groups of four each multiply half of a tile's rows. Programs
are persistent, and the loading warp runs ahead into the next tile. A group rounds its sums, starts the next tile, and
activates or adds while the matrix units work on that.

The weight's part of a tile is two halves. With an activation these are the same columns of gate and up, so a thread has
both and writes their product: gate and up themselves never leave the multiprocessor. In FP8 x and the weight are codes,
and sums are multiplied by the scales of their channel and of their row, then rounded to bfloat16. `out` is in bfloat16,
too: the scale of a row of it is that of all columns, which no program has, so quantising is another kernel's work.

The residual never comes to the multiprocessor: the GPU's cache adds (a TMA reduction). It rounds once, exactly, which
is what a float32 sum rounded again gives too: a float32 has more than 2 p + 2 bits, for p bits of bfloat16 or float16.

A row's bits depend neither on its place nor on the number of rows: an element is summed over k in order, 16 at a time,
in FP8 32, by one accumulator, and is then rounded as `gate_kernel`, or a GEMM and `add_norm_kernel`, round it.

In the kernel: `R` rows of a group, `C` columns of half a tile, `S` columns of x in a step, `P` columns of `out` in a
part, four of which are a tile's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
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
from prefixwise.backends.torch.fp8 import FP8
from prefixwise.models.config import Activation

_NUM_BUFFERS: gl.constexpr = gl.constexpr(4)  # steps in flight
_NUM_PARTS: gl.constexpr = gl.constexpr(4)
_BAND_TILES: gl.constexpr = gl.constexpr(16)  # rows of tiles that share the weight's columns before the next ones' turn
_GROUP_ROWS = 64  # R
_TILE_ROWS = 2 * _GROUP_ROWS
_HALF_COLUMNS = 128  # C
_STEP_BYTES = 128  # of S columns
_MIN_STEPS = 8  # of a tile: more than a group has something else to do in
_MAX_FP8_INNER = 2048  # with more columns than that cuBLAS's FP8 GEMM and another kernel are faster
OPTIONS = {"num_warps": 4, "maxnreg": 65536 // 384 // 8 * 8}  # all registers for the 384 threads

MIN_ROWS = 2048  # fewer do not make tiles for all multiprocessors: cuBLAS, which has smaller ones, is faster
_MIN_ADDED_ROWS = 8192  # the same of rows to which the GEMM adds
_MIN_FILL = 0.9  # of the multiprocessors' turns with a tile to which the GEMM adds


def jit(function: Callable[..., Any]) -> Any:
    """`gluon.jit`, with a type; sizes do not choose the compiled kernel."""
    sizes = ("num_row_tiles", "num_column_tiles", "num_steps")
    return gluon.jit(do_not_specialize=sizes)(function)


@jit
def _place_of(tile: gl.tensor, num_row_tiles: gl.tensor, num_column_tiles: gl.tensor) -> gl.tuple:
    """Row and column of a tile, in tiles. Tiles go down the columns of a band, then to the next band: programs that run
    at the same time share rows and columns, so these come from the GPU's cache."""
    band, in_band = tile // (_BAND_TILES * num_column_tiles), tile % (_BAND_TILES * num_column_tiles)
    first = band * _BAND_TILES
    height = gl.minimum(num_row_tiles - first, _BAND_TILES)
    return first + in_band % height, in_band // height


@jit
def _load_steps(
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    buffers: gl.tuple,  # of x [2 * num_buffers, R, S], one for each group, and of the weight [num_buffers, 2 C, S]
    barriers: gl.tuple,  # of each buffer, [num_buffers, 1] each: it is loaded, is consumed
    sizes: gl.tuple,  # num_row_tiles, num_column_tiles, num_steps
    epilogue: gl.constexpr,
) -> None:
    """Load every step of every tile of this program, in order."""
    x_buffers, weight_buffers = buffers
    ready, free = barriers
    num_row_tiles, num_column_tiles, num_steps = sizes
    num_rows: gl.constexpr = x_buffers.shape[1]
    step_size: gl.constexpr = x_buffers.shape[2]
    half: gl.constexpr = weight.block_type.shape[0]
    tile_columns: gl.constexpr = 2 * half if epilogue == "add" else half
    second_half = half if epilogue == "add" else num_column_tiles * half  # from the first on
    step = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place_of(tile, num_row_tiles, num_column_tiles)
        row, column = row_tile * (2 * num_rows), column_tile * tile_columns
        for number in range(num_steps):
            buffer, is_odd = step % _NUM_BUFFERS, (step // _NUM_BUFFERS) % 2
            at = number * step_size
            mbarrier.wait(free.index(buffer), is_odd ^ 1)
            loaded, halves = ready.index(buffer), weight_buffers.index(buffer)
            mbarrier.expect(loaded, 2 * x.block_type.nbytes + 2 * weight.block_type.nbytes)
            for group in gl.static_range(2):
                rows = x_buffers.index(2 * buffer + group)
                tma.async_copy_global_to_shared(x, [row + group * num_rows, at], loaded, rows)
            tma.async_copy_global_to_shared(weight, [column, at], loaded, halves.slice(0, half))
            tma.async_copy_global_to_shared(weight, [column + second_half, at], loaded, halves.slice(half, half))
            step += 1


@jit
def _halves_of(columns: gl.tensor) -> gl.tuple:
    """[R, n] to two of [R, n / 2]: the same thread holds column i of both."""
    rows: gl.constexpr = columns.shape[0]
    half: gl.constexpr = columns.shape[1] // 2
    return columns.reshape([rows, 2, half]).permute([0, 2, 1]).split()


@jit
def _load_scales(
    scales: gl.tuple,  # of the rows [T] and of the channels [2 F]
    num_scales: gl.tensor,  # T
    row: gl.tensor,
    column: gl.tensor,
    first_up: gl.tensor,  # F
    acc: gl.tensor,  # [R, 2 C]: gives the layout
) -> gl.tuple:
    """Of the rows [R], of the columns of gate [C] and of up [C]. Rows that x has not have 0."""
    row_scales, channel_scales = scales
    half, _ = _halves_of(acc)
    rows = row + gl.arange(0, half.shape[0], gl.SliceLayout(1, half.type.layout))
    columns = column + gl.arange(0, half.shape[1], gl.SliceLayout(0, half.type.layout))
    of_rows = gl.load(row_scales + rows, mask=rows < num_scales, other=0.0)
    return of_rows, gl.load(channel_scales + columns), gl.load(channel_scales + first_up + columns)


@jit
def _round(acc: gl.tensor, scales: gl.tuple, dtype: gl.constexpr, epilogue: gl.constexpr) -> gl.tensor:
    """[R, 2 C] float32 to [R, C] int32: two columns, scaled and rounded, in one number. With an activation the lower is
    of gate, the upper of up, else they are neighbours."""
    if epilogue == "add":
        rows: gl.constexpr = acc.shape[0]
        half: gl.constexpr = acc.shape[1] // 2
        lower, upper = acc.reshape([rows, half, 2]).split()
    else:
        lower, upper = _halves_of(acc)
    if len(scales) == 3:  # in the order of cuBLAS, so with its bits
        of_rows, of_gates, of_ups = scales
        lower = lower * of_gates[None, :] * of_rows[:, None]
        upper = upper * of_ups[None, :] * of_rows[:, None]
    is_bfloat16: gl.constexpr = dtype == gl.bfloat16
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $2;" if is_bfloat16 else "cvt.rn.f16x2.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(convert, "=r,r,r", [upper, lower], gl.int32, is_pure=True, pack=1)


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
def _neighbours(rounded: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """What `_round` has put in [R, n] numbers, [R, 2 n]."""
    rows: gl.constexpr = rounded.shape[0]
    columns: gl.constexpr = 2 * rounded.shape[1]
    of_part: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, columns, 16])
    even = rounded.to(gl.int16).to(dtype, bitcast=True)
    odd = (rounded >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([rows, columns]), of_part)


@builtin  # type: ignore[untyped-decorator]
def _add_shared_to_global(out: Any, place: Any, source: Any, _semantic: Any = None) -> None:
    """`tma.async_copy_shared_to_global` that adds. Gluon's language has no name for it yet, its builder has: where a
    version of Triton has another, compiling fails, and only the GEMM that adds is not used."""
    from triton._C.libtriton import ir

    builder = _semantic.builder
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, out.handle, place, source.handle)


@jit
def _store_part(
    part: gl.constexpr,
    group: gl.constexpr,
    rounded: gl.tensor,  # [R, C]
    row: gl.tensor,
    column: gl.tensor,
    out: tma.tensor_descriptor,
    stored: gl.shared_memory_descriptor,  # [2 * num_slots, R, P]
    epilogue: gl.constexpr,
) -> None:
    """Some columns of a tile to `out`. Rows that it has not are not stored."""
    num_slots: gl.constexpr = stored.shape[0] // 2
    left, right = _halves_of(rounded)
    half = left if part < 2 else right
    inner_left, inner_right = _halves_of(half)
    quarter = inner_left if part % 2 == 0 else inner_right
    if epilogue == "add":
        columns = _neighbours(quarter, out.dtype)
    else:
        columns = _activate(quarter, out.dtype, epilogue == "silu")
    buffer = stored.index(group * num_slots + part % num_slots)
    place = [row, column + part * stored.shape[2]]
    tma.store_wait(num_slots - 1)  # what was in this slot
    buffer.store(columns)
    fence_async_shared()
    if epilogue == "add":
        _add_shared_to_global(out, place, buffer)
    else:
        tma.async_copy_shared_to_global(out, place, buffer)


@jit
def _begin_step(
    acc: gl.tensor, step: gl.tensor, group: gl.constexpr, buffers: gl.tuple, barriers: gl.tuple, is_first: gl.constexpr
) -> gl.tensor:
    """Begin to add the product of a step."""
    x_buffers, weight_buffers = buffers
    ready, _ = barriers
    buffer, is_odd = step % _NUM_BUFFERS, (step // _NUM_BUFFERS) % 2
    mbarrier.wait(ready.index(buffer), is_odd)
    rows, columns = x_buffers.index(2 * buffer + group), weight_buffers.index(buffer).permute((1, 0))
    return warpgroup_mma(rows, columns, acc, use_acc=not is_first, is_async=True)


@jit
def _multiply(
    out: tma.tensor_descriptor,
    stored: gl.shared_memory_descriptor,  # [2 * num_slots, R, P]
    buffers: gl.tuple,  # as the loader's
    barriers: gl.tuple,
    sizes: gl.tuple,
    scales: gl.tuple,  # in FP8 of the rows [T] and of the channels [2 F]; else empty
    group: gl.constexpr,
    epilogue: gl.constexpr,
) -> None:
    """The rows of one group, of every tile of this program."""
    x_buffers, weight_buffers = buffers
    _, free = barriers
    num_row_tiles, num_column_tiles, num_steps = sizes
    num_rows: gl.constexpr = x_buffers.shape[1]
    num_columns: gl.constexpr = weight_buffers.shape[1]
    tile_columns: gl.constexpr = _NUM_PARTS * stored.shape[2]  # of `out`
    inner: gl.constexpr = 256 // x_buffers.dtype.primitive_bitwidth  # that an instruction sums over
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, num_columns, inner])

    nothing = gl.zeros([num_rows, num_columns], gl.float32, of_acc)
    # What is to be stored: at first nothing, below the last row of `out`.
    rounded = _round(nothing, (), out.dtype, epilogue)
    row, column = num_row_tiles * 2 * num_rows, 0
    step = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        acc = nothing
        for number in gl.static_range(_NUM_PARTS + 1):  # with the tile before to store
            token = _begin_step(acc, step, group, buffers, barriers, number == 0)
            if number > 0:
                _store_part(number - 1, group, rounded, row, column, out, stored, epilogue)
            acc = warpgroup_mma_wait(1, deps=[token])
            if number > 0:
                mbarrier.arrive(free.index((step - 1) % _NUM_BUFFERS))
            step += 1
        row_tile, column_tile = _place_of(tile, num_row_tiles, num_column_tiles)
        row, column = (row_tile * 2 + group) * num_rows, column_tile * tile_columns
        tile_scales = ()
        if len(scales) == 2:
            tile_scales = _load_scales(scales, out.shape[0], row, column, num_column_tiles * tile_columns, nothing)
        for number in range(_NUM_PARTS + 1, num_steps):  # noqa: B007  # `_` is a tensor here
            token = _begin_step(acc, step, group, buffers, barriers, False)
            acc = warpgroup_mma_wait(1, deps=[token])
            mbarrier.arrive(free.index((step - 1) % _NUM_BUFFERS))
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((step - 1) % _NUM_BUFFERS))
        rounded = _round(acc, tile_scales, out.dtype, epilogue)
    for part in gl.static_range(_NUM_PARTS):
        _store_part(part, group, rounded, row, column, out, stored, epilogue)
    tma.store_wait(0)


@jit
def gemm_kernel(
    x: tma.tensor_descriptor,  # of [T, D], loaded as [R, S]
    weight: tma.tensor_descriptor,  # of [2 F, D], gate and then up, or of [O, D], loaded as [C, S]
    out: tma.tensor_descriptor,  # of [T, F] or [T, O], stored as [R, P]
    num_row_tiles: gl.tensor,
    num_column_tiles: gl.tensor,
    num_steps: gl.tensor,
    row_scales: gl.tensor,  # [T] float32, of codes; else None
    channel_scales: gl.tensor,  # [2 F] float32
    epilogue: gl.constexpr,  # silu, gelu_tanh: activate; add: to what is in `out`
) -> None:
    """Some tiles of `out`."""
    num_rows: gl.constexpr = x.block_type.shape[0]
    step_size: gl.constexpr = x.block_type.shape[1]
    half: gl.constexpr = weight.block_type.shape[0]
    part_size: gl.constexpr = out.block_type.shape[1]
    x_buffers = gl.allocate_shared_memory(x.dtype, [2 * _NUM_BUFFERS, num_rows, step_size], x.layout)
    weight_buffers = gl.allocate_shared_memory(x.dtype, [_NUM_BUFFERS, 2 * half, step_size], weight.layout)
    # There is memory for C columns of a group: all parts of a tile, or half of them.
    stored = gl.allocate_shared_memory(out.dtype, [2 * (half // part_size), num_rows, part_size], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_NUM_BUFFERS, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(_NUM_BUFFERS):
        mbarrier.init(ready.index(number), count=1)
        mbarrier.init(free.index(number), count=2)

    buffers, barriers = (x_buffers, weight_buffers), (ready, free)
    sizes = (num_row_tiles, num_column_tiles, num_steps)
    scales = () if row_scales is None else (row_scales, channel_scales)
    gl.warp_specialize(
        [
            (_multiply, (out, stored, buffers, barriers, sizes, scales, 0, epilogue)),
            (_multiply, (out, stored, buffers, barriers, sizes, scales, 1, epilogue)),
            (_load_steps, (x, weight, buffers, barriers, sizes, epilogue)),
        ],
        [4, 1],
        [240, 24],
    )


def gated_gemm(
    x: Tensor, weight: Tensor, activation: Activation, out: Tensor, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """activation(x @ gate.T) * (x @ up.T): x [T, D] and weight [2 F, D] to the first F columns of `out`. `scales`: in
    FP8 those of the rows [T] and of the weight [2 F]."""
    _launch(x, weight, out[:, : len(weight) // 2], _HALF_COLUMNS, scales, activation)


def residual_gemm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [T, O] becomes out + x @ weight.T, each rounded: the first D columns of x with weight [O, D]."""
    _launch(x, weight, out[:, : len(weight)], 2 * _HALF_COLUMNS, None, "add")


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile_columns: int,  # of `out`
    scales: tuple[Tensor, Tensor] | None,
    epilogue: str,
) -> None:
    inner, step_size = weight.shape[1], _STEP_BYTES // weight.dtype.itemsize
    num_row_tiles, num_column_tiles = triton.cdiv(len(x), _TILE_ROWS), out.shape[1] // tile_columns
    num_processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        gemm_kernel[(min(num_row_tiles * num_column_tiles, num_processors),)](
            describe(x[:, :inner], [_GROUP_ROWS, step_size]),
            describe(weight, [_HALF_COLUMNS, step_size]),
            describe(out, [_GROUP_ROWS, tile_columns // _NUM_PARTS.value]),
            *(num_row_tiles, num_column_tiles, inner // step_size),
            *(scales or (None, None)),
            epilogue=epilogue,
            **OPTIONS,
        )


def has_gated_gemm(weight: Tensor) -> bool:
    """Can the matrix [2 F, D] of gate and up be multiplied here, and is that faster?"""
    is_fast = weight.dtype != FP8 or weight.shape[1] < _MAX_FP8_INNER
    return _has_gemm(weight, (torch.bfloat16, torch.float16, FP8)) and is_fast


def has_residual_gemm(weight: Tensor) -> bool:
    """Can the matrix [O, D] be multiplied here?"""
    return _has_gemm(weight, (torch.bfloat16, torch.float16))


def _has_gemm(weight: Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) != HOPPER:
        return False
    num_steps, rest = divmod(weight.shape[1] * weight.dtype.itemsize, _STEP_BYTES)
    fits = len(weight) % (2 * _HALF_COLUMNS) == 0 and rest == 0
    return fits and num_steps >= _MIN_STEPS and weight.dtype in dtypes


def is_residual_gemm_fast(out: Tensor) -> bool:
    """Has `out` [T, O] rows enough, and do its tiles nearly fill the last turn of the multiprocessors, too?"""
    num_tiles = triton.cdiv(len(out), _TILE_ROWS) * (out.shape[1] // (2 * _HALF_COLUMNS))
    num_processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    fill = num_tiles / (triton.cdiv(num_tiles, num_processors) * num_processors)
    return len(out) >= _MIN_ADDED_ROWS and fill >= _MIN_FILL
