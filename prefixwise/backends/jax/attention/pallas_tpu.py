"""Attention on TPUs: a Pallas kernel that Mosaic compiles (`tpu_kernel.py`), and its tile sizes.

Self-attention and prefix attention are one kernel, so the state of a softmax never leaves VMEM. The metadata of the
tiles is in SMEM. Queries, keys, values and pages stay in HBM; the kernel copies what a tile needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from prefixwise.backends.jax.attention.base import PLAIN, AttentionImplementation, Heads, Scoring, Source
from prefixwise.backends.jax.attention.tpu_copies import KeyTiles, OneHeadPages, Ref
from prefixwise.backends.jax.attention.tpu_kernel import Kernel, KernelShape, Scratch, TileRefs
from prefixwise.backends.jax.attention.tpu_softmax import LANES
from prefixwise.forward.tiles import KEY_TILE, DeviceTiles, TileSizes

NARROW_TOKENS = 32
LEAST_TILE_TOKENS, MOST_TILE_TOKENS = 32, 256
# Of a program: the metadata of its tiles takes 24 to 28 bytes a token of SMEM, which has 1 MiB.
MAX_TOKENS = 32_768
HEAD_TILE = 16  # a copy of some of the heads starts at a multiple of so many, in either dtype


@dataclass(frozen=True)
class Generation:
    """Tile sizes of the kernel for one generation of TPUs; a token's numbers do not depend on them."""

    tile_rows: int  # rows of a GEMM: tokens of a tile times query heads of a KV head
    vmem_bytes: int  # limit of the kernel


# By jax's names of devices; both have 128 MiB of VMEM. Per row of a key tile (8 KV heads of 128, 2 query heads each)
# the compiler schedules 1.31 times as many instructions with 256 rows as with 512 on a v5e, 1.27 times on a v6e.
GENERATIONS = {
    "TPU v5 lite": Generation(tile_rows=512, vmem_bytes=96 << 20),
    "TPU v6 lite": Generation(tile_rows=512, vmem_bytes=96 << 20),
}
DEFAULT_GENERATION = "TPU v6 lite"


class PallasTpuAttention(AttentionImplementation):
    """See the module. `interpret` (True, or parameters of Pallas) runs the kernel on any device, for tests; `device` is
    one of GENERATIONS, and None asks jax."""

    name = "pallas_tpu"
    needs_padding_tiles = True
    max_tokens = MAX_TOKENS

    def __init__(self, *, interpret: Any = False, device: str | None = None) -> None:
        self._interpret = interpret
        self._device = device

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        if platform != "tpu" and not self._interpret:
            return f"it needs a TPU, and this is: {platform}"
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"it computes in bfloat16 or float32, and this is {dtype}"
        if not (32 <= head_size <= LANES and head_size % 32 == 0) and head_size != 2 * LANES:
            return f"it takes head sizes of 32, 64, 96, 128 and 256, and this is {head_size}"
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        tokens = self._generation.tile_rows // pl.next_power_of_2(heads_per_kv)
        tokens = min(MOST_TILE_TOKENS, max(LEAST_TILE_TOKENS, tokens))
        # An alignment of 1: every token is in a tile.
        return TileSizes(NARROW_TOKENS, wide=KEY_TILE, prefix=tokens, alignment=1, has_token_arrays=False)

    @property
    def _generation(self) -> Generation:
        device = self._device or jax.devices()[0].device_kind
        return GENERATIONS.get(device, GENERATIONS[DEFAULT_GENERATION])

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles, scoring: Scoring = PLAIN) -> jax.Array:
        assert scoring.is_plain, "this implementation has no sliding windows and no capped scores"
        num_tokens, _, head_size = heads.qkv.shape
        sizes = self.tile_sizes(heads.heads_per_kv)
        shape = KernelShape(sizes.prefix, sizes.narrow, heads.num_heads, heads.num_kv_heads, head_size)
        pages = [] if source is None else [_as_pages(array, shape) for array in (source.keys, source.values)]
        first_heads = None if source is None else (source.first_key, source.first_value)
        arrays = [heads.qkv, *pages]
        metadata = _metadata(tiles, jnp.int32(0) if source is None else source.base)
        out: jax.Array = pl.pallas_call(
            partial(_kernel, shape=shape, first_heads=first_heads),
            out_shape=jax.ShapeDtypeStruct((num_tokens, heads.num_heads, head_size), heads.qkv.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(metadata),
                grid=(1,),
                in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
                out_specs=pl.BlockSpec(memory_space=pl.ANY),
                scratch_shapes=_scratch(shape, heads.qkv.dtype, arrays),
            ),
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=self._generation.vmem_bytes),
            interpret=self._interpret,
            name="tile_attention",
        )(*metadata, *arrays)
        return out


