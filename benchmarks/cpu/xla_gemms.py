"""The model's own four GEMMs on all cores, as XLA compiles them; each number of rows, the fastest counts."""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu.cases import Role
from benchmarks.cpu.peer import Peer, Round
from benchmarks.gemm_rate import model_products

_DTYPE = jnp.float32  # what our JAX backend takes on a CPU


class XlaProducts(Peer):
    """One program for each product and number of rows."""

    def __init__(self, role: Role) -> None:
        self._scale = role.scale
        self._shapes = model_products(self._scale.model)
        random = np.random.default_rng(0)
        self._weights = [jnp.asarray(random.standard_normal((o, i), np.float32), _DTYPE) for o, i in self._shapes]
        self._multiply = jax.jit(lambda x, weight: x @ weight.T)

    def prepare(self) -> dict[str, Any]:
        tried = [{rows: self._time(rows).rate for rows in self._scale.gemm_rows} for _ in range(2)][-1]
        return {
            "versions": {"jax": jax.__version__},
            "settings": {"dtype": str(jnp.dtype(_DTYPE)), "cores": os.cpu_count()},
            "tflops_by_kind": {f"{rows} rows": round(rate / 1e12, 3) for rows, rate in tried.items()},
        }

    def run(self, seed: int) -> Round:
        return max((self._time(rows) for rows in self._scale.gemm_rows), key=lambda each: each.rate)

    def _time(self, rows: int) -> Round:
        inputs = [jnp.ones((rows, i), _DTYPE) for _, i in self._shapes]
        begin = perf_counter()
        for _ in range(self._scale.gemm_repeats):
            for x, weight in zip(inputs, self._weights, strict=True):
                self._multiply(x, weight).block_until_ready()
        flops = self._scale.gemm_repeats * sum(2 * rows * o * i for o, i in self._shapes)
        return Round(flops, perf_counter() - begin)
