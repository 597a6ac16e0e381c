"""FP8 (e4m3): weights with one scale per output channel, activations with one per token, GEMMs of the two.

    x [R, I] ~ codes * row scale        a row's scale is its largest magnitude / 448, and sees that row alone
    weight [O, I] ~ codes * channel scale

A GPU multiplies the codes and applies both scales to the sums. Elsewhere the same numbers are multiplied in float32:
that is what tests hold the device to. The scale of attention's output is folded into weights, and those of the MLP's
activations are powers of two (`forward/fp8.py`).

The KV cache in FP8 is independent of that: a key or a value of one token and one KV head has a scale of its own, the
least power of two with which its largest magnitude fits. A code times such a scale is a number of bfloat16, so
attention computes with exactly what the codes stand for. Codes have exponents, too: a finer scale would be more exact
only for numbers of less than 1/14,000 of the largest.

Prefix attention in FP8 multiplies queries by keys, both rounded to e4m3 without a scale: with one for each key, every
score would be multiplied once more. The KV cache holds these keys; its values have the model's dtype.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it
from torch import Tensor

from prefixwise.forward.fp8 import (
    ABOVE_448,
    ACTIVATION_PART,
    EXPONENT_OF_ONE,
    FP8_MAX,
    SMALLEST_MAX,
    check_fp8_device,
    check_fp8_model,
)
from prefixwise.models.config import ModelConfig

FP8 = torch.float8_e4m3fn
KVFormat = Literal["auto", "fp8", "fp8_keys"]  # of the KV cache; the last for prefix attention in FP8
KV_SCALE_BYTES = 1  # of a key or a value of one KV head: an exponent


def check_fp8(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises BackendError where this model has no FP8 on this device."""
    check_fp8_device(device.type, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    check_fp8_model(config, str(dtype).removeprefix("torch."))


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[R, I] to codes [R, I] and scales [R] float32. A row of zeros has codes of 0."""
    wide = rows.float()
    largest = wide.abs().amax(1).clamp_(min=SMALLEST_MAX)
    factors = torch.full_like(largest, FP8_MAX) / largest  # a number over a tensor is its reciprocal times the number
    return (wide * factors[:, None]).to(FP8), largest * (1 / FP8_MAX)


def quantise_activations(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[R, F] of the MLP to codes [R, F] and scales [R] float32, powers of two."""
    size = rows.shape[1]
    parts = F.pad(rows.float(), (0, -size % ACTIVATION_PART)).view(len(rows), -1, ACTIVATION_PART)
    exponents = _exponents(parts).clamp_(min=EXPONENT_OF_ONE)
    largest = exponents.amax(1, keepdim=True)
    codes = (parts * _powers(2 * EXPONENT_OF_ONE - exponents)[..., None]).to(FP8)
    codes = (codes.float() * _powers(exponents - largest + EXPONENT_OF_ONE)[..., None]).to(FP8)
    return codes.flatten(1)[:, :size].contiguous(), _powers(largest[:, 0])


def quantise_heads(heads: Tensor) -> tuple[Tensor, Tensor]:
    """[..., H] to codes [..., H] and the biased exponents [...] uint8 of their scales, as the KV cache has them."""
    wide = heads.float()
    exponents = _exponents(wide)
    return (wide * _powers(2 * EXPONENT_OF_ONE - exponents)[..., None]).to(FP8), exponents.to(torch.uint8)


def _exponents(numbers: Tensor) -> Tensor:
    """Biased exponents [...] of the least powers of two with which numbers [..., H] fit."""
    bits = numbers.abs().amax(-1).view(torch.int32)
    return (((bits + ABOVE_448) >> 23) - 8).clamp_(1, 2 * EXPONENT_OF_ONE)  # 448 is 1.75 * 2**8


def _powers(exponents: Tensor) -> Tensor:
    """Of two, of biased exponents."""
    return (exponents << 23).view(torch.float32)


def dequantise_heads(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [..., H] and exponents [...] to the numbers that they stand for."""
    return (codes.float() * _powers(exponents.to(torch.int32))[..., None]).to(dtype)


def round_to_fp8(numbers: Tensor) -> Tensor:
    """To codes without a scale, as attention's output and prefix attention in FP8 have them: larger numbers become
    448."""
    return numbers.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def fp8_linear(
    x: Tensor,  # [R, I] codes
    row_scales: Tensor | None,  # [R] float32; None: 1
    weight: Tensor,  # [O, I] codes
    scales: Tensor,  # [O] float32
    bias: Tensor | None = None,  # [O] bfloat16
    out: Tensor | None = None,
) -> Tensor:
    """[R, O] in bfloat16, or in the dtype of `out`. On a GPU a row has the same bits for every R that was tried."""
    if x.is_cuda:
        found: Tensor = torch._scaled_mm(
            x,
            weight.T,
            scales.new_ones(len(x), 1) if row_scales is None else row_scales[:, None],
            scales[None],
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=out,
        )
        return found
    wide = x.float() @ weight.float().T
    wide = (wide if row_scales is None else wide * row_scales[:, None]) * scales
    if bias is not None:
        wide += bias.float()
    return wide.to(torch.bfloat16) if out is None else out.copy_(wide)