def _as_pages(array: jax.Array, shape: KernelShape) -> jax.Array:
    """[A, K, H], or [pages, KEY_TILE, H] with one KV head (see `OneHeadPages`)."""
    return array.reshape(-1, KEY_TILE, shape.head_size) if shape.num_kv_heads == 1 else array


def _metadata(tiles: DeviceTiles, base: jax.Array) -> TileRefs:
    """The arrays that become the kernel's `TileRefs`."""
    of_tiles = [getattr(tiles, field) for field in TileRefs._fields[:-1]]
    return TileRefs(*[*of_tiles, base.reshape(1)])


def _scratch(shape: KernelShape, dtype: jnp.dtype, arrays: list[jax.Array]) -> list[Any]:
    """The fields of `Scratch`; then buffers and semaphores of a segment's key tiles, and of the prefix's."""
    n, k, h = shape.num_heads, shape.num_kv_heads, shape.head_size
    window, part = shape.window_tokens, (-(-h // LANES), min(h, LANES))
    fixed = Scratch(
        window=pltpu.VMEM((2, window, n + 2 * k, h), dtype),
        heads=pltpu.VMEM((part[0], n + 2 * k, window, part[1]), jnp.float32),
        q=pltpu.VMEM((n, shape.tile_tokens, h), dtype),
        keys=pltpu.VMEM((k, KEY_TILE, h), dtype),
        values=pltpu.VMEM((k, KEY_TILE, h), dtype),
        out=pltpu.VMEM((part[0], n, window, part[1]), jnp.float32),
        m_i=pltpu.VMEM((1, n, window, LANES), jnp.float32),
        l_i=pltpu.VMEM((1, n, window, LANES), jnp.float32),
        result=pltpu.VMEM((2, shape.tile_tokens, n, h), dtype),
        window_semaphores=pltpu.SemaphoreType.DMA((2,)),
        result_semaphores=pltpu.SemaphoreType.DMA((2,)),
    )
    segment = pltpu.VMEM((2, KEY_TILE, _segment_heads(shape)[1], h), dtype)
    if len(arrays) == 1:  # prefixes are in the batch too
        return [*fixed, segment, pltpu.SemaphoreType.DMA((2, 1)), segment, pltpu.SemaphoreType.DMA((2, 1))]
    page_shape = (KEY_TILE, h) if k == 1 else (KEY_TILE, *arrays[1].shape[1:])
    pages = [pltpu.VMEM((2, *page_shape), array.dtype) for array in arrays[1:]]
    return [*fixed, segment, pltpu.SemaphoreType.DMA((2, 1)), *pages, pltpu.SemaphoreType.DMA((2, 2))]


def _segment_heads(shape: KernelShape) -> tuple[int, int]:
    """The heads that a copy of a segment's key tile takes, first and count: keys and values, or all heads."""
    if shape.num_heads % HEAD_TILE or 2 * shape.num_kv_heads % HEAD_TILE:
        return 0, shape.num_all_heads
    return shape.num_heads, 2 * shape.num_kv_heads


def _kernel(*refs: Ref, shape: KernelShape, first_heads: tuple[int, int] | None) -> None:
    """Refs: metadata in SMEM; qkv and, with `first_heads`, keys and values of pages, in HBM; the output; scratch."""
    num_pages = 0 if first_heads is None else 2
    tiles, rest = TileRefs(*refs[: len(TileRefs._fields)]), refs[len(TileRefs._fields) :]
    qkv, pages, output = rest[0], rest[1 : 1 + num_pages], rest[1 + num_pages]
    scratch, buffers = rest[2 + num_pages :][: len(Scratch._fields)], rest[2 + num_pages + len(Scratch._fields) :]
    segment_tiles = _batch_tiles(qkv, buffers[0], buffers[1], shape)
    prefix_tiles: KeyTiles | OneHeadPages
    if first_heads is None:
        prefix_tiles = _batch_tiles(qkv, buffers[2], buffers[3], shape)
    elif shape.num_kv_heads == 1:
        prefix_tiles = OneHeadPages(pages, buffers[2:4], buffers[4])
    else:
        prefix_tiles = KeyTiles(pages, buffers[2:4], buffers[4], *first_heads)
    Kernel(shape, tiles, qkv, output, Scratch(*scratch), segment_tiles, prefix_tiles).run()


def _batch_tiles(qkv: Ref, buffer: Ref, semaphores: Ref, shape: KernelShape) -> KeyTiles:
    first, count = _segment_heads(shape)
    first_key = shape.num_heads - first
    return KeyTiles((qkv,), (buffer,), semaphores, first_key, first_key + shape.num_kv_heads, heads=pl.ds(first, count))
