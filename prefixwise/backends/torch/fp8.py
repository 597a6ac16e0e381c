"""FP8 (e4m3): weights with one scale per output channel, activations with one per token, GEMMs of the two.

    x [R, I] ~ codes * row scale        a row's scale is its largest magnitude / 448, and sees that row alone
    weight [O, I] ~ codes * channel scale

A GPU multiplies the codes and applies both scales to the sums. Elsewhere the same numbers are multiplied in float32:
that is what tests hold the device to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixwise.forward.fp8 import FP8_MAX, SMALLEST_MAX, check_fp8_device, check_fp8_model
from prefixwise.models.config import ModelConfig

FP8 = torch.float8_e4m3fn


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


def fp8_linear(
    x: Tensor,  # [R, I] codes
    row_scales: Tensor,  # [R] float32
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
            row_scales[:, None],
            scales[None],
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=out,
        )
        return found
    wide = (x.float() @ weight.float().T) * row_scales[:, None] * scales
    if bias is not None:
        wide += bias.float()
    return wide.to(torch.bfloat16) if out is None else out.copy_(wide)
