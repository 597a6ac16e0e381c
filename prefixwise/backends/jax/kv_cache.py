"""The KV cache: keys and values of prefixes in every layer, in pages of KV_BLOCK_SIZE tokens.

One array per device holds all prefixes, so the shape of a program depends neither on their number nor on their lengths.
A KV block is one page; releasing the block frees the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from prefixwise.backends.jax.mesh import TENSOR, P
from prefixwise.contract.errors import BackendError
from prefixwise.forward.batch import KV_BLOCK_SIZE, KVBlock
from prefixwise.forward.kv_pages import PageLease, Pages

KV_CACHE_SPEC = P(None, TENSOR)


class KVCacheArrays(NamedTuple):
    """[Ly A, tp Kl, H] each: layer after layer, A tokens in each. On a CPU bfloat16 is stored as the uint16 of its bits
    (see `row_tiles.as_bits`)."""

    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True)
class KVCacheShape:
    """Layers, pages, heads and dtype."""

    num_layers: int
    num_pages: int
    heads: tuple[int, int]  # KV heads of all shards, and the head size
    dtype: jnp.dtype

    @classmethod
    def of(cls, *, num_layers: int, num_tokens: int, heads: tuple[int, int], dtype: jnp.dtype) -> KVCacheShape:
        """Round the tokens down to whole pages, at least one."""
        return cls(num_layers, max(1, num_tokens // KV_BLOCK_SIZE), heads, dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the keys, and of the values."""
        return self.num_layers * self.num_pages * KV_BLOCK_SIZE, *self.heads

    def page_bytes(self, tp_size: int) -> int:
        """Bytes of a page's keys and values in every layer, on each device."""
        local_heads = self.heads[0] // tp_size
        return 2 * self.num_layers * KV_BLOCK_SIZE * local_heads * self.heads[1] * self.dtype.itemsize

    def arrays(self, mesh: Mesh) -> KVCacheArrays:
        """Shapes, dtypes and shardings, for compiling programs."""
        shape: Any = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=NamedSharding(mesh, KV_CACHE_SPEC))
        return KVCacheArrays(shape, shape)


@dataclass(frozen=True)
class JaxKVBlock(KVBlock):
    """A block of a prefix in the KV cache. Blocks are equal by identity, since no two hold the same lease."""

    lease: PageLease
    generation: int  # of the cache arrays that hold it

    def release(self) -> None:
        self.lease.release()


class KVCache:
    """The arrays, and the free pages."""

    def __init__(self, mesh: Mesh, shape: KVCacheShape) -> None:
        self.num_pages = shape.num_pages
        sharding = NamedSharding(mesh, KV_CACHE_SPEC)
        self._make = jax.jit(partial(_zeros, shape.shape, shape.dtype), out_shardings=sharding)
        self.generation = 0
        self._reset()

    def _reset(self) -> None:
        self.arrays: KVCacheArrays = self._make()
        self._pages = Pages(
            self.num_pages
        )  # leases of the old pages may still be released, on any thread, to no effect

    @property
    def num_free(self) -> int:
        """Free pages."""
        return self._pages.num_free

    def recover(self) -> None:
        """After a failure: make new arrays where the old ones are lost. Their prefixes are lost with them."""
        try:
            jax.block_until_ready(self.arrays)
        except Exception:  # of any type; the forward itself has reported the cause
            self.generation += 1
            self._reset()

    def take(self, lens: Sequence[int]) -> list[JaxKVBlock]:
        """Allocate a page for each block of so many tokens; all of them or none."""
        leases = self._pages.take(lens)
        return [JaxKVBlock(length, lease, self.generation) for length, lease in zip(lens, leases, strict=True)]

    def address(self, block: KVBlock) -> int:
        """The block's first token in each layer. Raises where the block was released, or lost in a failure."""
        assert isinstance(block, JaxKVBlock), "a block of another backend"
        if block.generation != self.generation:
            raise BackendError("this prefix was lost when a forward pass failed; compute it again")
        return block.lease.address


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype) -> KVCacheArrays:
    return KVCacheArrays(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
