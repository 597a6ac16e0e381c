"""Row counts of GEMMs on a GPU in which a row has the same bits: what `batch_invariant` pads forwards to.

cuBLAS chooses a kernel by the number of rows. Most of its kernels add the products of a row in one order; those that
split the sum for few rows do not. So every count that a forward can have is tried once, when the model is loaded, with
the model's own weights and random rows: a kernel with another order shows in some of the many sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.fp8 import fp8_linear, quantise_rows
from prefixwise.backends.torch.weights import LayerWeights
from prefixwise.models.lora import Matrix as LoraMatrix

MAX_GEMM_ROWS = 16_384  # more rows are cut into GEMMs of so many
UNITS = (256, 512, 1024, 2048)
TILE_ROWS = 2048  # where GEMMs of no other counts give the same bits
_MATRICES = ("qkv", "o", "gate_up", "down")


def choose_rows(layer: LayerWeights, dtype: torch.dtype, batch_invariant: bool | None) -> tuple[int | None, int | None]:
    """Rows of a tile, None: one holds all; and what the rows of a GEMM are a multiple of, None: they may be any number.
    Without a choice (None), half precision is invariant where that needs no tiles."""
    is_invariant = dtype != torch.float32 if batch_invariant is None else batch_invariant
    unit = invariant_unit(layer, dtype) if is_invariant else None
    return TILE_ROWS if batch_invariant and unit is None else None, unit


def invariant_unit(layer: LayerWeights, dtype: torch.dtype) -> int | None:
    """The least of `UNITS` of which GEMMs of all multiples, up to MAX_GEMM_ROWS rows, give a row the same bits, with
    rows of `dtype`; None where there is none."""
    equal = set(range(UNITS[0], MAX_GEMM_ROWS + 1, UNITS[0]))
    for matrix in _MATRICES if layer.experts is None else _MATRICES[:2]:  # grouped GEMMs add in one order
        equal = _equal_counts(_gemm(layer, matrix, dtype), equal)
    if layer.o.is_cuda:
        torch.cuda.empty_cache()  # what is free decides how large the KV cache is
    return next((unit for unit in UNITS if equal.issuperset(range(unit, MAX_GEMM_ROWS + 1, unit))), None)


def keeps_bits(layer: LayerWeights, wide: Mapping[LoraMatrix, Tensor], unit: int | None) -> bool:
    """Do matrices with more columns, for LoRA adapters, give rows with zeros there the bits that they have without; and
    all rows the same bits in GEMMs of all multiples of `unit`?"""
    found = all(
        _keeps_bits(weight, getattr(layer, matrix).shape[1], layer.qkv_bias if matrix == "qkv" else None, unit)
        for matrix, weight in wide.items()
    )
    if layer.o.is_cuda:
        torch.cuda.empty_cache()
    return found


def _keeps_bits(wide: Tensor, size: int, bias: Tensor | None, unit: int | None) -> bool:
    """Of one matrix, whose own columns are the first `size`."""
    counts = set(range(unit or UNITS[0], MAX_GEMM_ROWS + 1, unit or UNITS[0]))
    x, tried = _random_rows(wide, wide.dtype), wide.clone()
    tried[:, size:].normal_()
    if unit is not None and _equal_counts(lambda count: F.linear(x[:count], tried, bias), counts) != counts:
        return False
    x[:, size:] = 0
    return all(
        torch.equal(F.linear(x[:count], tried, bias), F.linear(x[:count, :size], wide[:, :size], bias))
        for count in counts
    )


def _gemm(layer: LayerWeights, matrix: str, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """A GEMM of the first rows of the same random ones."""
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
