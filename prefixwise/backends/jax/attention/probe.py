"""One small extend attention, compiled and run: does an implementation work on this device?"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from prefixwise.backends.jax.attention.api import extend_attention
from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Source
from prefixwise.forward.batch import ForwardBatch, Layout, Prefix
from prefixwise.forward.tiles import KEY_TILE, Tiles, cut_tiles, tile_capacities

_NUM_TOKENS = 64  # one item of so many tokens, over a prefix of two blocks, the second with one token


def try_attention(implementation: AttentionImplementation, heads: tuple[int, int, int], dtype: jnp.dtype) -> None:
    """`heads`: KV heads, query heads for each of them, and their size. Raises what goes wrong, and where equal values
    do not give their mean, which is themselves."""
    num_kv_heads, heads_per_kv, head_size = heads
    ones = jnp.ones((_NUM_TOKENS, (heads_per_kv + 2) * num_kv_heads, head_size), dtype)
    pages = jnp.ones((2 * KEY_TILE, num_kv_heads, head_size), dtype)
    sizes = implementation.tile_sizes(heads_per_kv)
    arrays, lens = cut_tiles(_batch(), sizes, [np.array([KEY_TILE, 0])]), tile_capacities(_NUM_TOKENS, sizes, 2)
    padded = (np.pad(array, (0, size - len(array))) for array, size in zip(arrays, lens, strict=True))
    tiles = Tiles(*map(jnp.asarray, padded))
    attend = jax.jit(extend_attention, static_argnames="implementation")
    source = Source(pages, pages, jnp.int32(0))
    out = np.asarray(attend(Heads(ones, num_kv_heads), source, tiles, implementation=implementation), np.float32)
    if not np.allclose(out, 1.0, atol=0.02):
        raise ArithmeticError(f"attention over equal values of 1 gave {out.min()} to {out.max()}")


def _batch() -> ForwardBatch:
    tokens = np.zeros(_NUM_TOKENS, np.int32)
    edges = np.array([0, _NUM_TOKENS])
    return ForwardBatch(
        layout=Layout.EXTEND,
        token_ids=tokens,
        positions=tokens,
        segment_starts=edges,
        prefix_index=np.zeros(1, np.int64),
        prefix_lens=np.array([KEY_TILE + 1]),
        prefixes=(Prefix(),),
        row_starts=edges,
        score_tokens=np.zeros(0, np.int64),
        label_ids=np.zeros((0, 0), np.int32),
    )
