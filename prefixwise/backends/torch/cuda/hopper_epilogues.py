"""What GEMMs for NVIDIA's Hopper (`hopper_gemm.py`) do with the sums of a tile: scale, round, activate or add,
quantise, store.

Letters are those of `hopper_gemm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from prefixwise.backends.torch.cuda.elementwise_kernels import activate, fitting_exponents, power_of_two


def jit(function: Callable[..., Any]) -> Any:
    """`gluon.jit`, with a type; sizes do not choose the compiled kernel."""
    sizes = ("num_row_tiles", "num_column_tiles", "num_whole_tiles", "num_steps")
    return gluon.jit(do_not_specialize=sizes)(function)


@jit
def _halves_of(columns: gl.tensor) -> gl.tuple:
    """[R, n] to two of [R, n / 2]: the same thread holds column i of both."""
    rows: gl.constexpr = columns.shape[0]
    half: gl.constexpr = columns.shape[1] // 2
    return columns.reshape([rows, 2, half]).permute([0, 2, 1]).split()


@jit
def load_scales(
    scales: gl.tuple,  # of the rows [T] and of the channels [O] or [2 F]
    num_scales: gl.tensor,  # T
    row: gl.tensor,
    column: gl.tensor,
    first_up: gl.tensor,  # F
    acc: gl.tensor,  # [R, 2 C] or [R, C]: gives the layout
    epilogue: gl.constexpr,
) -> gl.tuple:
    """Of the rows [R] and of the columns of `acc`. Rows that x has not have 0."""
    row_scales, channel_scales = scales
    num_columns: gl.constexpr = acc.shape[1]
    rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    columns = column + gl.arange(0, num_columns, gl.SliceLayout(0, acc.type.layout))
    if epilogue != "add":
        half: gl.constexpr = num_columns // 2
        columns = gl.where(columns >= column + half, columns + (first_up - half), columns)
    return gl.load(row_scales + rows, mask=rows < num_scales, other=0.0), gl.load(channel_scales + columns)


@jit
def round_sums(acc: gl.tensor, scales: gl.tuple, dtype: gl.constexpr, epilogue: gl.constexpr) -> gl.tensor:
    """[R, n] float32 to [R, n / 2] int32: two columns, scaled and rounded, in one number. With an activation the lower
    is of gate, the upper of up, else they are neighbours."""
    if len(scales) == 2:  # in the order of cuBLAS, so with its bits
        of_rows, of_columns = scales
        acc = acc * of_columns[None, :] * of_rows[:, None]
    if epilogue == "add":
        rows: gl.constexpr = acc.shape[0]
        half: gl.constexpr = acc.shape[1] // 2
        lower, upper = acc.reshape([rows, half, 2]).split()
    else:
        lower, upper = _halves_of(acc)
    is_float16: gl.constexpr = dtype == gl.float16
    convert: gl.constexpr = "cvt.rn.f16x2.f32 $0, $1, $2;" if is_float16 else "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(convert, "=r,r,r", [upper, lower], gl.int32, is_pure=True, pack=1)


@jit
def _as_bfloat16(wide: gl.tensor) -> gl.tensor:
    """Rounded, in float32, of which bfloat16 is the upper half. Two numbers are rounded faster than one."""
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;"
    return gl.inline_asm_elementwise(convert, "=r,r", [wide], gl.float32, is_pure=True, pack=1)


@jit
def _activate(rounded: gl.tensor, dtype: gl.constexpr, is_silu: gl.constexpr) -> gl.tensor:
    """activation(gate) * up, with the roundings of `gate_kernel`: in float32 where it is to be quantised."""
    if dtype != gl.float16:
        gate = (rounded << 16).to(gl.float32, bitcast=True)
        up = (rounded & -65536).to(gl.float32, bitcast=True)
        gated = _as_bfloat16(activate(gate, is_silu)) * up
        gated = gated.to(dtype) if dtype == gl.bfloat16 else _as_bfloat16(gated)
    else:
        gate = rounded.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        up = (rounded >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        activated = activate(gate, is_silu).to(dtype).to(gl.float32)
        gated = (activated * up).to(dtype)
    return gated


@jit
def _quantise(
    gated: gl.tensor,  # [R, P] float32
    exponents: gl.tensor,  # [parts, T] uint8
    row: gl.tensor,
    part: gl.tensor,
    num_rows: gl.tensor,  # T
) -> gl.tensor:
    """Codes of a part, two in each number of [R, P / 2], and the exponents of their scales, as `quantise_activations`
    has them before a row has one."""
    found = gl.maximum(fitting_exponents(gl.max(gl.abs(gated), 1)), 127)  # the biased exponent of 1
    rows = row + gl.arange(0, gated.shape[0], gl.SliceLayout(1, gated.type.layout))
    gl.store(exponents + part * num_rows + rows, found.to(gl.uint8), mask=rows < num_rows)
    scaled = gated * power_of_two(254 - found)[:, None]
    lower, upper = scaled.reshape([scaled.shape[0], scaled.shape[1] // 2, 2]).split()
    convert: gl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(convert, "=h,r,r", [upper, lower], gl.int16, is_pure=True, pack=1)


@jit
def _neighbours(rounded: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """What `round_sums` has put in [R, n] numbers, [R, 2 n]."""
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
def store_part(
    part: gl.constexpr,
    group: gl.constexpr,
    rounded: gl.tensor,  # [R, C], or [R, C / 2] of half a tile
    row: gl.tensor,
    column: gl.tensor,
    out: tma.tensor_descriptor,
    stored: gl.shared_memory_descriptor,  # [2 * num_slots, R, P]
    exponents: gl.tensor,  # of parts, where `out` are codes, else None
    epilogue: gl.constexpr,
) -> None:
    """Some columns of a tile to `out`. Rows that it has not are not stored."""
    num_slots: gl.constexpr = stored.shape[0] // 2
    part_numbers: gl.constexpr = stored.shape[2] // 2 if epilogue == "add" else stored.shape[2]
    num_parts: gl.constexpr = rounded.shape[1] // part_numbers
    left, right = _halves_of(rounded)
    numbers = left if part < num_parts // 2 else right
    if num_parts == 4:
        inner_left, inner_right = _halves_of(numbers)
        numbers = inner_left if part % 2 == 0 else inner_right
    if epilogue == "add":
        columns = _neighbours(numbers, out.dtype)
    else:
        columns = _activate(numbers, out.dtype, epilogue == "silu")
    slot: gl.constexpr = group * num_slots + part % num_slots
    buffer = stored.index(slot)
    target = buffer
    if exponents is not None:
        columns = _quantise(columns, exponents, row, column // stored.shape[2] + part, out.shape[0])
        pairs: gl.constexpr = [stored.shape[1], stored.shape[2] // 2]
        of_pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for(pairs, gl.int16)
        target = stored._reinterpret(gl.int16, [stored.shape[0]] + pairs, of_pairs).index(slot)  # noqa: RUF005
    place = [row, column + part * stored.shape[2]]
    tma.store_wait(num_slots - 1)  # what was in this slot
    target.store(columns)
    fence_async_shared()
    if epilogue == "add":
        _add_shared_to_global(out, place, buffer)
    else:
        tma.async_copy_shared_to_global(out, place, buffer)
