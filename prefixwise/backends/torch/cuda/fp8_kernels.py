"""The elementwise kernels of a layer whose GEMMs are in FP8: each writes codes, and one scale per row.

One program takes one whole row, because its scale is that of its largest magnitude. (`rescale_kernel` ends what a GEMM
has begun, and takes several.) A row is rounded to the model's
dtype before it is quantised, as `elementwise_kernels.py` rounds it, so the codes are those of `quantise_rows`, for the
MLP's activations of `quantise_activations`, over what the other kernel writes. Bits do not depend on other rows, as
there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from prefixwise.backends.torch.cuda.elementwise_kernels import (
    activate,
    apply_norm,
    fitting_exponents,
    from_the_end,
    jit,
    launch,
    power_of_two,
)
from prefixwise.forward.fp8 import ACTIVATION_PART, EXPONENT_OF_ONE, FP8_MAX, SMALLEST_MAX
from prefixwise.models.config import Activation

_FP8_MAX: tl.constexpr = tl.constexpr(FP8_MAX)
_SMALLEST_MAX: tl.constexpr = tl.constexpr(SMALLEST_MAX)
_PART: tl.constexpr = tl.constexpr(ACTIVATION_PART)
_ONE: tl.constexpr = tl.constexpr(EXPONENT_OF_ONE)
_MAX_TILE_PARTS = 8192  # of the rows of a program of `rescale_kernel`: more would not fit registers


@jit
def store_codes(
    row: tl.tensor,  # [padded size] float32
    out: tl.tensor,  # of the row's codes
    row_scale: tl.tensor,  # of the row's scale
    columns: tl.tensor,
    inside: tl.tensor,
    are_activations: tl.constexpr,  # of the MLP
) -> None:
    """Quantise a row. Columns outside are 0."""
    dtype: tl.constexpr = out.dtype.element_ty
    if are_activations:
        parts = tl.reshape(row, [row.shape[0] // _PART, _PART])
        exponents = tl.maximum(fitting_exponents(tl.max(tl.abs(parts), 1)), _ONE)
        largest = tl.max(exponents, 0)
        codes = (parts * power_of_two(254 - exponents)[:, None]).to(dtype)
        codes = (codes.to(tl.float32) * power_of_two(exponents - largest + _ONE)[:, None]).to(dtype)
        codes = tl.reshape(codes, row.shape)  # in one row they are seen to lie side by side
        scale = power_of_two(largest)
    else:
        largest = tl.maximum(tl.max(tl.abs(row), 0), _SMALLEST_MAX)
        codes = (row * tl.div_rn(_FP8_MAX, largest)).to(dtype)
        scale = largest * (1 / _FP8_MAX)
    tl.store(out + columns, codes, mask=inside)
    tl.store(row_scale, scale)


@jit
def rescale_kernel(
    codes: tl.tensor,  # [T, size]
    exponents: tl.tensor,  # [parts, T] uint8, biased: of the scale with which each part of a row is rounded
    row_scales: tl.tensor,  # [T] float32
    num_rows: tl.tensor,
    size: tl.constexpr,
    num_parts: tl.constexpr,
    padded_parts: tl.constexpr,
    row_tile: tl.constexpr,
) -> None:
    """Find the scales of rows, and round the codes of those again whose parts have several."""
    first = tl.program_id(0) * row_tile
    rows, parts = first + tl.arange(0, row_tile), tl.arange(0, padded_parts)
    inside = (parts < num_parts)[:, None] & (rows < num_rows)[None, :]
    of_rows = tl.load(exponents + parts[:, None] * num_rows + rows[None, :], mask=inside, other=_ONE).to(tl.int32)
    largest = tl.max(of_rows, 0)
    tl.store(row_scales + rows, power_of_two(largest), mask=rows < num_rows)
    if tl.max(largest, 0) > _ONE:
        columns = tl.arange(0, _PART)
        for offset in range(tl.minimum(row_tile, num_rows - first)):
            row = (first + offset).to(tl.int64)
            of_parts = tl.load(exponents + parts * num_rows + row, mask=parts < num_parts, other=_ONE).to(tl.int32)
            of_row = tl.max(of_parts, 0)
            if of_row > _ONE:
                at = codes + row * size + parts[:, None] * _PART + columns[None, :]
                is_part = (parts < num_parts)[:, None] & (columns >= 0)[None, :]
                wide = tl.load(at, mask=is_part, other=0.0).to(tl.float32)
                wide *= power_of_two(of_parts - of_row + _ONE)[:, None]
                tl.store(at, wide.to(codes.dtype.element_ty), mask=is_part)


@jit
def quantise_kernel(
    x: tl.tensor,  # [T, size]
    out: tl.tensor,  # [T, size] codes
    row_scales: tl.tensor,  # [T] float32
    are_activations: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    """Rows as they are."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_size)
    inside = columns < size
    wide = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    store_codes(wide, out + row * size, row_scales + row, columns, inside, are_activations)


