"""The rate of a model's own four GEMMs, one after the other: what a forward pass is measured against."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

from prefixwise.models.config import ModelConfig

REPEATS = 8  # of all four products before the clock is read, so that launching them does not count


def gemm_rate(config: ModelConfig, backend: str, device_kind: str, rows: int, dtype: str = "bfloat16") -> float:
    """FLOP/s over this many rows, through the backend's framework; the median of ten after two."""
    shapes = model_products(config)
    once = (_jax_products if backend == "jax" else _torch_products)(shapes, device_kind, rows, dtype)
    seconds = [_time(once) for _ in range(12)][2:]
    return REPEATS * sum(2 * rows * o * i for o, i in shapes) / median(seconds)


def model_products(config: ModelConfig) -> list[tuple[int, int]]:
    """[rows out, columns in] of QKV, O, gate-up and down."""
    d, f, h = config.model_size, config.mlp_size, config.head_size
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    return [((num_heads + 2 * num_kv_heads) * h, d), (d, num_heads * h), (2 * f, d), (d, f)]


def _time(once: Callable[[], None]) -> float:
    begin = perf_counter()
    once()
    return perf_counter() - begin


def _torch_products(shapes: list[tuple[int, int]], device_kind: str, rows: int, dtype: str) -> Callable[[], None]:
    import torch

    device = torch.device("cuda" if device_kind == "gpu" else "cpu")
    kind = getattr(torch, dtype)
    pairs = [
        (torch.randn(rows, i, device=device).to(kind), torch.randn(o, i, device=device).to(kind)) for o, i in shapes
    ]

    def once() -> None:
        for x, weight in REPEATS * pairs:
            torch.nn.functional.linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return once


def _jax_products(shapes: list[tuple[int, int]], device_kind: str, rows: int, dtype: str) -> Callable[[], None]:
    import jax
    import jax.numpy as jnp

    key = jax.random.key(0)
    pairs = [
        (jax.random.normal(key, (rows, i), jnp.dtype(dtype)), jax.random.normal(key, (o, i), jnp.dtype(dtype)))
        for o, i in shapes
    ]
    product = jax.jit(lambda x, weight: x @ weight.T)

    def once() -> None:
        jax.block_until_ready([product(x, weight) for x, weight in REPEATS * pairs])  # type: ignore[no-untyped-call]

    return once
