"""Token buckets of a GPU in whose GEMMs a row has the same bits: what `batch_invariant` means there.

cuBLAS chooses a kernel by the number of rows. Most of its kernels add the products of a row in one order; those that
split the sum for few rows do not. So GEMMs of all buckets are tried once, when the model is loaded, with random
numbers, and buckets up to the last one that differs are not used. That holds for the programs of a model because
`COMPILER_OPTIONS` turns autotuning off: XLA would choose kernels by their times, and perhaps others at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled
from jax.typing import DTypeLike

from prefixwise.backends.jax.linear import layer_linear
from prefixwise.backends.jax.programs import COMPILER_OPTIONS
from prefixwise.backends.jax.weights import LayerWeights
from prefixwise.models.lora import Matrix

MAX_SMALLEST = 2048  # tokens: with a larger one small requests would cost more than with tiles of fixed rows
_MATRICES: tuple[Matrix, ...] = ("qkv", "o", "gate_up", "down")
_NUM_THREADS = 16  # that compile


def invariant_buckets(
    layers: LayerWeights, dtype: DTypeLike, buckets: Sequence[int], device: jax.Device, fuses_gate: bool
) -> tuple[int, ...] | None:
    """The buckets that agree with all larger ones; None where the least of them is above MAX_SMALLEST. `layers`: the
    shapes and shardings of the matrices of all layers; `dtype`: of activations; `fuses_gate`: one kernel multiplies any
    number of rows by gate and up, in one order."""
    names = _MATRICES if layers.router is None else _MATRICES[:2]  # experts have tiles of fixed rows
    names = tuple(name for name in names if name != "gate_up" or not fuses_gate)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        trials = [_begin_trial(layers, dtype, name, buckets, device, pool) for name in names]
        differing = set().union(*(differing() for differing in trials))
    found = tuple(size for size in buckets if size > max(differing, default=0))
    return found if found and found[0] <= MAX_SMALLEST else None


def _begin_trial(
    layers: LayerWeights, dtype: DTypeLike, name: Matrix, buckets: Sequence[int], device: jax.Device, pool: Executor
) -> Callable[[], set[int]]:
    """Let the pool compile GEMMs with one layer's matrix on one shard. The returned function runs them on the first
    rows of the same random ones, and finds the buckets in which a row has other bits than in the largest."""
    stack = getattr(layers, name)
    _, num_out, num_in = stack.sharding.shard_shape(stack.shape)
    is_summed = num_in < stack.shape[-1]  # over shards, in float32

    def multiply(x: jax.Array, weight: jax.Array, numbers: jax.Array) -> jax.Array:
        bias = numbers if name == "qkv" and layers.qkv_bias is not None else None
        scales = None if layers.fp8_scales is None else layers.fp8_scales._replace(**{name: numbers})
        one: Any = {name: weight, "fp8_scales": scales}
        return layer_linear(layers._replace(**one), name, x, jnp.float32 if is_summed else None, bias=bias)

    def differs(size: int, x: jax.Array, weight: jax.Array, numbers: jax.Array, largest: jax.Array) -> jax.Array:
        """The barriers keep the GEMM apart from what surrounds it: it is that of `multiply`."""
        rows = lax.optimization_barrier(x[:size])
        return (lax.optimization_barrier(multiply(rows, weight, numbers)) != largest[:size]).any()

    def random_inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0))
        weight, x = (
            jax.random.normal(key, (rows, num_in), jnp.float32).astype(each)
            for key, rows, each in zip(keys, (num_out, buckets[-1]), (stack.dtype, dtype), strict=True)
        )
        return x, weight, weight[:, 0].astype(jnp.float32)

    def begin(function: Callable[..., Any], *shapes: Any) -> Future[Compiled]:
        jitted = jax.jit(function, out_shardings=on_device, compiler_options=COMPILER_OPTIONS.get(device.platform))
        return pool.submit(jitted.lower(*shapes).compile)

    on_device = SingleDeviceSharding(device)
    inputs = jax.eval_shape(random_inputs)
    make, largest = begin(random_inputs), begin(multiply, *inputs)
    whole = jax.eval_shape(multiply, *inputs)
    smaller = {size: begin(partial(differs, size), *inputs, whole) for size in buckets[:-1]}

    def differing() -> set[int]:
        arrays = make.result()()
        rows = largest.result()(*arrays)
        return {size for size, program in smaller.items() if bool(program.result()(*arrays, rows))}

    return differing
