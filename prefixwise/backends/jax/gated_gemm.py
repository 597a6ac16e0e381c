"""Whether the MLP's first GEMM and its activation can be one kernel here (`hopper_gemm.py`).

Trunks then have it for every number of rows, so that this number does not decide a row's bits. The program of the last
layer's MLP, which has the same few rows at any time, keeps XLA's GEMM. Where LoRA adapters may be loaded, all programs
do: those with adapters need gate and up, and a row without one is to have the same bits beside them and alone.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np

from prefixwise.backends.jax.devices import DeviceChoice
from prefixwise.backends.jax.executables import ExecutableStore
from prefixwise.backends.jax.linear import activate, linear
from prefixwise.forward.backend import BackendOptions
from prefixwise.models.config import ModelConfig

log = logging.getLogger("prefixwise")

_COLUMN_MULTIPLE = 128  # of the MLP: a tile has so many
_INNER_MULTIPLE = 64  # of the model: a step has so many
_LEAST_INNER = 512  # in fewer steps a tile would be loaded no earlier than it is needed
_TOLERANCE = 2**-6  # two roundings to bfloat16


def has_gated_gemm(
    config: ModelConfig,
    options: BackendOptions,
    choice: DeviceChoice,
    dtype: jnp.dtype,
    device: jax.Device,
    store: ExecutableStore,
) -> bool:
    """Does the kernel take such a model, and does it work on the device? That is tried once for all starts."""
    if not _takes(config, options, choice.kernel_platform, dtype):
        return False
    probe = partial(_probe, config, dtype, device)
    try:
        return bool(store.recall(f"gated GEMM works: {config.model_size} {config.activation} {dtype}", probe))
    except Exception as error:  # of jax and its compilers, and of many types
        log.warning("a faster GEMM for the MLP does not work here, and XLA's is used: %s", error)
        return False


def _takes(config: ModelConfig, options: BackendOptions, platform: str, dtype: jnp.dtype) -> bool:
    if platform != "hopper" or dtype not in (jnp.bfloat16, jnp.float16) or find_spec("absl") is None:
        return False
    if config.experts is not None or options.tp_size > 1 or options.quantization is not None or options.max_loras:
        return False
    inner = config.model_size
    return config.mlp_size % _COLUMN_MULTIPLE == 0 and inner % _INNER_MULTIPLE == 0 and inner >= _LEAST_INNER


def _probe(config: ModelConfig, dtype: jnp.dtype, device: jax.Device) -> bool:
    """Raises what the compiler raises, and ArithmeticError where the result is another than XLA's."""
    from prefixwise.backends.jax.hopper_gemm import COLUMNS, NUM_CTAS, TILE_ROWS, gated_gemm

    with jax.default_device(device):
        keys, inner = jax.random.split(jax.random.key(0)), config.model_size
        num_rows = (NUM_CTAS // 2 + 1) * TILE_ROWS  # and two columns of tiles: some CTAs have more than one tile
        x = jax.random.normal(keys[0], (num_rows, inner), dtype)
        weights = jax.random.normal(keys[1], (2, 4 * COLUMNS, inner), dtype) / math.sqrt(inner)
        found = jax.jit(gated_gemm, static_argnums=3)(x, weights, jnp.int32(1), config.activation)
        gate, up = jnp.split(linear(x, weights[1]), 2, axis=-1)
        expected = activate(gate, config.activation) * up
    error = np.abs(np.asarray(found, np.float32) - np.asarray(expected, np.float32)).max()
    if not error <= _TOLERANCE * np.abs(np.asarray(expected, np.float32)).max():
        raise ArithmeticError(f"the largest difference from XLA's result is {error}")
    return True
