"""The interface of an attention implementation. One object per implementation; it holds no arrays."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prefixwise.forward.tiles import DeviceTiles, TileSizes


class Partial(NamedTuple):
    """A softmax over some of the keys: its output, and the logsumexp of its scores to merge it by."""

    out: jax.Array  # [T, N, H]
    lse: jax.Array  # [T, N] float32, in the base that the implementation uses


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Source:
    """The keys and values of prefixes: those of the batch itself, or one layer of the KV cache."""

    keys: jax.Array  # [A, heads, H]
    values: jax.Array  # [A, heads, H]
    base: jax.Array  # int32 scalar that is added to every key tile's address
    # The first KV head's index among the heads of `keys`, and of `values`.
    first_key: int = field(default=0, metadata={"static": True})
    first_value: int = field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """The output of a layer's QKV projection: every token's queries, keys and values, concatenated."""

    qkv: jax.Array  # [T, N + 2 K, H]
    num_kv_heads: int = field(metadata={"static": True})

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array) -> Heads:
        """Concatenate q [T, N, H], k and v [T, K, H]."""
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
        """The batch's own keys and values, for prefixes in the batch."""
        first_key = self.num_heads
        return Source(self.qkv, self.qkv, jnp.int32(0), first_key, first_key + self.num_kv_heads)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scoring:
    """How a layer scores the keys that its tokens see."""

    # int32 scalar, how many tokens a token sees, itself included, NO_WINDOW for all; None: no layer has a window.
    window: jax.Array | None = None
    scale: float | None = field(default=None, metadata={"static": True})  # None: 1 / sqrt(H)
    softcap: float = field(default=0.0, metadata={"static": True})  # s becomes softcap * tanh(s / softcap); 0: stays
    is_causal: bool = field(default=True, metadata={"static": True})  # False: a token sees its whole segment

    @property
    def is_plain(self) -> bool:
        return self.is_causal and self.window is None and self.scale is None and not self.softcap

    def scaled(self, q: jax.Array) -> jax.Array:
        """Queries [.., H], such that their dot products with keys are scores before they are capped."""
        return q / math.sqrt(q.shape[-1]) if self.scale is None else q * self.scale

    def capped(self, scores: jax.Array) -> jax.Array:
        return self.softcap * jnp.tanh(scores / self.softcap) if self.softcap else scores

    def seen(self, distance: jax.Array) -> jax.Array | bool:
        """May a token see a key that is so many positions before it?"""
        return True if self.window is None else distance < self.window

    def first_seen(self, position: jax.Array) -> jax.Array | int:
        """The first position that a token at `position` sees."""
        return 0 if self.window is None else jnp.maximum(position - self.window + 1, 0)


PLAIN = Scoring()
NO_WINDOW = 1 << 30


class AttentionImplementation(ABC):
    """Attention over the tiles of `forward/tiles.py`, inside a jitted program, on one device's heads."""

    name: str
    # Does it leave the output of tokens outside all tiles undefined? Then padding needs tiles too.
    needs_padding_tiles: bool
    max_tokens: int | None = None  # of a program; None: any number
    reads_batches: bool = True  # can it read prefixes in the batch, where they begin at any token?
    takes_scorings: bool = False  # can it compute any causal `Scoring`, or PLAIN alone?
    takes_bidirectional: bool = False  # can it compute a `Scoring` that is not causal?

    def __repr__(self) -> str:
        """The same for all that compute the same, as it names programs on disk."""
        return f"{type(self).__name__}({vars(self)})"

    @abstractmethod
    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        """The reason why it cannot run there; None where it can."""

    @abstractmethod
    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        """The tiles into which a batch must be cut."""

    @abstractmethod
    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles, scoring: Scoring = PLAIN) -> jax.Array:
        """Prefix attention and self-attention within the segment, merged: [T, N, H] in the dtype of the queries.

        Prefixes are read in `source` (None: in the batch itself)."""
