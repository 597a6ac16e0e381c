"""The JAX attention implementations alone, on the named shapes of `prefixwise/backends/jax/attention/shapes.py`.

Measured: one layer's `extend_attention` (items over prefixes in the KV cache), compiled, from arrays on the device to
its output there: median of `--rounds` after a warm-up. A round is as many calls in a row as fit into a tenth of a
second, at most 20, so that a launch overlaps the call before it. TFLOP/s count two GEMMs over all pairs of a query and
a visible key, nothing else. Shapes are whole on an accelerator; on a CPU they have a tenth of the tokens, items and
prefix, unless `--scale` says otherwise. `reference` is not made for speed and is timed only where it is named. The last
line is JSON.

    python -m benchmarks.attention [--shape contract] [--implementation xla] [--dtype bfloat16] [--scale 1] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prefixwise import __version__
from prefixwise.backends.jax.attention.api import IMPLEMENTATIONS, choose_implementation, extend_attention
from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Source
from prefixwise.backends.jax.attention.shapes import SHAPE_NAMED, AttentionShape
from prefixwise.contract.errors import BackendError
from prefixwise.contract.ragged import starts_from_lens
from prefixwise.forward.batch import ForwardBatch, Layout, Prefix
from prefixwise.forward.tiles import KEY_TILE, DeviceTiles, Tiles, cut_tiles, tile_capacities

TOKEN_MULTIPLE = 256  # what batches are padded to
MAX_CALLS, ROUND_SECONDS = 20, 0.1


def make_batch(shape: AttentionShape) -> ForwardBatch:
    starts = starts_from_lens(np.array(shape.segment_lens, np.int64))
    return ForwardBatch(
        layout=Layout.EXTEND,
        token_ids=np.zeros(shape.num_tokens, np.int32),
        positions=np.zeros(shape.num_tokens, np.int32),
        segment_starts=starts,
        prefix_index=np.array(shape.prefix_index),
        prefix_lens=np.array(shape.read_lens),
        prefixes=(Prefix(),) * len(shape.prefix_lens),  # `make_tiles` says where their blocks are
        sequence_starts=starts[[0, -1]],
        score_tokens=np.zeros(0, np.int64),
        label_ids=np.zeros((0, 0), np.int32),
    )


def make_tiles(shape: AttentionShape, implementation: AttentionImplementation, num_tokens: int) -> DeviceTiles:
    """As a forward of this many tokens has them, padding included; prefixes lie one after the other in the KV cache."""
    num_pages = np.array([-(-length // KEY_TILE) for length in shape.prefix_lens], np.int64)
    edges = KEY_TILE * starts_from_lens(num_pages)
    blocks = [np.arange(start, stop, KEY_TILE) for start, stop in pairwise(edges)]
    sizes = implementation.tile_sizes(shape.num_heads // shape.num_kv_heads)
    padding = num_tokens - shape.num_tokens if implementation.needs_padding_tiles else 0
    tiles = cut_tiles(make_batch(shape), sizes, blocks, padding)
    lens = tile_capacities(num_tokens, sizes, int(num_pages.sum()))
    return Tiles(*(jnp.asarray(np.pad(array, (0, size - len(array)))) for array, size in zip(tiles, lens, strict=True)))


def make_call(
    shape: AttentionShape, implementation: AttentionImplementation, dtype: jnp.dtype
) -> Callable[[], jax.Array]:
    """One layer's attention over random numbers, ready to run."""
    num_tokens = -(-shape.num_tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    kv_cache_tokens = KEY_TILE * sum(-(-length // KEY_TILE) for length in shape.prefix_lens)
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def draw(tokens: int, heads: int) -> jax.Array:
        return jax.random.normal(next(keys), (tokens, heads, shape.head_size), jnp.float32).astype(dtype)

    q, k, v = (draw(num_tokens, heads) for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
    kv_cache = Source(
        draw(kv_cache_tokens, shape.num_kv_heads), draw(kv_cache_tokens, shape.num_kv_heads), jnp.int32(0)
    )
    tiles = make_tiles(shape, implementation, num_tokens)
    heads = Heads.of(q, k, v)
    compiled = jax.jit(extend_attention, static_argnames="implementation")
    return lambda: compiled(heads, kv_cache, tiles, implementation=implementation)


def measure(call: Callable[[], jax.Array], rounds: int) -> float:
    """Seconds of one call."""

    def run(num_calls: int) -> float:
        begin = perf_counter()
        results = [call() for _ in range(num_calls)]
        results[-1].block_until_ready()
        return (perf_counter() - begin) / num_calls

    run(1)  # compiles
    num_calls = max(1, min(MAX_CALLS, int(ROUND_SECONDS / run(1))))
    return median(run(num_calls) for _ in range(rounds))


def choose(names: list[str] | None, platform: str, dtype: jnp.dtype, head_size: int) -> list[AttentionImplementation]:
    """Those that are named, or all but `reference` that run here."""
    found = []
    for name in names or IMPLEMENTATIONS:
        try:
            found.append(choose_implementation(name, platform=platform, dtype=dtype, head_size=head_size))
        except BackendError as error:
            if names:
                raise SystemExit(str(error)) from None
    return found if names else [each for each in found if each.name != "reference"]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPE_NAMED, action="append", help="may be repeated; default: all")
    parser.add_argument(
        "--implementation", choices=IMPLEMENTATIONS, action="append", help="default: all that run here, but reference"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16, on a CPU float32"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scale", type=float, help="fraction of each shape; default: 1, on a CPU 0.1")
    return parser.parse_args()


def main() -> None:
    options, platform = parse_options(), jax.default_backend()
    is_cpu = platform == "cpu"
    dtype = jnp.dtype(options.dtype or ("float32" if is_cpu else "bfloat16"))
    scale = options.scale or (0.1 if is_cpu else 1.0)
    rows: list[dict[str, Any]] = []
    print(f"{jax.devices()[0].device_kind}, {dtype}, scale {scale}")
    print(f"{'shape':<14} {'implementation':<14} {'ms':>10} {'TFLOP/s':>8}")
    for shape in (SHAPE_NAMED[name].scaled(scale) for name in options.shape or SHAPE_NAMED):
        for chosen in choose(options.implementation, platform, dtype, shape.head_size):
            seconds = measure(make_call(shape, chosen, dtype), options.rounds)
            row = {
                "shape": shape.name,
                "implementation": chosen.name,
                "milliseconds": round(1000 * seconds, 3),
                "tflops": float(f"{shape.flops / seconds / 1e12:.3g}"),
            }
            rows.append(row)
            print(f"{shape.name:<14} {chosen.name:<14} {row['milliseconds']:>10.3f} {row['tflops']:>8.3g}")
    result = {
        "prefixwise": __version__,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "dtype": str(dtype),
        "scale": scale,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
