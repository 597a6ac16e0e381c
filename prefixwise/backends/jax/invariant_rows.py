"""Token buckets of a GPU in whose GEMMs a row has the same bits: what `batch_invariant` means there.

cuBLAS chooses a kernel by the number of rows. Most of its kernels add the products of a row in one order; those that
split the sum for few rows do not. So GEMMs of all buckets are tried once, when the model is loaded, with random
numbers, and buckets up to the last one that differs are not used. That holds for the programs of a model because
`COMPILER_OPTIONS` turns autotuning off: XLA would choose kernels by their times, and perhaps others at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from prefixwise.backends.jax.model import linear
from prefixwise.backends.jax.programs import COMPILER_OPTIONS
from prefixwise.backends.jax.weights import LayerWeights

MAX_SMALLEST = 2048  # tokens: with a larger one small requests would cost more than with tiles of fixed rows
_MATRICES = ("qkv", "o", "gate_up", "down")
_NUM_THREADS = 8  # that compile
_Gemm = Callable[[int], jax.Array]  # of the first rows of the same random ones


def invariant_buckets(layers: LayerWeights, buckets: Sequence[int], device: jax.Device) -> tuple[int, ...] | None:
    """The buckets that agree with all larger ones; None where the least of them is above MAX_SMALLEST. `layers`: the
    shapes and shardings of the matrices of all layers."""
    differs = {0}
    for name in _MATRICES if layers.router is None else _MATRICES[:2]:  # experts have tiles of fixed rows
        gemm = _gemm(layers, name, buckets, device)
        largest = gemm(buckets[-1])
        differs |= {size for size in buckets if not bool(jnp.array_equal(gemm(size), largest[:size]))}
    found = tuple(size for size in buckets if size > max(differs))
    return found if found and found[0] <= MAX_SMALLEST else None


def _gemm(layers: LayerWeights, name: str, buckets: Sequence[int], device: jax.Device) -> _Gemm:
    """With random numbers for one layer's matrix on one shard. The programs of all buckets are compiled at once."""
    stack = getattr(layers, name)
    _, num_out, num_in = stack.sharding.shard_shape(stack.shape)
    keys = jax.random.split(jax.device_put(jax.random.key(0), device))
    weight, x = (
        jax.random.normal(key, (rows, num_in), jnp.float32).astype(stack.dtype)
        for key, rows in zip(keys, (num_out, buckets[-1]), strict=True)
    )
    has_bias = name == "qkv" and layers.qkv_bias is not None
    is_summed = num_in < stack.shape[-1]  # over shards, in float32

    def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
        bias = weight[:, 0] if has_bias else None
        return linear(x, weight, jnp.float32 if is_summed else None, bias=bias)

    jitted = jax.jit(multiply, compiler_options=COMPILER_OPTIONS.get(device.platform))
    lowered = [jitted.lower(x[:size], weight) for size in buckets]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        compiled = dict(zip(buckets, pool.map(lambda each: each.compile(), lowered), strict=True))
    return lambda size: compiled[size](x[:size], weight)
