"""FP8 (e4m3) as all backends have it: its numbers, and the models that it serves.

Attention's output has one static scale for each layer, as no program of attention sees a whole row. It is folded into
the scales of V's and O's weights while a model is loaded, so attention rounds its output to FP8 as it is. Behind a
norm, a value cannot exceed what its row of V's matrix and the norm's weights allow, and attention's output, a mean of
values, cannot either: V is multiplied by a power of two with which that bound fits FP8, and O divided by it. Both
change exactly.

The MLP's activations have scales of their token, powers of two of at least 1, as a GEMM that activates writes their
codes itself: each part of ACTIVATION_PART columns is rounded with the least such scale that it fits, and where another
part of the row has a larger one, the codes are rounded again with that. Up's scales are multiplied by a power of two
that brings activations near 1, and those of down divided by it, so nearly all rows have a scale of 1. That one is an
estimate, not a bound: gate and up are taken for independent numbers of a standard deviation of their rows' norms.
"""

from __future__ import annotations

import math

from prefixwise.contract.errors import BackendError
from prefixwise.models.config import ModelConfig

FP8_MAX = 448.0  # the largest number of e4m3
SMALLEST_MAX = 1e-12  # a row of smaller numbers has a scale as if this were its largest: zeros have one, too
MIN_CAPABILITY = (8, 9)  # Ada: the first NVIDIA GPU with FP8 GEMMs
MULTIPLE = 16  # of the columns in and the rows out of an FP8 GEMM
ACTIVATION_PART = 32  # columns
EXPONENT_OF_ONE = 127  # of a float32, biased
ABOVE_448 = 0x1FFFFF  # carries the mantissa of a float32 that is above 448's into its exponent
# The code of a number is off by 1/17 of it at most: those of a norm are, and those of values in a KV cache in FP8.
# Roundings to bfloat16 are less than 1/100.
_VALUE_MARGIN = 1.15


def value_factor(bound: float) -> float:
    """The power of two that a layer's values are multiplied by, if none can exceed `bound` before roundings."""
    return 2.0 ** (math.frexp(FP8_MAX / (_VALUE_MARGIN * max(bound, SMALLEST_MAX)))[1] - 1)


def up_factor(gate_norm: float, up_norm: float) -> float:
    """The power of two that a layer's up is multiplied by. The norms are the root mean squares of those of the rows of
    gate and up, behind the norm's weights. Of small numbers SiLU and GELU are half."""
    expected = gate_norm * up_norm / 2
    return 2.0 ** -round(math.log2(max(expected, SMALLEST_MAX))) if math.isfinite(expected) else 1.0


def check_fp8_device(platform: str, capability: tuple[int, int] | None) -> None:
    """Raises BackendError for a device without FP8 GEMMs. `capability`: of an NVIDIA GPU, else None."""
    if capability is None:
        raise BackendError(
            f"quantization fp8 needs a CUDA device, got {platform}; what FP8 weights do to a model's scores can be "
            "seen on a CPU with `prefixwise validate quantization`"
        )
    if capability < MIN_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
        raise BackendError(f"quantization fp8 needs compute capability {least} (Ada, Hopper) or newer, got {found}")


def check_fp8_model(config: ModelConfig, dtype: str, tp_size: int = 1) -> None:
    """Raises BackendError for a model that has no FP8. `tp_size`: devices that share its matrices."""
    if dtype != "bfloat16":
        raise BackendError(f"quantization fp8 needs dtype bfloat16 for the rest of the model, got {dtype}")
    if config.experts is not None:
        raise BackendError("quantization fp8 does not serve models with experts")
    sizes = {"hidden_size": config.model_size, "intermediate_size": config.mlp_size}
    sizes["heads x head_dim"] = config.num_heads * config.head_size
    sizes["KV heads x head_dim"] = config.num_kv_heads * config.head_size
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise BackendError(f"quantization fp8 needs a {name} that is a multiple of {MULTIPLE}, got {size}")
    if tp_size > 1 and (config.mlp_size % (MULTIPLE * tp_size) or config.head_size % MULTIPLE):
        raise BackendError(
            f"quantization fp8 with tp_size={tp_size} needs an intermediate_size that is a multiple of "
            f"{MULTIPLE * tp_size} and a head_dim that is one of {MULTIPLE}, got {config.mlp_size} and "
            f"{config.head_size}"
        )
