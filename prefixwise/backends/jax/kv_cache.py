"""The pool: keys and values of prefixes in every layer, in pages of KEY_TILE tokens.

One array per device for all prefixes, so that the shape of a program does not depend on how many prefixes there are
or how long they are. A block of a prefix is a page, and gives it back when it is dropped.
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
from prefixwise.forward.batch import KVBlock
from prefixwise.forward.kv_pages import PageLease, Pages
from prefixwise.forward.tiles import KEY_TILE

POOL_SPEC = P(None, TENSOR)


class KVCacheArrays(NamedTuple):
    """[Ly A, tp Kl, H] each: layer after layer, A tokens in each. On a CPU bfloat16 is kept as uint16, its bits
    (`row_blocks.as_bits` says why)."""

    keys: jax.Array
    values: jax.Array


@dataclass(frozen=True)
class KVCacheShape:
    """How large it is."""

    num_layers: int
    num_pages: int
    heads: tuple[int, int]  # KV heads of all shards, and the head size
    dtype: jnp.dtype

    @classmethod
    def of(cls, *, num_layers: int, num_tokens: int, heads: tuple[int, int], dtype: jnp.dtype) -> KVCacheShape:
        """Of whole pages, and at least one."""
        return cls(num_layers, max(1, num_tokens // KEY_TILE), heads, dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of keys, and of values."""
        return self.num_layers * self.num_pages * KEY_TILE, *self.heads

    def page_bytes(self, tp_size: int) -> int:
        """Keys and values of a page in every layer, on each device."""
        local_heads = self.heads[0] // tp_size
        return 2 * self.num_layers * KEY_TILE * local_heads * self.heads[1] * self.dtype.itemsize

    def arrays(self, mesh: Mesh) -> KVCacheArrays:
        """What a program must know of them: shapes, dtypes, and where they are."""
        shape: Any = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=NamedSharding(mesh, POOL_SPEC))
        return KVCacheArrays(shape, shape)


@dataclass(frozen=True)
class JaxBlock(KVBlock):
    """A block of a prefix in the pool. Equal to none but itself, since no two hold one lease."""

    lease: PageLease
    generation: int  # of the pool that holds it

    def release(self) -> None:
        self.lease.release()


class KVCache:
    """The arrays, and which pages are free."""

    def __init__(self, mesh: Mesh, shape: KVCacheShape) -> None:
        self.num_pages = shape.num_pages
        self._make = jax.jit(partial(_zeros, shape.shape, shape.dtype), out_shardings=NamedSharding(mesh, POOL_SPEC))
        self.generation = 0
        self._reset()

    def _reset(self) -> None:
        self.arrays: KVCacheArrays = self._make()
        self._pages = Pages(self.num_pages)  # what is given back of the old ones, on any thread, is nobody's

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._pages.num_free

    def recover(self) -> None:
        """After a failure: where it took the arrays with it, begin again, without the prefixes that were here."""
        try:
            jax.block_until_ready(self.arrays)
        except Exception:  # whatever the device died of; it has been reported by the forward itself
            self.generation += 1
            self._reset()

    def take(self, lens: Sequence[int]) -> list[JaxBlock]:
        """A page for each block of so many tokens; all of them or none."""
        leases = self._pages.take(lens)
        return [JaxBlock(length, lease, self.generation) for length, lease in zip(lens, leases, strict=True)]

    def address(self, block: KVBlock) -> int:
        """Where it lies in each layer. Raises where the block was given back, or went down with an earlier pool."""
        assert isinstance(block, JaxBlock), "a block of another backend"
        if block.generation != self.generation:
            raise BackendError("this prefix was lost when a forward pass failed; compute it again")
        return block.lease.address


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype) -> KVCacheArrays:
    return KVCacheArrays(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
