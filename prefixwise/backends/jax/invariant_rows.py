"""Token buckets of a GPU in whose GEMMs a row has the same bits: what `batch_invariant` means there.

cuBLAS chooses a kernel by the number of rows. Most of its kernels add the products of a row in one order; those that
split the sum for few rows do not. So GEMMs of all buckets are tried once, when the model is loaded, with random
numbers, and buckets up to the last one that differs are not used. That holds for the programs of a model because
`COMPILER_OPTIONS` turns autotuning off: XLA would choose kernels by their times, and perhaps others at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from prefixwise.backends.jax.model import layer_linear
from prefixwise.backends.jax.programs import COMPILER_OPTIONS
from prefixwise.backends.jax.weights import LayerWeights
from prefixwise.models.lora import Matrix

MAX_SMALLEST = 2048  # tokens: with a larger one small requests would cost more than with tiles of fixed rows
_MATRICES: tuple[Matrix, ...] = ("qkv", "o", "gate_up", "down")
_NUM_THREADS = 8  # that compile
_Gemm = Callable[[int], jax.Array]  # of the first rows of the same random ones


def invariant_buckets(
    layers: LayerWeights, dtype: DTypeLike, buckets: Sequence[int], device: jax.Device
) -> tuple[int, ...] | None:
    """The buckets that agree with all larger ones; None where the least of them is above MAX_SMALLEST. `layers`: the
    shapes and shardings of the matrices of all layers; `dtype`: of activations."""
    differs = {0}
    for name in _MATRICES if layers.router is None else _MATRICES[:2]:  # experts have tiles of fixed rows
        gemm = _gemm(layers, dtype, name, buckets, device)
        largest = gemm(buckets[-1])
        differs |= {size for size in buckets if not bool(jnp.array_equal(gemm(size), largest[:size]))}
    found = tuple(size for size in buckets if size > max(differs))
    return found if found and found[0] <= MAX_SMALLEST else None


def _gemm(layers: LayerWeights, dtype: DTypeLike, name: Matrix, buckets: Sequence[int], device: jax.Device) -> _Gemm:
    """With random numbers for one layer's matrix on one shard. The programs of all buckets are compiled at once."""
    stack = getattr(layers, name)
    _, num_out, num_in = stack.sharding.shard_shape(stack.shape)
    keys = jax.random.split(jax.device_put(jax.random.key(0), device))
    weight, x = (
        jax.random.normal(key, (rows, num_in), jnp.float32).astype(each)
        for key, rows, each in zip(keys, (num_out, buckets[-1]), (stack.dtype, dtype), strict=True)
    )
    is_summed = num_in < stack.shape[-1]  # over shards, in float32
    numbers = weight[:, 0].astype(jnp.float32)

    def multiply(x: jax.Array, weight: jax.Array, numbers: jax.Array) -> jax.Array:
        bias = numbers if name == "qkv" and layers.qkv_bias is not None else None
        scales = None if layers.fp8_scales is None else layers.fp8_scales._replace(**{name: numbers})
        one: Any = {name: weight, "fp8_scales": scales}
        return layer_linear(layers._replace(**one), name, x, jnp.float32 if is_summed else None, bias=bias)

    jitted = jax.jit(multiply, compiler_options=COMPILER_OPTIONS.get(device.platform))
    lowered = [jitted.lower(x[:size], weight, numbers) for size in buckets]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        compiled = dict(zip(buckets, pool.map(lambda each: each.compile(), lowered), strict=True))
    return lambda size: compiled[size](x[:size], weight, numbers)
