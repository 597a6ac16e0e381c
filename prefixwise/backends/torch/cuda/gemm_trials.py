"""Does a GEMM that does the next step too (`hopper_gemm.py`) give the bits of a GEMM and the kernel behind it?

Tried once when a model is loaded, with the model's own weights and random rows, as `invariant_rows.py` tries cuBLAS.
Other bits come from another order of sums. What is further off than that is wrong, and an ArithmeticError.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.backends.torch.cuda.fp8_kernels import gate_fp8, rescale
from prefixwise.backends.torch.cuda.fused_elementwise import gate
from prefixwise.backends.torch.cuda.hopper_gemm import (
    MIN_ROWS,
    gated_gemm,
    num_processors,
    residual_gemm,
    rows_of_both_tiles,
)
from prefixwise.backends.torch.fp8 import fp8_linear, quantise_rows
from prefixwise.forward.fp8 import ACTIVATION_PART
from prefixwise.models.config import Activation

_TOLERANCE = 0.05  # of the norm; where sums have other last bits, a few codes in FP8 move by 1/8 of their number


def gates_alike(weight: Tensor, scales: Tensor | None, activation: Activation) -> bool:
    """Of the matrix [2 F, D] of gate and up, in FP8 with its scales [2 F]."""
    size = len(weight) // 2
    if scales is not None:
        return _gates_codes_alike(weight, scales, activation)
    x = _random_rows(weight.shape[1], weight, weight.dtype)
    found, expected = (x.new_empty(len(x), size) for _ in range(2))
    gated_gemm(x, weight, activation, found)
    gate(F.linear(x, weight), activation, expected)
    _check_near(found, expected)
    return torch.equal(found, expected)


def _gates_codes_alike(weight: Tensor, scales: Tensor, activation: Activation) -> bool:
    """In FP8: the codes of the product, and their scales."""
    rows = _random_rows(weight.shape[1], weight, torch.bfloat16)
    rows *= 2 ** (torch.arange(len(rows), device=rows.device) % 8)[:, None]  # some are too large for a scale of 1
    codes, row_scales = quantise_rows(rows)
    size = len(weight) // 2
    found, expected = ((codes.new_empty(len(codes), size), torch.empty_like(row_scales)) for _ in range(2))
    exponents = codes.new_empty(size // ACTIVATION_PART, len(codes), dtype=torch.uint8)
    gated_gemm(codes, weight, activation, found[0], (row_scales, scales), exponents)
    rescale(found[0], exponents, found[1])
    gate_fp8(fp8_linear(codes, row_scales, weight, scales), activation, *expected)
    _check_near(*(of_rows.float() * scale[:, None] for of_rows, scale in (found, expected)))
    return torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(found[1], expected[1])


def _check_near(found: Tensor, expected: Tensor) -> None:
    expected = expected.float()
    error = float((found.float() - expected).norm() / expected.norm())
    if not error <= _TOLERANCE:  # NaN is not
        raise ArithmeticError(f"its result is off by {error:.3g} of its norm")


def adds_alike(weight: Tensor, scales: Tensor | None, row_unit: int) -> bool:
    """Of the matrix [D, in] of O or down, in FP8 with its scales [D]. Some tiles are halved, and some are not.

    `row_unit`: forwards have multiples of so many rows, and with other numbers cuBLAS may give other bits.
    """
    dtype = weight.dtype if scales is None else torch.bfloat16
    num_rows = rows_of_both_tiles(len(weight), num_processors(weight), row_unit)
    x, residual = (_random_rows(size, weight, dtype, num_rows) for size in (weight.shape[1], len(weight)))
    if scales is None:
        expected = residual + F.linear(x, weight)
        residual_gemm(x, weight, residual)
    else:
        codes, row_scales = quantise_rows(x)
        expected = residual + fp8_linear(codes, row_scales, weight, scales)
        residual_gemm(codes, weight, residual, (row_scales, scales))
    return torch.equal(residual, expected)


def _random_rows(size: int, weight: Tensor, dtype: torch.dtype, num_rows: int = MIN_ROWS) -> Tensor:
    """On the device of the weight, always the same."""
    random = torch.Generator(weight.device).manual_seed(0)
    return torch.randn(num_rows, size, generator=random, device=weight.device).to(dtype)
