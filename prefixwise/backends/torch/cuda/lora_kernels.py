"""LoRA adapters in Triton: B (A x) added to the rows of a linear layer, each row with the matrices of its own slot.

Two kernels, as there is no room for B's rows beside A's columns: `shrink` multiplies with A, to as many numbers as the
adapter has ranks, and `expand` with B, and adds. `expand_and_gate` adds what belongs to gate and up where the gated
activation reads them anyway. A program takes a tile of rows. It runs once for each slot that its rows have, nearly
always for one, and writes the rows of that slot; a tile without adapters is left at once. So a row's bits depend on its
own slot alone, and `shrink` and `expand` neither read nor write rows without an adapter. The slots are data, as CUDA
graphs need it.

Only modules that run on CUDA import this one: nothing else needs Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixwise.backends.torch.cuda.elementwise_kernels import activate, jit, launch
from prefixwise.backends.torch.lora import StackedPair
from prefixwise.models.config import Activation
from prefixwise.models.lora import Matrix

SHRINK = {"row_tile": 32, "column_tile": 128, "num_warps": 4, "num_stages": 3}  # of x
EXPAND = {"row_tile": 64, "column_tile": 128, "num_warps": 4}  # of the output
GATE = {"row_tile": 64, "column_tile": 128, "num_warps": 8}
_NO_SLOT: tl.constexpr = tl.constexpr(1 << 30)


@jit
def shrink_kernel(
    x: tl.tensor,  # [T, size]
    a: tl.tensor,  # [slots + 1, width, size]
    slots: tl.tensor,  # [T]
    inner: tl.tensor,  # [T, width]
    num_rows: tl.tensor,
    size: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    row_tile: tl.constexpr,
    column_tile: tl.constexpr,
) -> None:
    """One program takes some rows, and all of their columns."""
    rows = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=0)
    last = tl.max(slot, 0)
    first = tl.min(tl.where(slot > 0, slot, _NO_SLOT), 0)
    ranks = tl.arange(0, padded_width)
    row_starts = rows.to(tl.int64) * size
    for number in range(first, last + 1):
        is_here = slot == number
        if tl.max(is_here.to(tl.int32), 0) > 0:
            total = tl.zeros((row_tile, padded_width), tl.float32)
            matrix = a + number * (width * size)
            for start in range(0, size, column_tile):
                columns = start + tl.arange(0, column_tile)
                inside = columns < size
                of_x = tl.load(
                    x + row_starts[:, None] + columns[None, :], mask=is_here[:, None] & inside[None, :], other=0.0
                )
                of_a = tl.load(
                    matrix + ranks[None, :] * size + columns[:, None],
                    mask=(ranks < width)[None, :] & inside[:, None],
                    other=0.0,
                )
                total = tl.dot(of_x, of_a, total, input_precision="ieee")
            target = inner + rows.to(tl.int64)[:, None] * width + ranks[None, :]
            tl.store(target, total.to(inner.dtype.element_ty), mask=is_here[:, None] & (ranks < width)[None, :])


@jit
def multiply_b(
    of_inner: tl.tensor,  # [row_tile, padded_width]
    b: tl.tensor,  # of one slot: [size, width]
    columns: tl.tensor,  # of the output
    is_column: tl.tensor,
    width: tl.constexpr,
    padded_width: tl.constexpr,
) -> tl.tensor:
    """[row_tile, column_tile] of B (A x), in float32."""
    ranks = tl.arange(0, padded_width)
    of_b = tl.load(
        b + columns[None, :] * width + ranks[:, None], mask=is_column[None, :] & (ranks < width)[:, None], other=0.0
    )
    return tl.dot(of_inner, of_b, input_precision="ieee")


@jit
def expand_kernel(
    inner: tl.tensor,  # [T, width]
    b: tl.tensor,  # [slots + 1, size, width]
    slots: tl.tensor,  # [T]
    out: tl.tensor,  # [T, size]
    num_rows: tl.tensor,
    size: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    row_tile: tl.constexpr,
    column_tile: tl.constexpr,
) -> None:
    """One program takes some columns of some rows. The sum is rounded once."""
    columns = tl.program_id(0) * column_tile + tl.arange(0, column_tile)
    rows = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=0)
    last = tl.max(slot, 0)
    first = tl.min(tl.where(slot > 0, slot, _NO_SLOT), 0)
    ranks = tl.arange(0, padded_width)
    wide_rows = rows.to(tl.int64)[:, None]
    target = out + wide_rows * size + columns[None, :]
    is_column = columns < size
    before = tl.load(target, mask=(slot > 0)[:, None] & is_column[None, :], other=0.0)
    of_inner = tl.load(
        inner + wide_rows * width + ranks[None, :], mask=(slot > 0)[:, None] & (ranks < width)[None, :], other=0.0
    )
    for number in range(first, last + 1):
        is_here = slot == number
        if tl.max(is_here.to(tl.int32), 0) > 0:
            added = multiply_b(of_inner, b + number * (size * width), columns, is_column, width, padded_width)
            after = (before.to(tl.float32) + added).to(out.dtype.element_ty)
            tl.store(target, after, mask=is_here[:, None] & is_column[None, :])


@jit
def expand_and_gate_kernel(
    gate_up: tl.tensor,  # [T, 2 * size]
    inner: tl.tensor,  # [T, width]
    b: tl.tensor,  # [slots + 1, 2 * size, width]
    slots: tl.tensor,  # [T]
    out: tl.tensor,  # [T, size]
    num_rows: tl.tensor,
    size: tl.constexpr,
    is_silu: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    row_tile: tl.constexpr,
    column_tile: tl.constexpr,
) -> None:
    """One program takes some columns of some rows. Sums are rounded as `expand_kernel` does, then as `gate_kernel`."""
    columns = tl.program_id(0) * column_tile + tl.arange(0, column_tile)
    rows = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=0)
    last = tl.max(slot, 0)
    first = tl.min(tl.where(slot > 0, slot, _NO_SLOT), 0)
    ranks = tl.arange(0, padded_width)
    wide_rows = rows.to(tl.int64)[:, None]
    is_column = columns < size
    inside = (rows < num_rows)[:, None] & is_column[None, :]
    gate_at = gate_up + wide_rows * (2 * size) + columns[None, :]
    gate = tl.load(gate_at, mask=inside, other=0.0)
    up = tl.load(gate_at + size, mask=inside, other=0.0)
    of_inner = tl.load(
        inner + wide_rows * width + ranks[None, :], mask=(slot > 0)[:, None] & (ranks < width)[None, :], other=0.0
    )
    dtype: tl.constexpr = out.dtype.element_ty
    for number in range(first, last + 1):
        is_here = slot == number
        if tl.max(is_here.to(tl.int32), 0) > 0:
            matrix = b + number * (2 * size * width)
            of_gate = multiply_b(of_inner, matrix, columns, is_column, width, padded_width)
            of_up = multiply_b(of_inner, matrix + size * width, columns, is_column, width, padded_width)
            gate = tl.where(is_here[:, None], (gate.to(tl.float32) + of_gate).to(dtype), gate)
            up = tl.where(is_here[:, None], (up.to(tl.float32) + of_up).to(dtype), up)
    activated = activate(gate.to(tl.float32), is_silu).to(dtype).to(tl.float32)
    tl.store(out + wide_rows * size + columns[None, :], (activated * up.to(tl.float32)).to(dtype), mask=inside)


def shrink(x: Tensor, slots: Tensor, a: Tensor) -> Tensor:
    """A x [T, width] of x [T, in] in rows that have a slot; other rows are not written."""
    assert x.is_contiguous(), "rows lie one behind the other"
    inner = torch.empty((len(x), a.shape[1]), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(len(x), SHRINK["row_tile"]),)
    launch(shrink_kernel, grid, x, a, slots, inner, len(x), size=x.shape[1], **_widths(a.shape[1]), **SHRINK)
    return inner


def expand(inner: Tensor, slots: Tensor, b: Tensor, out: Tensor) -> None:
    """out [T, size] becomes out + B inner in rows that have a slot."""
    num_rows, size = out.shape
    assert out.is_contiguous(), "rows lie one behind the other"
    grid = (triton.cdiv(size, EXPAND["column_tile"]), triton.cdiv(num_rows, EXPAND["row_tile"]))
    launch(expand_kernel, grid, inner, b, slots, out, num_rows, size=size, **_widths(b.shape[2]), **EXPAND)


def expand_and_gate(
    inner: Tensor, slots: Tensor, b: Tensor, gate_up: Tensor, activation: Activation, out: Tensor
) -> None:
    """activation(gate) * up, [T, 2 F] to [T, F], of gate_up + B inner in rows that have a slot."""
    num_rows, size = out.shape
    assert gate_up.is_contiguous() and out.is_contiguous(), "rows lie one behind the other"
    launch(
        expand_and_gate_kernel,
        (triton.cdiv(size, GATE["column_tile"]), triton.cdiv(num_rows, GATE["row_tile"])),
        gate_up,
        *(inner, b, slots, out, num_rows),
        size=size,
        is_silu=activation == "silu",
        **_widths(b.shape[2]),
        **GATE,
    )


def _widths(width: int) -> dict[str, int]:
    return {"width": width, "padded_width": triton.next_power_of_2(width)}


def add_lora(x: Tensor, out: Tensor, slots: Tensor, a: Tensor, b: Tensor) -> None:
    """`AddKernel`: out [T, size] becomes out + B (A x) in rows that have a slot."""
    expand(shrink(x, slots, a), slots, b, out)


class AdaptedLayer(NamedTuple):
    """A layer in a forward some of whose rows have adapters."""

    slots: Tensor  # [T]
    pairs: Mapping[Matrix, StackedPair]

    def shrink(self, matrix: Matrix, x: Tensor) -> Tensor:
        return shrink(x, self.slots, self.pairs[matrix].a)

    def expand(self, matrix: Matrix, inner: Tensor, out: Tensor) -> None:
        expand(inner, self.slots, self.pairs[matrix].b, out)

    def gate(self, inner: Tensor, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        expand_and_gate(inner, self.slots, self.pairs["gate_up"].b, gate_up, activation, out)
