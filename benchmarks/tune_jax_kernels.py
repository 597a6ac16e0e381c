"""What the JAX backend's Triton kernels are to be compiled with on this GPU: a sweep over threads and blocks.

Measured: the device's own time of one call (median of `--rounds`, from the profiler), for the heads of Qwen3-0.6B, in a
forward of the contract workload (12,288 tokens) and in a small one (512). The choices are data in the kernels' modules
(`TUNING` in `gpu_self_attention.py` and `qk_norm_rope.py`); the results do not depend on them. The last line is JSON.

    python -m benchmarks.tune_jax_kernels [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.profile import jax_kernels
from prefixwise.backends.jax import qk_norm_rope as qk_norm_rope
from prefixwise.backends.jax.attention import gpu_self_attention
from prefixwise.backends.jax.attention.base import Heads
from prefixwise.backends.jax.attention.gpu_self_attention import SelfAttentionTuning
from prefixwise.backends.jax.kv_cache import KVCacheArrays
from prefixwise.backends.jax.qk_norm_rope import (
    CacheWrite,
    HeadNorms,
    QkNormRopeTuning,
    RopeTable,
    qk_norm_rope_and_cache,
)
from prefixwise.forward.kv_pages import NOT_CACHED
from prefixwise.forward.tiles import NARROW, WIDE, DeviceTiles, Tiles, TileSizes

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, NUM_LAYERS, ITEM_TOKENS, BLOCK_TOKENS = 16, 8, 128, 28, 20, 128
NUM_TOKENS = (12_288, 512)


def draw_qkv(num_tokens: int) -> jax.Array:
    shape = (num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE)
    return jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(jnp.bfloat16)


def wait_for(arrays: Any) -> None:
    for array in jax.tree.leaves(arrays):
        array.block_until_ready()


def kernel_microseconds(name: str, run: Callable[[], Any], rounds: int) -> float:
    """Of all kernels of that name in one run."""
    wait_for(run())  # compiles

    def repeat() -> None:
        for _ in range(rounds):
            wait_for(run())

    lengths = [length for kernel, _, length in jax_kernels(repeat) if kernel.startswith(name)]
    per_run = np.array(lengths).reshape(rounds, -1).sum(1)
    return float(median(per_run))


def make_tiles(num_tokens: int, sizes: TileSizes) -> DeviceTiles:
    """A sixth of the tokens are blocks of a prefix, the others items."""
    num_blocks = num_tokens // 6 // BLOCK_TOKENS
    first_item = num_blocks * BLOCK_TOKENS
    items = np.arange(first_item, num_tokens - ITEM_TOKENS, ITEM_TOKENS)
    wide = np.arange(0, first_item, sizes.wide)
    nothing = jnp.zeros(1, jnp.int32)

    def filled(values: Any) -> jax.Array:
        return jnp.asarray(np.pad(np.asarray(values, np.int32), (0, num_tokens - len(values))))

    unused = Tiles(*[nothing] * len(Tiles._fields))
    return unused._replace(
        counts=jnp.array([len(items), len(wide), 0], jnp.int32),
        narrow_start=filled(items),
        narrow_len=filled([ITEM_TOKENS] * len(items)),
        wide_start=filled(wide),
        wide_len=filled([sizes.wide] * len(wide)),
        wide_segment=filled(wide // BLOCK_TOKENS * BLOCK_TOKENS),
    )


def sweep_own(num_tokens: int, rounds: int) -> dict[str, float]:
    tile_tokens = gpu_self_attention.self_tile_tokens(NUM_HEADS // NUM_KV_HEADS)
    sizes = TileSizes(tile_tokens, tile_tokens, prefix=64)
    heads, tiles, found = Heads(draw_qkv(num_tokens), NUM_KV_HEADS), make_tiles(num_tokens, sizes), {}
    for narrow, wide in product((2, 4, 8), repeat=2):
        gpu_self_attention.TUNING.update({NARROW: SelfAttentionTuning(narrow), WIDE: SelfAttentionTuning(wide)})
        attend = jax.jit(lambda heads, tiles: gpu_self_attention.self_attention(heads, tiles, sizes, interpret=False))
        found[f"{narrow} and {wide} warps"] = kernel_microseconds(
            "self_attention", partial(attend, heads, tiles), rounds
        )
    return found


def sweep_turn(num_tokens: int, rounds: int) -> dict[str, float]:
    qkv, found = draw_qkv(num_tokens), {}
    angles = jnp.zeros((num_tokens, 1, HEAD_SIZE // 2), jnp.float32)
    weights = jnp.ones((NUM_LAYERS, HEAD_SIZE), jnp.bfloat16)
    kv_cache = KVCacheArrays(*(jnp.zeros((num_tokens, NUM_KV_HEADS, HEAD_SIZE), jnp.bfloat16) for _ in range(2)))
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    slots = jnp.where(tokens < num_tokens // 6, tokens, NOT_CACHED)

    def turn(qkv: jax.Array, kv_cache: KVCacheArrays) -> Any:
        kept = CacheWrite(kv_cache, slots, jnp.int32(0))
        norms, rope = HeadNorms(weights, weights), RopeTable(angles, angles)
        return qk_norm_rope_and_cache(qkv, NUM_KV_HEADS, norms, jnp.int32(0), 1e-6, rope, kept)

    for num_heads, num_warps in product((8, 16, 32), (1, 2, 4, 8)):
        qk_norm_rope.TUNING = QkNormRopeTuning(num_heads, num_warps)
        compiled = jax.jit(lambda qkv, kv_cache: turn(qkv, kv_cache))  # anew: the choice is no argument
        found[f"{num_heads} heads, {num_warps} warps"] = kernel_microseconds(
            "qk_norm_rope", partial(compiled, qkv, kv_cache), rounds
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    sweeps = {"self_attention": sweep_own, "qk_norm_rope": sweep_turn}
    rows: dict[str, dict[str, float]] = {}
    for name, sweep in sweeps.items():
        for num_tokens in NUM_TOKENS:
            found = rows[f"{name}, {num_tokens} tokens"] = sweep(num_tokens, rounds)
            print(f"{name}, {num_tokens} tokens (microseconds)")
            for choice, microseconds in sorted(found.items(), key=lambda each: each[1]):
                print(f"  {microseconds:8.1f}  {choice}")
    print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "microseconds": rows}))


if __name__ == "__main__":
    main()
