"""Copies of any number of tokens between a TPU's HBM and its VMEM, starting at any token.

Arrays are [tokens, heads, H]: the hardware tiles the last two axes, so a copy may start at any token. DMA sizes are
fixed and the count is data, so a copy runs in parts of PART_TOKENS, the largest first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from prefixwise.forward.tiles import KEY_TILE

PART_TOKENS = (128, 16, 1)

Ref = Any  # Pallas has no public type for references
Range = slice | pl.Slice  # of tokens or heads, as `pl.ds` returns it


@dataclass(frozen=True)
class TokenCopy:
    """A copy of `count` tokens, at most `longest`, from `source` to `target`, both [tokens, heads, H]."""

    source: Callable[[jax.Array, int], Ref]  # the part at an offset, of a size in tokens
    target: Callable[[jax.Array, int], Ref]
    semaphore: Ref
    count: jax.Array
    longest: int

    def start(self) -> None:
        self._for_each_part(lambda copy: copy.start())

    def wait(self) -> None:
        self._for_each_part(lambda copy: copy.wait())

    def _for_each_part(self, act: Callable[[Any], None]) -> None:
        done = jnp.int32(0)
        for size in PART_TOKENS:
            if size <= self.longest:
                num_parts = lax.div(self.count - done, size)
                lax.fori_loop(0, num_parts, partial(self._part, size, done, act), None)
                done += num_parts * size

    def _part(self, size: int, first: jax.Array, act: Callable[[Any], None], number: jax.Array, _: None) -> None:
        offset = first + number * size
        act(pltpu.make_async_copy(self.source(offset, size), self.target(offset, size), self.semaphore))


def tokens_of(ref: Ref, first: jax.Array | int, heads: Range | None = None) -> Callable[[jax.Array, int], Ref]:
    """Parts of a ref [tokens, heads, H] from token `first` on, with all heads or some."""

    def part(offset: jax.Array, size: int) -> Ref:
        tokens = pl.ds(first + offset, size)
        return ref.at[tokens] if heads is None else ref.at[tokens, heads]

    return part


@dataclass(frozen=True)
class KeyTiles:
    """Key tiles in HBM, double-buffered: one is copied to VMEM while another is in use.

    `refs` are one array of keys and values, or one array each: [A, heads, H]. A copy takes `heads` (None: all).
    """

    refs: tuple[Ref, ...]  # [A, heads, H] each
    buffers: tuple[Ref, ...]  # [2, KEY_TILE, heads, H] each
    semaphores: Ref  # [2, number of refs]
    first_key: int  # the first KV head's index in the first buffer
    first_value: int  # and in the last buffer
    heads: Range | None = None

    def copies(self, number: jax.Array, address: jax.Array, count: jax.Array) -> list[TokenCopy]:
        """The copies of key tile `number`, of which `count` tokens are needed."""
        slot = lax.rem(number, 2)
        return [
            TokenCopy(
                tokens_of(ref, address, self.heads),
                tokens_of(buffer.at[slot], 0),
                self.semaphores.at[slot, place],
                jnp.minimum(count, KEY_TILE),
                min(KEY_TILE, len(ref)),
            )
            for place, (ref, buffer) in enumerate(zip(self.refs, self.buffers, strict=True))
        ]

    def unpack(self, number: jax.Array, count: jax.Array | None, keys: Ref, values: Ref) -> None:
        """Move a tile that has arrived to keys and values [K, KEY_TILE, H]; values behind `count` become zero."""
        slot, num_heads = lax.rem(number, 2), len(keys)
        of_keys = self.buffers[0].at[slot][:, self.first_key : self.first_key + num_heads]
        keys[...] = jnp.swapaxes(of_keys, 0, 1)
        of_values = self.buffers[-1].at[slot][:, self.first_value : self.first_value + num_heads]
        by_head = jnp.swapaxes(of_values, 0, 1)
        if count is not None:
            token = lax.broadcasted_iota(jnp.int32, values.shape, 1)
            by_head = jnp.where(token < count, by_head, jnp.zeros_like(by_head))
        values[...] = by_head


@dataclass(frozen=True)
class OneHeadPages:
    """`KeyTiles` for a KV cache with one KV head, which copies whole pages: [pages, KEY_TILE, H].

    A TPU would pad [tokens, 1, H] to two heads, so the program would copy the whole KV cache.
    """

    refs: tuple[Ref, Ref]  # keys and values
    buffers: tuple[Ref, Ref]  # [2, KEY_TILE, H] each
    semaphores: Ref  # [2, 2]

    def copies(self, number: jax.Array, address: jax.Array, count: jax.Array) -> list[Any]:
        """The copies of key tile `number`; tokens behind `count` are copied too, and masked."""
        slot, page = lax.rem(number, 2), lax.div(address, KEY_TILE)
        return [
            pltpu.make_async_copy(ref.at[page], buffer.at[slot], self.semaphores.at[slot, place])
            for place, (ref, buffer) in enumerate(zip(self.refs, self.buffers, strict=True))
        ]

    def unpack(self, number: jax.Array, count: jax.Array | None, keys: Ref, values: Ref) -> None:
        """As `KeyTiles.unpack`."""
        slot = lax.rem(number, 2)
        keys[0] = self.buffers[0][slot]
        found = self.buffers[1][slot]
        if count is not None:
            token = lax.broadcasted_iota(jnp.int32, found.shape, 0)
            found = jnp.where(token < count, found, jnp.zeros_like(found))
        values[0] = found
