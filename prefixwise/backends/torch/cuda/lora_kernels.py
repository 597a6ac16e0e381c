"""LoRA adapters in Triton: B (A x) added to the rows of a linear layer, each row with the matrices of its own slot.

Two kernels, as there is no room for B's rows beside A's columns: `shrink` multiplies with A, to as many numbers as the
adapter has ranks, and `expand` with B, and adds. A program takes a tile of rows. It runs once for each slot that its
rows have, nearly always for one, and writes the rows of that slot; a tile without adapters is left at once. So a row's
bits depend on its own slot alone, and rows without an adapter are neither read nor written. The slots are data, as CUDA
graphs need it.

Only modules that run on CUDA import this one: nothing else needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixwise.backends.torch.cuda.elementwise_kernels import jit, launch

SHRINK_ROWS, SHRINK_COLUMNS = 32, 128  # of x
EXPAND_ROWS, EXPAND_COLUMNS = 64, 128  # of the output
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
    rows = tl.program_id(0) * row_tile + tl.arange(0, row_tile)
    columns = tl.program_id(1) * column_tile + tl.arange(0, column_tile)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=0)
    last = tl.max(slot, 0)
    first = tl.min(tl.where(slot > 0, slot, _NO_SLOT), 0)
    ranks = tl.arange(0, padded_width)
    is_rank = ranks < width
    for number in range(first, last + 1):
        is_here = slot == number
        if tl.max(is_here.to(tl.int32), 0) > 0:
            of_inner = tl.load(
                inner + rows.to(tl.int64)[:, None] * width + ranks[None, :],
                mask=is_here[:, None] & is_rank[None, :],
                other=0.0,
            )
            of_b = tl.load(
                b + number * (size * width) + columns[None, :] * width + ranks[:, None],
                mask=(columns < size)[None, :] & is_rank[:, None],
                other=0.0,
            )
            total = tl.dot(of_inner, of_b, input_precision="ieee")
            target = out + rows.to(tl.int64)[:, None] * size + columns[None, :]
            is_written = is_here[:, None] & (columns < size)[None, :]
            before = tl.load(target, mask=is_written, other=0.0).to(tl.float32)
            tl.store(target, (before + total).to(out.dtype.element_ty), mask=is_written)


def add_lora(x: Tensor, out: Tensor, slots: Tensor, a: Tensor, b: Tensor) -> None:
    """`AddKernel`: out [T, size] becomes out + B (A x) in rows that have a slot. All tensors are contiguous."""
    num_rows, width = len(out), a.shape[1]
    assert x.is_contiguous() and out.is_contiguous(), "rows lie one behind the other"
    assert max(a.numel(), b.numel()) < 1 << 31, "offsets in the matrices of all slots are int32"
    inner = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    sizes = {"width": width, "padded_width": triton.next_power_of_2(width)}
    launch(
        shrink_kernel,
        (triton.cdiv(num_rows, SHRINK_ROWS),),
        *(x, a, slots, inner, num_rows),
        size=x.shape[1],
        **sizes,
        row_tile=SHRINK_ROWS,
        column_tile=SHRINK_COLUMNS,
    )
    size = out.shape[1]
    launch(
        expand_kernel,
        (triton.cdiv(num_rows, EXPAND_ROWS), triton.cdiv(size, EXPAND_COLUMNS)),
        *(inner, b, slots, out, num_rows),
        size=size,
        **sizes,
        row_tile=EXPAND_ROWS,
        column_tile=EXPAND_COLUMNS,
    )
