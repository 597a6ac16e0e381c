"""Attention on TPUs: a Pallas kernel that Mosaic compiles (`tpu_kernel.py`), and the sizes of its blocks.

Own part and prefix part are one kernel, so that a softmax's state never leaves VMEM. Metadata of the tiles are in SMEM;
queries, keys, values and pages stay in HBM, from where the kernel copies what a tile needs, at addresses that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Source
from prefixwise.backends.jax.attention.tpu_copies import KeyBlocks, OneHeadPages, Ref
from prefixwise.backends.jax.attention.tpu_kernel import Kernel, KernelShape, Scratch, TileRefs
from prefixwise.backends.jax.attention.tpu_softmax import LANES
from prefixwise.forward.tiles import KEY_TILE, DeviceTiles, TileSizes

NARROW_TOKENS = 32
LEAST_TILE_TOKENS, MOST_TILE_TOKENS = 32, 256
# Of a program: metadata of its tiles are in SMEM, 24 to 28 bytes a token, and that has 1 MiB.
MAX_TOKENS = 32_768
HEAD_TILE = 16  # heads that a copy takes some of begin at a multiple of so many, in either dtype


@dataclass(frozen=True)
class Generation:
    """What the kernel's blocks are for one generation of TPUs; a token's numbers do not depend on it."""

    tile_rows: int  # of a product: tokens of a tile times query heads of a KV head
    vmem_bytes: int  # that the kernel may take


# By jax's names of devices; both have 128 MiB of VMEM. Of the instructions that the compiler schedules for a key block
# (8 KV heads of 128, 2 query heads each) 256 rows need 1.31 times as many for each row as 512 on a v5e, 1.27 on a v6e.
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
        return TileSizes(NARROW_TOKENS, wide=KEY_TILE, prefix=tokens, alignment=1)  # every token is in a tile

    @property
    def _generation(self) -> Generation:
        device = self._device or jax.devices()[0].device_kind
        return GENERATIONS.get(device, GENERATIONS[DEFAULT_GENERATION])

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles) -> jax.Array:
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
    """[A, K, H], or [pages, KEY_TILE, H] where there is one KV head: `OneHeadPages` says why."""
    return array.reshape(-1, KEY_TILE, shape.head_size) if shape.num_kv_heads == 1 else array


def _metadata(tiles: DeviceTiles, base: jax.Array) -> TileRefs:
    """In the kernel these are refs."""
    of_tiles = [getattr(tiles, field) for field in TileRefs._fields[:-1]]
    return TileRefs(*[*of_tiles, base.reshape(1)])


def _scratch(shape: KernelShape, dtype: jnp.dtype, arrays: list[jax.Array]) -> list[Any]:
    """Those of `Scratch`; then buffers and semaphores of a segment's key blocks, and of pages if there are any."""
    n, k, h = shape.num_heads, shape.num_kv_heads, shape.head_size
    window, part = shape.window_tokens, (-(-h // LANES), min(h, LANES))
    fixed = Scratch(
        window=pltpu.VMEM((2, window, n + 2 * k, h), dtype),
        heads=pltpu.VMEM((part[0], n + 2 * k, window, part[1]), jnp.float32),
        q=pltpu.VMEM((n, shape.tile_tokens, h), dtype),
        keys=pltpu.VMEM((k, KEY_TILE, h), dtype),
        values=pltpu.VMEM((k, KEY_TILE, h), dtype),
        out=pltpu.VMEM((part[0], n, window, part[1]), jnp.float32),
        peak=pltpu.VMEM((1, n, window, LANES), jnp.float32),
        total=pltpu.VMEM((1, n, window, LANES), jnp.float32),
        result=pltpu.VMEM((2, shape.tile_tokens, n, h), dtype),
        window_semaphores=pltpu.SemaphoreType.DMA((2,)),
        result_semaphores=pltpu.SemaphoreType.DMA((2,)),
    )
    own = pltpu.VMEM((2, KEY_TILE, _segment_heads(shape)[1], h), dtype)
    if len(arrays) == 1:  # prefixes are in the batch, too
        return [*fixed, own, pltpu.SemaphoreType.DMA((2, 1)), own, pltpu.SemaphoreType.DMA((2, 1))]
    page_shape = (KEY_TILE, h) if k == 1 else (KEY_TILE, *arrays[1].shape[1:])
    pages = [pltpu.VMEM((2, *page_shape), array.dtype) for array in arrays[1:]]
    return [*fixed, own, pltpu.SemaphoreType.DMA((2, 1)), *pages, pltpu.SemaphoreType.DMA((2, 2))]


def _segment_heads(shape: KernelShape) -> tuple[int, int]:
    """The first of the heads that a block of a segment is copied with, and how many: keys and values, or all."""
    if shape.num_heads % HEAD_TILE or 2 * shape.num_kv_heads % HEAD_TILE:
        return 0, shape.num_all_heads
    return shape.num_heads, 2 * shape.num_kv_heads


def _kernel(*refs: Ref, shape: KernelShape, first_heads: tuple[int, int] | None) -> None:
    """Refs: metadata in SMEM; qkv and, with `first_heads`, keys and values of pages, in HBM; the output; scratch."""
    num_pages = 0 if first_heads is None else 2
    tiles, rest = TileRefs(*refs[: len(TileRefs._fields)]), refs[len(TileRefs._fields) :]
    qkv, pages, output = rest[0], rest[1 : 1 + num_pages], rest[1 + num_pages]
    scratch, own = rest[2 + num_pages :][: len(Scratch._fields)], rest[2 + num_pages + len(Scratch._fields) :]
    segment_blocks = _batch_blocks(qkv, own[0], own[1], shape)
    prefix_blocks: KeyBlocks | OneHeadPages
    if first_heads is None:
        prefix_blocks = _batch_blocks(qkv, own[2], own[3], shape)
    elif shape.num_kv_heads == 1:
        prefix_blocks = OneHeadPages(pages, own[2:4], own[4])
    else:
        prefix_blocks = KeyBlocks(pages, own[2:4], own[4], *first_heads)
    Kernel(shape, tiles, qkv, output, Scratch(*scratch), segment_blocks, prefix_blocks).run()


def _batch_blocks(qkv: Ref, buffer: Ref, semaphores: Ref, shape: KernelShape) -> KeyBlocks:
    first, count = _segment_heads(shape)
    first_key = shape.num_heads - first
    return KeyBlocks(
        (qkv,), (buffer,), semaphores, first_key, first_key + shape.num_kv_heads, heads=pl.ds(first, count)
    )
