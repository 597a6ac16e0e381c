"""Row counts of GEMMs on a GPU in which a row has the same bits: what `batch_invariant` pads forwards to.

cuBLAS chooses a kernel by the number of rows. Most of its kernels add the products of a row in one order; those that
split the sum for few rows do not. So every count that a forward can have is tried once, when the model is loaded, with
the model's own weights and random rows: a kernel with another order shows in some of the many sums. On an H200 all
multiples of 128 rows agree, from 256 or 384 rows on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.elementwise import ElementwiseOps
from prefixwise.backends.torch.fp8 import fp8_linear, quantise_rows
from prefixwise.backends.torch.weights import LayerWeights
from prefixwise.models.lora import Matrix as LoraMatrix

MAX_GEMM_ROWS = 16_384  # more rows are cut into GEMMs of so many
UNITS = (128, 256, 512, 1024, 2048)
MIN_ROWS = 256  # fewer take a GPU hardly less time
TILE_ROWS = 2048  # where GEMMs of no other counts give the same bits
_MATRICES: tuple[str, ...] = ("qkv", "o", "gate_up", "down")


class RowCounts(NamedTuple):
    """The row counts of GEMMs: multiples of `unit` from `least`, one of them, to MAX_GEMM_ROWS."""

    unit: int
    least: int

    @property
    def all(self) -> set[int]:
        return set(range(self.least, MAX_GEMM_ROWS + 1, self.unit))

    def padded(self, num_rows: int) -> int:
        return max(self.least, -(-num_rows // self.unit) * self.unit)

    def cut(self, num_rows: int) -> list[tuple[int, int]]:
        """First row and the row after the last one of every GEMM; padding lies behind so many rows."""
        end = self.padded(num_rows)
        edges = [*range(0, end, MAX_GEMM_ROWS), end]
        if len(edges) > 2:
            edges[-2] = min(edges[-2], end - self.least)
        return [*pairwise(edges)]


def choose_rows(
    layer: LayerWeights, dtype: torch.dtype, batch_invariant: bool | None, ops: ElementwiseOps
) -> tuple[int | None, RowCounts | None]:
    """Rows of a tile, None: one holds all; and the row counts of GEMMs, None: any. Without a choice (None), half
    precision is invariant where that needs no tiles."""
    is_invariant = dtype != torch.float32 if batch_invariant is None else batch_invariant
    counts = invariant_counts(layer, dtype, ops) if is_invariant else None
    return TILE_ROWS if batch_invariant and counts is None else None, counts


def invariant_counts(layer: LayerWeights, dtype: torch.dtype, ops: ElementwiseOps) -> RowCounts | None:
    """Those in whose GEMMs, with rows of `dtype`, a row has the same bits: with the least first count, at most
    TILE_ROWS, and then the least unit. None where there are none."""
    equal, matrices = RowCounts(UNITS[0], UNITS[0]).all, _MATRICES
    if layer.experts is not None:  # kernels of `run_experts` add in one order, as GEMMs of one expert have fixed rows
        matrices = (*_MATRICES[:2], *(() if ops.has_grouped_gemm(layer.experts) else ("router",)))
    for matrix in matrices:
        equal = _equal_counts(_gemm(layer, matrix, dtype), equal)
    if layer.o.is_cuda:
        torch.cuda.empty_cache()  # what is free decides how large the KV cache is
    firsts = sorted((least, unit) for unit in UNITS for least in range(unit, TILE_ROWS + 1, unit) if least >= MIN_ROWS)
    candidates = (RowCounts(unit, least) for least, unit in firsts)
    return next((counts for counts in candidates if counts.all <= equal), None)


def keeps_bits(layer: LayerWeights, wide: Mapping[LoraMatrix, Tensor], counts: RowCounts | None) -> bool:
    """Do matrices with more columns, for LoRA adapters, give rows with zeros there the bits that they have without; and
    all rows the same bits in GEMMs of all these row counts?"""
    found = all(
        _keeps_bits(weight, getattr(layer, matrix).shape[1], layer.qkv_bias if matrix == "qkv" else None, counts)
        for matrix, weight in wide.items()
    )
    if layer.o.is_cuda:
        torch.cuda.empty_cache()
    return found


def _keeps_bits(wide: Tensor, size: int, bias: Tensor | None, row_counts: RowCounts | None) -> bool:
    """Of one matrix, whose own columns are the first `size`."""
    counts = (row_counts or RowCounts(MIN_ROWS, MIN_ROWS)).all
    x, tried = _random_rows(wide, wide.dtype), wide.clone()
    tried[:, size:].normal_()
    if row_counts is not None and _equal_counts(lambda count: F.linear(x[:count], tried, bias), counts) != counts:
        return False
    x[:, size:] = 0
    return all(
        torch.equal(F.linear(x[:count], tried, bias), F.linear(x[:count, :size], wide[:, :size], bias))
        for count in counts
    )


def _gemm(layer: LayerWeights, matrix: str, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """A GEMM of the first rows of the same random ones."""
    if layer.experts is not None and matrix == "router":
        router, rows = layer.experts.router, _random_rows(layer.experts.router, torch.float32)
        return lambda count: F.linear(rows[:count], router)
    weight = getattr(layer, matrix)
    bias = layer.qkv_bias if matrix == "qkv" else None
    x = _random_rows(weight, dtype)
    if layer.fp8_scales is None:
        return lambda count: F.linear(x[:count], weight, bias)
    (codes, row_scales), scales = quantise_rows(x), getattr(layer.fp8_scales, matrix)
    return lambda count: fp8_linear(codes[:count], row_scales[:count], weight, scales, bias)


def _random_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """As many as a GEMM has at most, always the same."""
    random = torch.Generator(weight.device).manual_seed(0)
    return torch.randn(MAX_GEMM_ROWS, weight.shape[1], generator=random, device=weight.device, dtype=dtype)


def _equal_counts(gemm: Callable[[int], Tensor], counts: set[int]) -> set[int]:
    """Those of the counts in whose GEMMs the rows have the bits that they have in the largest."""
    expected = gemm(MAX_GEMM_ROWS)
    return {count for count in counts if torch.equal(gemm(count), expected[:count])}
