"""What an attention implementation offers. One object per implementation; it holds no arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from itemwise.backends.layout.tiles import DeviceTiles, TileSizes


class Partial(NamedTuple):
    """A softmax over some of the keys: its output, and the log-sum-exp of its scores to merge it by."""

    out: jax.Array  # [T, N, H]
    lse: jax.Array  # [T, N] float32, in the implementation's own base


class Source(NamedTuple):
    """Where the key blocks of prefixes lie: the batch's own keys and values, or one layer of the pool."""

    keys: jax.Array  # [A, K, H]
    values: jax.Array  # [A, K, H]
    base: jax.Array  # int32 scalar that is added to every block's address


class AttentionImplementation(ABC):
    """Both parts of attention over the tiles of `tiles.py`, inside a jitted program, on one device's heads."""

    name: str
    # Does it leave tokens that no tile covers as they were in memory? Then padding needs tiles, too.
    needs_padding_tiles: bool

    @abstractmethod
    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        """The reason why it cannot run there, or None."""

    @abstractmethod
    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        """The tiles that a batch is to be cut into."""

    @abstractmethod
    def batch_source(self, k: jax.Array, v: jax.Array) -> Source:
        """The batch's own keys and values [T, K, H] as a place where prefixes are read."""

    @abstractmethod
    def own(self, q: jax.Array, k: jax.Array, v: jax.Array, tiles: DeviceTiles) -> Partial:
        """Every segment's tokens over themselves: q [T, N, H], k and v [T, K, H]."""

    @abstractmethod
    def with_prefix(self, q: jax.Array, source: Source, own: Partial, tiles: DeviceTiles) -> jax.Array:
        """The prefix part, merged with the own part: [T, N, H] in q's dtype."""
