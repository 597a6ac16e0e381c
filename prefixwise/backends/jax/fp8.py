"""FP8 (e4m3) in JAX: weights with one scale per output channel, activations with one per token, GEMMs of the two.

The codes are those of `backends/torch/fp8.py`. On a GPU, XLA makes a dot of two arrays of codes a cuBLASLt FP8 GEMM
with scales of 1, and fuses the rest with its neighbours: a token's scale and codes with the norm or the activation
before the GEMM, both scales with what reads its sums. The scale of attention's output is folded into weights, and those
of the MLP's activations are powers of two (`forward/fp8.py`). A CPU multiplies the codes in float32, which is for
tests.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.forward.fp8 import ABOVE_448, ACTIVATION_PART, EXPONENT_OF_ONE, FP8_MAX, SMALLEST_MAX

FP8 = jnp.float8_e4m3fn
_BFLOAT16_BITS = {"exponent_bits": 8, "mantissa_bits": 7}


def quantise_rows(rows: jax.Array, shards: str | None = None) -> tuple[jax.Array, jax.Array]:
    """[R, I] to codes [R, I] and scales [R] float32. A row of zeros has codes of 0.

    `shards`: an axis of the mesh along which the columns are split; the scale is then that of the whole row.
    """
    wide = _float32(rows)
    largest = jnp.max(jnp.abs(wide), axis=1)
    if shards is not None:
        largest = lax.pmax(largest, shards)
    largest = jnp.maximum(largest, SMALLEST_MAX)
    return (wide * (FP8_MAX / largest)[:, None]).astype(FP8), largest * (1 / FP8_MAX)


def quantise_activations(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[R, F] of the MLP to codes [R, F] and scales [R] float32, powers of two."""
    num_rows, size = rows.shape
    padded = jnp.pad(_float32(rows), ((0, 0), (0, -size % ACTIVATION_PART)))
    parts = padded.reshape(num_rows, -1, ACTIVATION_PART)
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(parts), axis=2), jnp.int32)
    exponents = jnp.clip(((bits + ABOVE_448) >> 23) - 8, EXPONENT_OF_ONE, 2 * EXPONENT_OF_ONE)  # 448 is 1.75 * 2**8
    largest = jnp.max(exponents, axis=1, keepdims=True)
    rounded = _rounded_to_fp8(parts * _powers(2 * EXPONENT_OF_ONE - exponents)[..., None])
    codes = (rounded * _powers(exponents - largest + EXPONENT_OF_ONE)[..., None]).astype(FP8)
    return codes.reshape(num_rows, -1)[:, :size], _powers(largest[:, 0])


def _rounded_to_fp8(numbers: jax.Array) -> jax.Array:
    """In float32, as XLA may leave out a conversion to FP8 behind which there is one back."""
    steps = lax.round(numbers * 512, lax.RoundingMethod.TO_NEAREST_EVEN) / 512  # of numbers below 2**-6
    return jnp.where(jnp.abs(numbers) < 2**-6, steps, lax.reduce_precision(numbers, exponent_bits=8, mantissa_bits=3))


def _powers(exponents: jax.Array) -> jax.Array:
    """Of two, of biased exponents."""
    return lax.bitcast_convert_type(exponents << 23, jnp.float32)


def round_to_fp8(rows: jax.Array) -> jax.Array:
    """To codes without a scale: larger numbers become 448."""
    return jnp.clip(_float32(rows), -FP8_MAX, FP8_MAX).astype(FP8)


def fp8_linear(
    x: jax.Array,  # [R, I] codes
    row_scales: jax.Array | None,  # [R] float32; None: 1
    weight: jax.Array,  # [O, I] codes
    scales: jax.Array,  # [O] float32
    dtype: Any = jnp.bfloat16,
    *,
    bias: jax.Array | None = None,  # [O]
) -> jax.Array:
    """[R, O] in `dtype`, which is also that of the sums of codes: a GPU writes and reads bfloat16 in half the time."""
    sums = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    out = sums.astype(jnp.float32)
    out = (out if row_scales is None else out * row_scales[:, None]) * scales
    if bias is not None:
        out += bias.astype(jnp.float32)
    return _rounded(out, dtype)


def _float32(rows: jax.Array) -> jax.Array:
    """XLA may leave out the rounding of a bfloat16 array that is read as float32, where it does not have to write it.
    Then codes would depend on what it fuses."""
    wide = rows.astype(jnp.float32)
    return lax.reduce_precision(wide, **_BFLOAT16_BITS) if rows.dtype == jnp.bfloat16 else wide


def _rounded(wide: jax.Array, dtype: Any) -> jax.Array:
    if jnp.dtype(dtype) == jnp.bfloat16:
        wide = lax.reduce_precision(wide, **_BFLOAT16_BITS)
    return wide.astype(dtype)
