"""The pool: keys and values of prefixes in every layer, in pages of KEY_BLOCK tokens.

One array per device for all prefixes, so that the shape of a program does not depend on how many prefixes there are
or how long they are. A prefix is a list of pages, and gives them back when it is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from itemwise.backends.base import PrefixState
from itemwise.backends.jax.attention.tiles import KEY_BLOCK
from itemwise.backends.jax.mesh import TENSOR, P
from itemwise.contract.errors import BackendError
from itemwise.contract.ragged import Int64Array

POOL_SPEC = P(None, TENSOR)


class PoolArrays(NamedTuple):
    """[Ly A, tp Kl, H] each: layer after layer, A tokens in each. On a CPU bfloat16 is kept as uint16, its bits
    (`row_blocks.as_bits` says why)."""

    keys: jax.Array
    values: jax.Array


class PageLease:
    """Pages that are given back once: when they are released, or when nobody holds the lease any more."""

    def __init__(self, pages: list[int], give_back: Callable[[list[int]], None]) -> None:
        self.pages = np.array(pages, np.int64)
        self.release = weakref.finalize(self, give_back, pages)
        self.release.atexit = False


@dataclass(frozen=True, eq=False)
class JaxPrefix(PrefixState):
    """A prefix in the pool."""

    lease: PageLease
    page_bytes: int
    generation: int  # of the pool that holds it

    @property
    def num_bytes(self) -> int:
        return len(self.lease.pages) * self.page_bytes

    def release(self) -> None:
        self.lease.release()

    @property
    def block_addresses(self) -> Int64Array:
        return self.lease.pages * KEY_BLOCK


class PagePool:
    """The arrays, and which pages are free."""

    def __init__(
        self, mesh: Mesh, *, num_layers: int, num_tokens: int, heads: tuple[int, int], dtype: jnp.dtype
    ) -> None:
        """`heads`: KV heads of all shards, and the head size."""
        self.num_pages = max(1, num_tokens // KEY_BLOCK)
        self.tokens_per_layer = self.num_pages * KEY_BLOCK
        shape = (num_layers * self.tokens_per_layer, *heads)
        sharding = NamedSharding(mesh, POOL_SPEC)
        self._make = jax.jit(partial(_zeros, shape, dtype), out_shardings=sharding)
        self.page_bytes = 2 * num_layers * KEY_BLOCK * int(np.prod(heads)) * dtype.itemsize
        self.generation = 0
        self._reset()

    def _reset(self) -> None:
        self.arrays: PoolArrays = self._make()
        self._free = list(range(self.num_pages))[::-1]

    def recover(self) -> None:
        """After a failure: where it took the arrays with it, begin again, without the prefixes that were here."""
        try:
            jax.block_until_ready(self.arrays)
        except Exception:  # whatever the device died of; it has been reported by the forward itself
            self.generation += 1
            self._reset()

    def take(self, lens: Sequence[int]) -> list[JaxPrefix]:
        """Pages for prefixes of these lengths; all of them or none."""
        counts = [-(-length // KEY_BLOCK) for length in lens]
        if sum(counts) > len(self._free):
            raise BackendError(
                f"prefixes of {sum(lens)} tokens need {sum(counts)} pages of {KEY_BLOCK} tokens, "
                f"and {len(self._free)} of {self.num_pages} are free; "
                "give the prefixes more memory (prefix_cache_bytes), or choose the packed algorithm"
            )
        return [self._prefix(length, count) for length, count in zip(lens, counts, strict=True)]

    def _prefix(self, length: int, count: int) -> JaxPrefix:
        pages = [self._free.pop() for _ in range(count)]
        lease = PageLease(pages, partial(self._give_back, generation=self.generation))
        return JaxPrefix(length, lease, self.page_bytes, self.generation)

    def _give_back(self, pages: list[int], generation: int) -> None:
        if generation == self.generation:
            self._free.extend(reversed(pages))

    def check(self, prefix: JaxPrefix) -> JaxPrefix:
        """Raises where the prefix went down with an earlier pool."""
        if prefix.generation != self.generation:
            raise BackendError("this prefix was lost when a forward pass failed; compute it again")
        return prefix


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype) -> PoolArrays:
    return PoolArrays(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
