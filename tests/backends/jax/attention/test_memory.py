from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from prefixwise.backends.jax.attention import api
from prefixwise.backends.jax.attention.base import Heads, Source
from prefixwise.backends.jax.attention.xla import XlaAttention
from prefixwise.forward.tiles import KEY_TILE, Tiles, tile_capacities
from tests.backends.jax.quick_compiler import QUICKLY

NUM_BLOCKS = 16
XLA = XlaAttention()


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def scratch_bytes(num_tokens: int) -> int:
    """What the compiled program allocates beside its inputs and its output."""
    qkv, cached = floats(num_tokens, 4, 64), floats(NUM_BLOCKS * KEY_TILE, 1, 64)
    lens = tile_capacities(num_tokens, XLA.tile_sizes(2), NUM_BLOCKS)
    tiles = Tiles(*(integers(length) for length in lens))
    kv_cache = Source(cached, cached, integers())  # type: ignore[arg-type]
    heads = Heads(qkv, num_kv_heads=1)  # type: ignore[arg-type]
    with jax.default_device(jax.devices("cpu")[0]):
        jitted = jax.jit(api.extend_attention, static_argnums=3, compiler_options=QUICKLY)  # which needs as much memory
        analysis = jitted.lower(heads, kv_cache, tiles, XLA).compile().memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


def test_memory_is_linear_in_tokens() -> None:
    """Twice the tokens add twice what half of them added; an array of tokens by tokens would add four times that."""
    small, medium, large = (scratch_bytes(num_tokens) for num_tokens in (1024, 2048, 4096))
    assert small < medium < large
    assert large - medium == pytest.approx(2 * (medium - small), rel=0.05)
