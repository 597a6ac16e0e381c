"""Runs a case of `tests/attention_cases.py` through the JAX attention API.

Programs take seconds to compile, so batches are padded to a common capacity, and those with the same heads share them.
All that is padding is NaN: tokens behind the last segment, pages that no prefix has, and the rest of a last page.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from prefixwise.backends.jax.attention import api, base
from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Source
from prefixwise.backends.jax.attention.dense import DenseMask, make_mask
from prefixwise.backends.jax.attention.shapes import AttentionShape
from prefixwise.backends.jax.inputs import token_sequences
from prefixwise.backends.jax.programs import COMPILER_OPTIONS
from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.batch import ForwardBatch, Layout
from prefixwise.forward.kv_pages import batch_tiles, page_table
from prefixwise.forward.tiles import (
    KEY_TILE,
    DeviceTiles,
    HostTiles,
    Tiles,
    TileSizes,
    cut_tiles,
    tile_capacities,
)
from tests.attention_cases import (
    HEAD_CASES,
    PLAIN,
    AttentionCase,
    AttentionInputs,
    Floats,
    Implementation,
    Scoring,
)
from tests.backends.jax.quick_compiler import QUICKLY


@dataclass(frozen=True)
class Capacity:
    """What a program has room for, and whether enough cases share it for the compiler to take its time over it."""

    num_tokens: int
    num_blocks: int  # key tiles of all prefixes together
    is_optimised: bool = True


LAYOUT_CAPACITY = Capacity(448, 8)
HEAD_CAPACITY = Capacity(160, 1, is_optimised=False)  # each of these cases has a program of its own
MAX_SEQUENCES = 8  # of a dense mask


def _extend_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: Source,
    tiles: DeviceTiles,
    implementation: AttentionImplementation,
    scoring: base.Scoring = base.PLAIN,
) -> jax.Array:
    return api.extend_attention(Heads.of(q, k, v), kv_cache, tiles, implementation, scoring)


def _packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: DeviceTiles,
    implementation: AttentionImplementation,
    dense: DenseMask | None = None,
    scoring: base.Scoring = base.PLAIN,
) -> jax.Array:
    return api.packed_attention(Heads.of(q, k, v), tiles, implementation, dense, scoring)


class Programs(NamedTuple):
    """Of both functions, compiled with the same effort."""

    extend: Any
    packed: Any


def _programs(options: dict[str, Any] | None) -> Programs:
    return Programs(
        *(
            jax.jit(function, static_argnames="implementation", compiler_options=options)
            for function in (_extend_attention, _packed_attention)
        )
    )


# Level 0 takes a third of the time to compile, level 1 half of it, for code that is nearly as fast as any. The
# arithmetic is the same.
_AT_LEVEL_0, _AT_LEVEL_1 = _programs(QUICKLY), _programs({**QUICKLY, "xla_backend_optimization_level": 1})
_OF_USERS, _ON_A_DEVICE = _programs(COMPILER_OPTIONS["cpu"]), _programs(None)
packed_program = _OF_USERS.packed


def _programs_for(implementation: AttentionImplementation, capacity: Capacity, platform: str) -> Programs:
    if platform != "cpu":
        return _ON_A_DEVICE
    is_quick = not capacity.is_optimised and implementation.name != "reference"  # which runs long
    if is_quick or implementation.name == "hopper":  # most of which runs in Python, interpreted
        return _AT_LEVEL_0
    return _OF_USERS if implementation.name == "xla" else _AT_LEVEL_1  # they get the bits of `xla`


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
    scoring: Scoring = PLAIN,
) -> Implementation:
    """From a batch and its inputs to [T, N, H] float32."""

    def run(batch: ForwardBatch, inputs: AttentionInputs) -> Floats:
        with on_device(platform):
            found = _run(implementation, batch, inputs, capacity, dtype, platform, scoring)
            return np.asarray(found.astype(jnp.float32))

    return run


def _run(
    implementation: AttentionImplementation,
    batch: ForwardBatch,
    inputs: AttentionInputs,
    capacity: Capacity,
    dtype: DTypeLike,
    platform: str,
    case_scoring: Scoring,
) -> jax.Array:
    q, k, v = (jnp.asarray(with_nan(each, capacity.num_tokens), dtype) for each in (inputs.q, inputs.k, inputs.v))
    sizes = implementation.tile_sizes(q.shape[1] // k.shape[1])
    padding = len(q) - batch.num_tokens if implementation.needs_padding_tiles else 0
    blocks = prefix_tiles(batch, capacity)
    tiles = fill_up(cut_tiles(batch, sizes, blocks, padding), sizes, capacity)
    programs = _programs_for(implementation, capacity, platform)
    scoring = base.PLAIN
    if case_scoring != PLAIN:  # windows are data, so that all share a program
        window = jnp.int32(case_scoring.window or base.NO_WINDOW)
        scoring = base.Scoring(window, case_scoring.scale, case_scoring.softcap)
    if batch.layout is Layout.EXTEND:
        kv_cache = make_pool(batch, inputs, blocks, capacity.num_blocks, dtype)
        return programs.extend(q, k, v, kv_cache, tiles, implementation=implementation, scoring=scoring)
    dense = make_dense(batch, len(q)) if batch.mask == "dense" else None
    return programs.packed(q, k, v, tiles, implementation=implementation, dense=dense, scoring=scoring)


def with_nan(values: Floats, size: int) -> Floats:
    assert len(values) <= size, "larger than its capacity"
    return np.concatenate([values, np.full((size - len(values), *values.shape[1:]), np.nan, np.float32)])


def prefix_tiles(batch: ForwardBatch, capacity: Capacity) -> list[Int64Array]:
    """Addresses of the key tiles of each prefix: tokens of the batch, or pages of the KV cache in any order."""
    if batch.layout is not Layout.EXTEND:
        return batch_tiles(batch)
    pages = iter((KEY_TILE * np.random.default_rng(batch.num_tokens).permutation(capacity.num_blocks)).tolist())
    of_block = {id(block): next(pages) for prefix in batch.prefixes for block in prefix.blocks}  # equal ones differ
    of_segment = {segment: next(pages) for segment in cached_segments(batch)}
    return page_table(batch, of_segment, lambda block: of_block[id(block)])


def cached_segments(batch: ForwardBatch) -> list[int]:
    """Those that a forward with this batch would cache: a prefix continues with them, and they are a block at most."""
    first = [prefix.segment for prefix in batch.prefixes if prefix.segment is not None]
    lens = np.diff(batch.segment_starts)
    return [segment for segment in range(min(first, default=len(lens)), len(lens)) if lens[segment] == KEY_TILE]


def make_pool(
    batch: ForwardBatch, inputs: AttentionInputs, blocks: Sequence[Int64Array], num_pages: int, dtype: DTypeLike
) -> Source:
    """All prefixes in their pages, behind a layer of the KV cache that is not ours, and before pages of nobody."""
    shape = ((1 + num_pages + 1) * KEY_TILE, *inputs.k.shape[1:])
    pools = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    for number, addresses in enumerate(blocks):
        slots = (KEY_TILE + addresses[:, None] + np.arange(KEY_TILE)).reshape(-1)
        for kv_cache, values in zip(pools, whole_prefix(batch, inputs, number), strict=True):
            count = min(len(slots), len(values))
            kv_cache[slots[:count]] = values[:count]
    return Source(jnp.asarray(pools[0], dtype), jnp.asarray(pools[1], dtype), jnp.int32(KEY_TILE))


def whole_prefix(batch: ForwardBatch, inputs: AttentionInputs, number: int) -> tuple[Floats, Floats]:
    """Keys and values: those that are cached, then all of the batch from the segment with which it goes on."""
    segment = batch.prefixes[number].segment
    keys, values = inputs.cached[number] if inputs.cached else (inputs.k[:0], inputs.v[:0])
    if segment is None:
        return keys, values
    start = int(batch.segment_starts[segment])
    return np.concatenate([keys, inputs.k[start:]]), np.concatenate([values, inputs.v[start:]])


def fill_up(tiles: HostTiles, sizes: TileSizes, capacity: Capacity) -> Tiles[Any]:
    """The arrays of a program's length, on the device; what is not used is zero."""
    lens = tile_capacities(capacity.num_tokens, sizes, capacity.num_blocks)
    return Tiles(*(jnp.asarray(np.pad(array, (0, size - len(array)))) for array, size in zip(tiles, lens, strict=True)))


def make_dense(batch: ForwardBatch, num_tokens: int) -> DenseMask:
    """As many columns as tokens, so that batches share a program."""
    padding, num_sequences = num_tokens - batch.num_tokens, len(batch.sequence_starts) - 1
    return DenseMask(
        jnp.asarray(make_mask(batch, (num_tokens, num_tokens))),
        jnp.asarray(np.pad(token_sequences(batch), (0, padding))),
        jnp.asarray(np.pad(batch.sequence_starts, (0, MAX_SEQUENCES - num_sequences), mode="edge").astype(np.int32)),
        jnp.int32(num_sequences),
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
