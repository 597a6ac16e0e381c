"""What an attention implementation offers. One object per implementation; it holds no arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prefixwise.forward.tiles import DeviceTiles, TileSizes


class Partial(NamedTuple):
    """A softmax over some of the keys: its output, and the log-sum-exp of its scores to merge it by."""

    out: jax.Array  # [T, N, H]
    lse: jax.Array  # [T, N] float32, in the implementation's own base


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Source:
    """Where the key blocks of prefixes lie: the batch's own keys and values, or one layer of the pool."""

    keys: jax.Array  # [A, heads, H]
    values: jax.Array  # [A, heads, H]
    base: jax.Array  # int32 scalar that is added to every block's address
    # Which of the heads of `keys`, and of `values`, is the first KV head's.
    first_key: int = field(default=0, metadata={"static": True})
    first_value: int = field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """What a layer's projection left: every token's queries, keys and values, one behind the other."""

    qkv: jax.Array  # [T, N + 2 K, H]
    num_kv_heads: int = field(metadata={"static": True})

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array) -> Heads:
        """From arrays of their own: q [T, N, H], k and v [T, K, H]."""
        return cls(jnp.concatenate([q, k, v], axis=1), k.shape[1])

    @property
    def num_heads(self) -> int:
        return self.qkv.shape[1] - 2 * self.num_kv_heads

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def q(self) -> jax.Array:
        return self.qkv[:, : self.num_heads]

    @property
    def k(self) -> jax.Array:
        return self.qkv[:, self.num_heads : self.num_heads + self.num_kv_heads]

    @property
    def v(self) -> jax.Array:
        return self.qkv[:, self.num_heads + self.num_kv_heads :]

    def as_source(self) -> Source:
        """The batch's own keys and values as a place where prefixes are read."""
        first_key = self.num_heads
        return Source(self.qkv, self.qkv, jnp.int32(0), first_key, first_key + self.num_kv_heads)


class AttentionImplementation(ABC):
    """Attention over the tiles of `layout/tiles.py`, inside a jitted program, on one device's heads."""

    name: str
    # Does it leave tokens that no tile covers as they were in memory? Then padding needs tiles, too.
    needs_padding_tiles: bool
    max_tokens: int | None = None  # of a program; None: any number
    reads_batches: bool = True  # can prefixes be read in the batch itself, where they begin at any token?

    @abstractmethod
    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        """The reason why it cannot run there, or None."""

    @abstractmethod
    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        """The tiles that a batch is to be cut into."""

    @abstractmethod
    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles) -> jax.Array:
        """Every token over its prefix, which is read in `source` (None: in the batch itself), and over its segment up
        to itself: [T, N, H] in the dtype of the queries."""
