"""Norms, rotation and the write to the KV cache: the kernel against the plain operations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prefixwise.backends.jax.kv_cache import KVCacheArrays
from prefixwise.backends.jax.qk_norm_rope import CacheWrite, HeadNorms, RopeTable, qk_norm_rope, qk_norm_rope_and_cache
from prefixwise.forward.kv_pages import NOT_CACHED
from tests.backends.jax.quick_compiler import QUICKLY

NUM_LAYERS, NUM_TOKENS, NUM_SLOTS, EPS = 3, 6, 16, 1e-6


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Every block of heads has its program; without norms or the write one of several blocks and odd sizes will do
    every day."""
    if test != "test_the_kernel_does_what_the_plain_operations_do" or parameters["heads"] == (9, 3, 96):
        return False
    return not (parameters["has_norm"] and parameters["writes_cache"])


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.bfloat16))


def rope(head_size: int) -> RopeTable:
    angles = np.arange(NUM_TOKENS)[:, None, None] * np.linspace(1, 0.01, head_size // 2)
    return RopeTable(*(jnp.asarray(each.astype(np.float32)) for each in (np.cos(angles), np.sin(angles))))


@partial(jax.jit, static_argnames="num_kv_heads", compiler_options=QUICKLY)
def interpreted(
    qkv: jax.Array, num_kv_heads: int, norms: HeadNorms, layer: jax.Array, rope: RopeTable, cached: CacheWrite | None
) -> tuple[jax.Array, KVCacheArrays | None]:
    return qk_norm_rope_and_cache(qkv, num_kv_heads, norms, layer, EPS, rope, cached, interpret=True)


# It rounds to bfloat16 wherever it says so.
plain = partial(jax.jit, static_argnums=(1, 3), compiler_options={**QUICKLY, "xla_allow_excess_precision": False})(
    qk_norm_rope
)


# Query heads, KV heads, head size: one block of heads, several, and sizes that are no power of two.
HEADS = pytest.mark.parametrize("heads", [(4, 2, 64), (16, 8, 128), (9, 3, 96), (20, 20, 64)], ids=str)


@HEADS
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("writes_cache", [True, False], ids=["cached", "not cached"])
def test_the_kernel_does_what_the_plain_operations_do(
    heads: tuple[int, int, int], *, has_norm: bool, writes_cache: bool
) -> None:
    num_heads, num_kv_heads, head_size = heads
    qkv, layer = draw(NUM_TOKENS, num_heads + 2 * num_kv_heads, head_size), 1
    q_norm, k_norm = (draw(NUM_LAYERS, head_size, seed=seed) if has_norm else None for seed in (1, 2))
    kv_cache = KVCacheArrays(*(draw(NUM_LAYERS * NUM_SLOTS, num_kv_heads, head_size, seed=seed) for seed in (3, 4)))
    slots = np.array([NOT_CACHED, 3, 0, NOT_CACHED, 15, 7], np.int32)
    cached = CacheWrite(kv_cache, jnp.asarray(slots), jnp.int32(layer * NUM_SLOTS)) if writes_cache else None
    found, filled = interpreted(qkv, num_kv_heads, HeadNorms(q_norm, k_norm), jnp.int32(layer), rope(head_size), cached)
    roped, given = np.asarray(found), np.asarray(qkv)
    norms = (None if q_norm is None else q_norm[layer], None if k_norm is None else k_norm[layer])
    expected = np.asarray(plain(qkv, num_kv_heads, norms, EPS, rope(head_size)), np.float32)
    # The sum of squares may be added in another order: one rounding to bfloat16 apart, and one more by RoPE.
    assert np.abs(roped.astype(np.float32) - expected).max() <= 0.04
    assert np.array_equal(roped[:, num_heads + num_kv_heads :], given[:, num_heads + num_kv_heads :])
    if not writes_cache:
        assert filled is None
        return
    assert filled is not None
    places = layer * NUM_SLOTS + slots[slots != NOT_CACHED]
    k, v = roped[:, num_heads : num_heads + num_kv_heads], roped[:, num_heads + num_kv_heads :]
    for stored, before, new in zip(map(np.asarray, filled), map(np.asarray, kv_cache), (k, v), strict=True):
        assert np.array_equal(stored[places], new[slots != NOT_CACHED])
        others = np.delete(np.arange(len(stored)), places)
        assert np.array_equal(stored[others], before[others])
