"""Runs a case of `tests/attention_cases.py` through the JAX attention API.

Programs take seconds to compile, so batches are padded to a common capacity, and those with the same heads share them.
All that is padding is NaN: tokens behind the last segment, pages that no prefix has, and the rest of a last page.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from itemwise.backends.base import ForwardBatch, Layout
from itemwise.backends.jax.attention import api
from itemwise.backends.jax.attention.base import AttentionImplementation, Source
from itemwise.backends.jax.attention.dense import DenseMask, make_mask, token_rows
from itemwise.backends.jax.attention.shapes import AttentionShape
from itemwise.backends.jax.attention.tiles import KEY_BLOCK, HostTiles, Tiles, TileSizes, cut_tiles, tile_capacities
from itemwise.contract.ragged import Int64Array, starts_from_lens
from tests.attention_cases import HEAD_CASES, AttentionCase, AttentionInputs, Floats, Implementation


@dataclass(frozen=True)
class Capacity:
    """What a program has room for, and whether the compiler is to take its time over it."""

    num_tokens: int
    num_blocks: int  # key blocks of all prefixes together
    is_optimised: bool = True


LAYOUT_CAPACITY = Capacity(384, 8)
HEAD_CAPACITY = Capacity(160, 1, is_optimised=False)  # each of these cases has a program of its own
MAX_ROWS = 8  # of a dense mask

_extend = jax.jit(api.extend_attention, static_argnames="implementation")
# For `xla` alone, which takes thrice as long to compile otherwise; the others run longer than that saves.
_extend_unoptimised = jax.jit(
    api.extend_attention, static_argnames="implementation", compiler_options={"xla_backend_optimization_level": 0}
)
_causal = jax.jit(api.causal_attention, static_argnames="implementation")
packed_program = jax.jit(api.packed_attention, static_argnames="implementation")


def capacity_of(case: AttentionCase) -> Capacity:
    return HEAD_CAPACITY if case in HEAD_CASES else LAYOUT_CAPACITY


def on_device(platform: str) -> AbstractContextManager[Any]:
    """Programs are shared within it."""
    return jax.default_device(jax.devices(platform)[0])


def runner(
    implementation: AttentionImplementation,
    capacity: Capacity = LAYOUT_CAPACITY,
    dtype: DTypeLike = np.float32,
    platform: str = "cpu",
) -> Implementation:
    """From a batch and its inputs to [T, N, H] float32."""

    def run(batch: ForwardBatch, inputs: AttentionInputs) -> Floats:
        with on_device(platform):
            return np.asarray(_run(implementation, batch, inputs, capacity, dtype).astype(jnp.float32))

    return run


def _run(
    implementation: AttentionImplementation,
    batch: ForwardBatch,
    inputs: AttentionInputs,
    capacity: Capacity,
    dtype: DTypeLike,
) -> jax.Array:
    q, k, v = (jnp.asarray(with_nan(each, capacity.num_tokens), dtype) for each in (inputs.q, inputs.k, inputs.v))
    sizes = implementation.tile_sizes(q.shape[1] // k.shape[1])
    padding = len(q) - batch.num_tokens if implementation.needs_padding_tiles else 0
    blocks = prefix_blocks(batch, capacity)
    tiles = fill_up(cut_tiles(batch, sizes, blocks, padding), sizes, capacity)
    if batch.layout is Layout.EXTEND:
        pool = make_pool(inputs, blocks, capacity.num_blocks, dtype)
        is_quick = not capacity.is_optimised and implementation.name == "xla" and jax.default_backend() == "cpu"
        extend = _extend_unoptimised if is_quick else _extend
        return extend(q, k, v, pool, tiles, implementation=implementation)
    if not batch.prefixes:
        return _causal(q, k, v, tiles, implementation=implementation)
    dense = make_dense(batch, len(q)) if batch.mask == "dense" else None
    return packed_program(q, k, v, tiles, implementation=implementation, dense=dense)


def with_nan(values: Floats, size: int) -> Floats:
    assert len(values) <= size, "larger than its capacity"
    return np.concatenate([values, np.full((size - len(values), *values.shape[1:]), np.nan, np.float32)])


def prefix_blocks(batch: ForwardBatch, capacity: Capacity) -> list[Int64Array]:
    """Addresses of the key blocks of each prefix: tokens of the batch, or pages of the pool in any order."""
    lens = [len_of_prefix(batch, number) for number in range(len(batch.prefixes))]
    if batch.layout is not Layout.EXTEND:
        starts = [int(batch.segment_starts[source]) for source in batch.prefixes if isinstance(source, int)]
        return [np.arange(start, start + length, KEY_BLOCK) for start, length in zip(starts, lens, strict=True)]
    edges = starts_from_lens(np.array([-(-length // KEY_BLOCK) for length in lens], np.int64))
    pages = np.random.default_rng(batch.num_tokens).permutation(capacity.num_blocks)
    return [KEY_BLOCK * pages[start:stop] for start, stop in pairwise(edges)]


def len_of_prefix(batch: ForwardBatch, number: int) -> int:
    source = batch.prefixes[number]
    return int(np.diff(batch.segment_starts)[source]) if isinstance(source, int) else source.num_tokens


def make_pool(inputs: AttentionInputs, blocks: Sequence[Int64Array], num_pages: int, dtype: DTypeLike) -> Source:
    """The cached prefixes in their pages, behind a layer of the pool that is not ours, and before pages of nobody."""
    shape = ((1 + num_pages + 1) * KEY_BLOCK, *inputs.k.shape[1:])
    pools = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    for addresses, pair in zip(blocks, inputs.cached, strict=True):
        slots = (KEY_BLOCK + addresses[:, None] + np.arange(KEY_BLOCK)).reshape(-1)
        for pool, values in zip(pools, pair, strict=True):
            pool[slots[: len(values)]] = values
    return Source(jnp.asarray(pools[0], dtype), jnp.asarray(pools[1], dtype), jnp.int32(KEY_BLOCK))


def fill_up(tiles: HostTiles, sizes: TileSizes, capacity: Capacity) -> Tiles[Any]:
    """The arrays of a program's length, on the device; what is not used is zero."""
    lens = tile_capacities(capacity.num_tokens, sizes, capacity.num_blocks)
    return Tiles(*(jnp.asarray(np.pad(array, (0, size - len(array)))) for array, size in zip(tiles, lens, strict=True)))


def make_dense(batch: ForwardBatch, num_tokens: int) -> DenseMask:
    """As many columns as tokens, so that batches share a program."""
    padding, num_rows = num_tokens - batch.num_tokens, len(batch.row_starts) - 1
    return DenseMask(
        jnp.asarray(make_mask(batch, (num_tokens, num_tokens))),
        jnp.asarray(np.pad(token_rows(batch), (0, padding))),
        jnp.asarray(np.pad(batch.row_starts, (0, MAX_ROWS - num_rows), mode="edge").astype(np.int32)),
        jnp.int32(num_rows),
    )


def case_of(shape: AttentionShape) -> AttentionCase:
    """A named shape as a case of the suite."""
    return AttentionCase(
        shape.name,
        shape.segment_lens,
        shape.prefix_index,
        shape.read_lens,
        shape.prefix_lens,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
    )
