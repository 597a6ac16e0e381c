"""The kernels as far as a machine without a GPU or a TPU can take them: to what its compiler gets."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.backends.jax.attention import api
from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Source
from prefixwise.backends.jax.attention.hopper import HopperAttention
from prefixwise.backends.jax.attention.pallas_gpu import PallasGpuAttention
from prefixwise.backends.jax.attention.pallas_tpu import PallasTpuAttention
from prefixwise.backends.jax.attention.shapes import SHAPE_NAMED
from prefixwise.backends.jax.inputs import ProgramSpec, capacities, unpack
from prefixwise.backends.jax.kv_cache import KVCacheArrays
from prefixwise.backends.jax.model import LastLayer, Transformer
from prefixwise.backends.jax.row_tiles import RowTiles
from prefixwise.backends.jax.weights import LayerWeights, ModelWeights
from prefixwise.forward.tiles import KEY_TILE, Tiles, tile_capacities

NUM_TOKENS = 10_240  # the contract's, padded
CONFIG = replace(QWEN3_06B, num_layers=2)
HOPPER, PALLAS_GPU = HopperAttention(), PallasGpuAttention()
PALLAS_TPU = PallasTpuAttention()


def halves(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def kernels(traced: Any, platform: str = "cuda") -> Counter[str]:
    """How many kernels of each technology the program has."""
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return Counter(re.findall(r"custom_call @\S*?(triton|mosaic_gpu|tpu)", text))


@pytest.mark.parametrize(
    ("implementation", "platform", "expected"),
    [
        pytest.param(HOPPER, "cuda", {"triton": 2, "mosaic_gpu": 1}, id="hopper"),
        pytest.param(PALLAS_GPU, "cuda", {"triton": 3}, id="pallas_gpu"),
        pytest.param(PALLAS_TPU, "tpu", {"tpu": 1}, id="pallas_tpu"),
    ],
)
def test_attention_lowers(implementation: AttentionImplementation, platform: str, expected: dict[str, int]) -> None:
    """On a GPU: narrow tiles, wide tiles, prefix. On a TPU all are one kernel."""
    shape = SHAPE_NAMED["contract"]
    num_blocks = -(-shape.prefix_lens[0] // KEY_TILE)
    lens = tile_capacities(NUM_TOKENS, implementation.tile_sizes(shape.num_heads // shape.num_kv_heads), num_blocks)
    heads = Heads(halves(NUM_TOKENS, shape.num_heads + 2 * shape.num_kv_heads, shape.head_size), shape.num_kv_heads)
    cached = halves(num_blocks * KEY_TILE, shape.num_kv_heads, shape.head_size)
    tiles = Tiles(*(integers(length) for length in lens))
    attend = jax.jit(api.extend_attention, static_argnums=3)
    traced = attend.trace(heads, Source(cached, cached, integers()), tiles, implementation)
    assert kernels(traced, platform) == expected


def weights() -> ModelWeights:
    layers, model, mlp, head = CONFIG.num_layers, CONFIG.model_size, CONFIG.mlp_size, CONFIG.head_size
    embedding = halves(CONFIG.vocab_size, model)
    return ModelWeights(
        embedding,
        LayerWeights(
            attention_norm=halves(layers, model),
            qkv=halves(layers, (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * head, model),
            qkv_bias=None,
            q_norm=halves(layers, head),
            k_norm=halves(layers, head),
            o=halves(layers, model, CONFIG.num_heads * head),
            mlp_norm=halves(layers, model),
            gate_up=halves(layers, 2 * mlp, model),
            down=halves(layers, model, mlp),
        ),
        final_norm=halves(model),
        head=embedding,
    )


def on_hopper() -> Transformer:
    heads_per_kv, rows = CONFIG.num_heads // CONFIG.num_kv_heads, RowTiles(None, score_rows=256)
    fused = {"fuses_heads": True, "fuses_gate": True}
    return Transformer(CONFIG, CONFIG.num_kv_heads, heads_per_kv, 1, rows, HOPPER, PALLAS_GPU, **fused)


@pytest.mark.parametrize(
    "spec",
    [
        ProgramSpec(2048, "kv_cache", writes_cache=True),
        ProgramSpec(2048, "kv_cache", writes_cache=False),
        ProgramSpec(2048, "batch", writes_cache=False),
    ],
    ids=lambda spec: spec.title,
)
def test_a_whole_trunk_lowers_for_a_hopper_gpu(spec: ProgramSpec) -> None:
    """Prefixes in the KV cache use the Hopper kernel, and the MLP has another. All kernels occur once, in a function
    that the loop over layers and the last layer use. Triton's are one for QK norm and RoPE, two for the self part, one
    for prefixes of the batch.
    """
    trunk, heads_per_kv, num_pages = on_hopper(), CONFIG.num_heads // CONFIG.num_kv_heads, 64
    attention = trunk.attention if spec.reads == "kv_cache" else trunk.batch_attention
    lens = capacities(spec, attention.tile_sizes(heads_per_kv), max_kv_blocks=num_pages)
    cached = halves(CONFIG.num_layers * num_pages * KEY_TILE, CONFIG.num_kv_heads, CONFIG.head_size)

    @jax.jit
    def program(weights: ModelWeights, kv_cache: KVCacheArrays, packed: jax.Array) -> Any:
        return trunk(spec, weights, kv_cache, unpack(packed, lens), None)

    packed = integers(sum([*lens[:-1], *lens.tiles]))
    found = kernels(program.trace(weights(), KVCacheArrays(cached, cached), packed))
    is_cached = spec.reads == "kv_cache"
    assert found == ({"triton": 3, "mosaic_gpu": 2} if is_cached else {"triton": 4, "mosaic_gpu": 1})


def test_scored_rows_of_the_last_layer_have_the_gemm_of_xla() -> None:
    last = LastLayer(halves(2048, CONFIG.model_size), halves(2048, CONFIG.num_heads * CONFIG.head_size))
    assert not kernels(jax.jit(on_hopper().score).trace(weights(), last, integers(256)))
