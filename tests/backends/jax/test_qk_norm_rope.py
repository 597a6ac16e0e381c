"""Norms, rotation and the write to the pool: the kernel against the plain operations."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prefixwise.backends.jax.kv_cache import KVCacheArrays
from prefixwise.backends.jax.qk_norm_rope import HeadNorms, Kept, RopeTable, qk_norm_rope_and_cache, turn
from prefixwise.forward.kv_pages import NOT_CACHED
from tests.backends.jax.quick_compiler import QUICKLY

NUM_LAYERS, NUM_TOKENS, NUM_SLOTS, EPS = 3, 6, 16, 1e-6


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.bfloat16))


def rotation(head_size: int) -> RopeTable:
    angles = np.arange(NUM_TOKENS)[:, None, None] * np.linspace(1, 0.01, head_size // 2)
    return RopeTable(*(jnp.asarray(each.astype(np.float32)) for each in (np.cos(angles), np.sin(angles))))


@partial(jax.jit, static_argnames="num_kv_heads", compiler_options=QUICKLY)
def interpreted(
    qkv: jax.Array, num_kv_heads: int, norms: HeadNorms, layer: jax.Array, rotation: RopeTable, kept: Kept | None
) -> tuple[jax.Array, KVCacheArrays | None]:
    return qk_norm_rope_and_cache(qkv, num_kv_heads, norms, layer, EPS, rotation, kept, interpret=True)


# It rounds to bfloat16 wherever it says so.
plain = partial(jax.jit, static_argnums=(1, 3), compiler_options={**QUICKLY, "xla_allow_excess_precision": False})(turn)


# Query heads, KV heads, head size: one block of heads, several, and sizes that are no power of two.
HEADS = pytest.mark.parametrize("heads", [(4, 2, 64), (16, 8, 128), (9, 3, 96), (20, 20, 64)], ids=str)


@HEADS
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
def test_the_kernel_does_what_the_plain_operations_do(
    heads: tuple[int, int, int], *, has_norm: bool, keeps: bool
) -> None:
    num_heads, num_kv_heads, head_size = heads
    qkv, layer = draw(NUM_TOKENS, num_heads + 2 * num_kv_heads, head_size), 1
    q_norm, k_norm = (draw(NUM_LAYERS, head_size, seed=seed) if has_norm else None for seed in (1, 2))
    pool = KVCacheArrays(*(draw(NUM_LAYERS * NUM_SLOTS, num_kv_heads, head_size, seed=seed) for seed in (3, 4)))
    slots = np.array([NOT_CACHED, 3, 0, NOT_CACHED, 15, 7], np.int32)
    kept = Kept(pool, jnp.asarray(slots), jnp.int32(layer * NUM_SLOTS)) if keeps else None
    found, filled = interpreted(
        qkv, num_kv_heads, HeadNorms(q_norm, k_norm), jnp.int32(layer), rotation(head_size), kept
    )
    turned, given = np.asarray(found), np.asarray(qkv)
    norms = (None if q_norm is None else q_norm[layer], None if k_norm is None else k_norm[layer])
    expected = np.asarray(plain(qkv, num_kv_heads, norms, EPS, rotation(head_size)), np.float32)
    # The sum of squares may be added in another order: one rounding to bfloat16 apart, and one more by the rotation.
    assert np.abs(turned.astype(np.float32) - expected).max() <= 0.04
    assert np.array_equal(turned[:, num_heads + num_kv_heads :], given[:, num_heads + num_kv_heads :])
    if not keeps:
        assert filled is None
        return
    assert filled is not None
    places = layer * NUM_SLOTS + slots[slots != NOT_CACHED]
    k, v = turned[:, num_heads : num_heads + num_kv_heads], turned[:, num_heads + num_kv_heads :]
    for stored, before, new in zip(map(np.asarray, filled), map(np.asarray, pool), (k, v), strict=True):
        assert np.array_equal(stored[places], new[slots != NOT_CACHED])
        others = np.delete(np.arange(len(stored)), places)
        assert np.array_equal(stored[others], before[others])
