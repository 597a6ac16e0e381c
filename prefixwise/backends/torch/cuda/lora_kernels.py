"""LoRA adapters in Triton: B (A x) added to the rows of a linear layer, each row with the matrices of its own slot.

`shrink` multiplies with A, to as many numbers as the adapter has ranks. Where few adapters fit, these numbers become
more columns of x, with zeros in the columns of other slots, and B's are more columns of the layer's matrix
(`lora.py: widened`): one GEMM computes both. Else `expand` multiplies with B, and adds: it reads and writes the whole
output once more. A program takes a tile of rows. It runs once for each slot that its rows have, nearly always for one.
So a row's bits depend on its own slot alone. The slots are data, as CUDA graphs need it.

Only modules that run on CUDA import this one: nothing else needs Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixwise.backends.torch.cuda.elementwise_kernels import jit, launch
from prefixwise.backends.torch.lora import StackedPair
from prefixwise.models.lora import Matrix

SHRINK_ROWS = 32  # of x
EXPAND = {"row_tile": 64, "column_tile": 64, "num_warps": 4}  # of the output
_NO_SLOT: tl.constexpr = tl.constexpr(1 << 30)


@jit
def shrink_kernel(
    x: tl.tensor,  # [T, size], rows `x_stride` apart
    a: tl.tensor,  # [slots + 1, width, size]
    slots: tl.tensor,  # [T]
    inner: tl.tensor,  # [T, width], or [T, num_slots * width] with zeros for other slots; rows `inner_stride` apart
    num_rows: tl.tensor,
    x_stride: tl.constexpr,
    inner_stride: tl.constexpr,
    num_slots: tl.constexpr,  # 0: rows without an adapter are not written
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
    if num_slots > 0:
        first, last = 1, num_slots
    ranks = tl.arange(0, padded_width)
    is_rank = ranks < width
    row_starts = rows.to(tl.int64) * x_stride
    targets = inner + rows.to(tl.int64)[:, None] * inner_stride + ranks[None, :]
    for number in range(first, last + 1):
        is_here = slot == number
        total = tl.zeros((row_tile, padded_width), tl.float32)
        if tl.max(is_here.to(tl.int32), 0) > 0:
            matrix = a + number * (width * size)
            for start in range(0, size, column_tile):
                columns = start + tl.arange(0, column_tile)
                inside = columns < size
                of_x = tl.load(
                    x + row_starts[:, None] + columns[None, :], mask=is_here[:, None] & inside[None, :], other=0.0
                )
                of_a = tl.load(
                    matrix + ranks[None, :] * size + columns[:, None],
                    mask=is_rank[None, :] & inside[:, None],
                    other=0.0,
                )
                total = tl.dot(of_x, of_a, total, input_precision="ieee")
        if num_slots > 0:
            written = tl.where(is_here[:, None], total, 0.0).to(inner.dtype.element_ty)
            tl.store(targets + (number - 1) * width, written, mask=(rows < num_rows)[:, None] & is_rank[None, :])
        else:
            tl.store(targets, total.to(inner.dtype.element_ty), mask=is_here[:, None] & is_rank[None, :])


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
    wide_rows, is_rank, is_column = rows.to(tl.int64)[:, None], ranks < width, columns < size
    target = out + wide_rows * size + columns[None, :]
    before = tl.load(target, mask=(slot > 0)[:, None] & is_column[None, :], other=0.0)
    of_inner = tl.load(
        inner + wide_rows * width + ranks[None, :], mask=(slot > 0)[:, None] & is_rank[None, :], other=0.0
    )
    for number in range(first, last + 1):
        is_here = slot == number
        if tl.max(is_here.to(tl.int32), 0) > 0:
            of_b = tl.load(
                b + number * (size * width) + columns[None, :] * width + ranks[:, None],
                mask=is_column[None, :] & is_rank[:, None],
                other=0.0,
            )
            total = before.to(tl.float32) + tl.dot(of_inner, of_b, input_precision="ieee")
            tl.store(target, total.to(out.dtype.element_ty), mask=is_here[:, None] & is_column[None, :])


def shrink(x: Tensor, slots: Tensor, a: Tensor) -> Tensor:
    """A x [T, width] of x [T, in] in rows that have a slot; other rows are not written."""
    inner = torch.empty((len(x), a.shape[1]), dtype=x.dtype, device=x.device)
    _shrink(x[:, : a.shape[2]], slots, a, inner, 0)
    return inner


def shrink_into_tail(x: Tensor, slots: Tensor, a: Tensor, num_slots: int) -> None:
    """The same into the columns behind x's first `in`: those of the row's slot; in those of other slots are zeros."""
    size = a.shape[2]
    _shrink(x[:, :size], slots, a, x[:, size:], num_slots)


def _shrink(x: Tensor, slots: Tensor, a: Tensor, inner: Tensor, num_slots: int) -> None:
    assert x.stride(1) == inner.stride(1) == 1, "columns lie one behind the other"
    launch(
        shrink_kernel,
        (triton.cdiv(len(x), SHRINK_ROWS),),
        x,
        *(a, slots, inner, len(x)),
        x_stride=x.stride(0),
        inner_stride=inner.stride(0),
        num_slots=num_slots,
        size=x.shape[1],
        row_tile=SHRINK_ROWS,
        **_widths(a.shape[1]),
        **shrink_tiles(x.shape[1], a.shape[1]),
    )


def shrink_tiles(size: int, width: int) -> dict[str, int]:
    """Few rows are few programs, so long rows have wide tiles; loads in flight share a multiprocessor's memory."""
    is_narrow = width <= 64
    return {
        "column_tile": 256 if size >= 2048 and is_narrow else 128,
        "num_warps": 4,
        "num_stages": 4 if is_narrow else 3,
    }


def expand(inner: Tensor, slots: Tensor, b: Tensor, out: Tensor) -> None:
    """out [T, size] becomes out + B inner in rows that have a slot."""
    num_rows, size = out.shape
    assert out.is_contiguous(), "rows lie one behind the other"
    grid = (triton.cdiv(size, EXPAND["column_tile"]), triton.cdiv(num_rows, EXPAND["row_tile"]))
    launch(expand_kernel, grid, inner, b, slots, out, num_rows, size=size, **_widths(b.shape[2]), **EXPAND)


def _widths(width: int) -> dict[str, int]:
    return {"width": width, "padded_width": triton.next_power_of_2(width)}


def add_lora(x: Tensor, out: Tensor, slots: Tensor, a: Tensor, b: Tensor) -> None:
    """`AddKernel`: out [T, size] becomes out + B (A x) in rows that have a slot."""
    expand(shrink(x, slots, a), slots, b, out)


class AdaptedLayer(NamedTuple):
    """A layer in a forward some of whose rows have adapters."""

    slots: Tensor  # [T]
    pairs: Mapping[Matrix, StackedPair]
    wide: Mapping[Matrix, Tensor]  # matrices with B's of all slots behind their own columns

    def widen(self, matrix: Matrix, x: Tensor) -> Tensor | None:
        """Write what belongs to B's columns behind the columns of x, and return the wide matrix; None: it has none."""
        wide, a = self.wide.get(matrix), self.pairs[matrix].a
        if wide is not None:
            shrink_into_tail(x, self.slots, a, len(a) - 1)
        return wide

    def shrink(self, matrix: Matrix, x: Tensor) -> Tensor:
        return shrink(x, self.slots, self.pairs[matrix].a)

    def expand(self, matrix: Matrix, inner: Tensor, out: Tensor) -> None:
        expand(inner, self.slots, self.pairs[matrix].b, out)
