"""The matrix products of a layer, and the MLP's activation, in plain XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from prefixwise.backends.jax.fp8 import fp8_linear, quantise_activations, quantise_rows, round_to_fp8
from prefixwise.backends.jax.weights import LayerWeights
from prefixwise.models.config import Activation
from prefixwise.models.lora import Matrix


def linear(x: jax.Array, weight: jax.Array, dtype: Any = None, *, bias: jax.Array | None = None) -> jax.Array:
    """x [T, in] times a weight [out, in] to [T, out], in x's dtype unless another is given."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide = jnp.float32 if bias is not None else dtype
    out = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=wide)
    if bias is None:
        return out
    return (out + bias.astype(jnp.float32)).astype(dtype or x.dtype)


def layer_linear(
    layer: LayerWeights, matrix: Matrix, x: jax.Array, dtype: Any = None, *, bias: jax.Array | None = None
) -> jax.Array:
    """x [T, in] times a matrix of one layer to [T, out]; rows are quantised where the matrix is in FP8. The part of a
    row that a shard has is then quantised by itself."""
    weight = getattr(layer, matrix)
    if layer.fp8_scales is None:
        return linear(x, weight, dtype, bias=bias)
    has_static_scale = matrix == "o" and layer.attention_norm is not None  # folded into weights: `forward/fp8.py`
    quantise = quantise_activations if matrix == "down" and layer.mlp_norm is not None else quantise_rows
    codes, row_scales = (round_to_fp8(x), None) if has_static_scale else quantise(x)
    return fp8_linear(codes, row_scales, weight, getattr(layer.fp8_scales, matrix), dtype or x.dtype, bias=bias)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """The activation, computed in float32 and rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    return (jax.nn.silu(wide) if activation == "silu" else jax.nn.gelu(wide, approximate=True)).astype(x.dtype)