@jit
def norm_fp8_kernel(
    x: tl.tensor,  # [T, size]
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [T, size] codes
    row_scales: tl.tensor,  # [T] float32
    eps: tl.tensor,
    size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    """Of `norm_kernel`."""
    row = from_the_end().to(tl.int64)
    columns = tl.arange(0, padded_size)
    inside = columns < size
    wide = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    normed = apply_norm(wide, scales, tl.sum(wide * wide, 0) / size, eps)
    rounded = normed.to(x.dtype.element_ty).to(tl.float32)
    store_codes(rounded, out + row * size, row_scales + row, columns, inside, False)


@jit
def add_norm_fp8_kernel(
    x: tl.tensor,  # [T, size]: becomes x + delta
    delta: tl.tensor,  # [T, size]
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [T, size] codes of the norm
    row_scales: tl.tensor,  # [T] float32
    eps: tl.tensor,
    size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    """Of `add_norm_kernel`."""
    row = from_the_end().to(tl.int64)
    columns = tl.arange(0, padded_size)
    inside = columns < size
    x_at = x + row * size + columns
    added = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(delta + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    residual = added.to(x.dtype.element_ty)
    tl.store(x_at, residual, mask=inside)
    wide = residual.to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    normed = apply_norm(wide, scales, tl.sum(wide * wide, 0) / size, eps)
    rounded = normed.to(x.dtype.element_ty).to(tl.float32)
    store_codes(rounded, out + row * size, row_scales + row, columns, inside, False)


@jit
def gate_fp8_kernel(
    gate_up: tl.tensor,  # [T, 2 * size]
    out: tl.tensor,  # [T, size] codes
    row_scales: tl.tensor,  # [T] float32
    is_silu: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    """Of `gate_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_size)
    inside = columns < size
    gate_at = gate_up + row * (2 * size) + columns
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + size, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    activated = activate(gate, is_silu).to(dtype).to(tl.float32)
    rounded = (activated * up).to(dtype).to(tl.float32)
    store_codes(rounded, out + row * size, row_scales + row, columns, inside, True)


def row_sizes(size: int) -> dict[str, int]:
    """The whole row in one tile. Few warps: every program ends in one scale, and more of them then run side by side."""
    padded_size = max(triton.next_power_of_2(size), ACTIVATION_PART)
    return {"size": size, "padded_size": padded_size, "num_warps": min(max(padded_size // 1024, 1), 8)}


def quantise(x: Tensor, out: Tensor, row_scales: Tensor, *, are_activations: bool = False) -> None:
    """x [T, I], or the MLP's activations [T, F], to codes."""
    sizes = row_sizes(x.shape[1])
    launch(quantise_kernel, (len(x),), x, out, row_scales, are_activations=are_activations, **sizes)


def rescale(codes: Tensor, exponents: Tensor, row_scales: Tensor) -> None:
    """Activations [T, F] whose parts were rounded each with a scale of its own, with exponents [F / 32, T], to codes
    with scales of their rows."""
    num_parts, num_rows = exponents.shape
    padded_parts = triton.next_power_of_2(num_parts)
    row_tile = min(max(_MAX_TILE_PARTS // padded_parts, 16), 64)
    launch(
        rescale_kernel,
        (triton.cdiv(num_rows, row_tile),),
        *(codes, exponents, row_scales, num_rows),
        size=codes.shape[1],
        num_parts=num_parts,
        padded_parts=padded_parts,
        row_tile=row_tile,
    )


def norm_fp8(x: Tensor, weight: Tensor, eps: float, out: Tensor, row_scales: Tensor) -> None:
    """x [T, D] to the codes of its root mean square norm."""
    launch(norm_fp8_kernel, (len(x),), x, weight, out, row_scales, eps, **row_sizes(x.shape[1]))


def add_norm_fp8(x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor, row_scales: Tensor) -> None:
    """x [T, D] becomes x + delta, rounded, and `out` the codes of its norm."""
    launch(add_norm_fp8_kernel, (len(x),), x, delta, weight, out, row_scales, eps, **row_sizes(x.shape[1]))


def gate_fp8(gate_up: Tensor, activation: Activation, out: Tensor, row_scales: Tensor) -> None:
    """activation(gate) * up: [T, 2 F] to codes [T, F]."""
    sizes = row_sizes(out.shape[1])
    launch(gate_fp8_kernel, (len(out),), gate_up, out, row_scales, is_silu=activation == "silu", **sizes)
