"""One forward pass as arrays on the host: what the engine passes to a backend, and what the backend returns.

Every algorithm is the same forward with another **attention layout**. A batch is a flat run of tokens, cut into
*segments*. A segment is a KV block of a prefix, or the tokens of an item. Its tokens attend to

    the first `prefix_lens[i]` tokens of its prefix   (none, cached KV blocks, tokens of this forward, or both)
    its own tokens up to themselves                   (causal)

and to nothing else, so other segments of a batch cannot change its numbers:

    prefill  [block 2][block 3] ...                      each block reads those before it, cached or in this forward
    extend   [item 0][item 1][item 2]  ...               the prefixes' KV blocks are cached; any number of prefixes
    joined   [block 2][block 3][item 0][item 1] ...      both: the blocks are cached, and items may read them
    packed   [blocks of the prefix][item 0][item 1] ...  items of a sequence read the sequence's prefix
    causal   [blocks of the prefix][item 0]  ...         serial: each item with its own copy of the prefix

Positions continue from the prefix's length, whichever item it is. A prefix is always cut into KV blocks of
KV_BLOCK_SIZE tokens (for log-likelihoods what is left behind them perhaps into shorter ones), so that its numbers do
not depend on how many of them were cached by earlier requests.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.ragged import Int32Array, Int64Array

MaskImpl = Literal["dense", "segment"]

KV_BLOCK_SIZE = 128  # tokens of a KV block; the last one of a prefix may have fewer


class Layout(StrEnum):
    """Where the segments of a forward find their prefixes."""

    CAUSAL = "causal"
    PACKED = "packed"
    EXTEND = "extend"


@dataclass(frozen=True, eq=False)  # compared by identity: they hold arrays
class KVBlock(ABC):
    """Keys and values of up to KV_BLOCK_SIZE tokens of a prefix in every layer, held by the backend that made them."""

    num_tokens: int

    def release(self) -> None:  # noqa: B027  # optional: most free their memory with the last reference
        """Free its memory now; it must not be read again. A second call does nothing."""


class Prefix(NamedTuple):
    """What segments read: cached KV blocks from its start, then tokens of this batch, or either alone."""

    # Each of KV_BLOCK_SIZE tokens; the last one may have fewer and, with `BackendInfo.reads_short_blocks`, any of them.
    blocks: tuple[KVBlock, ...] = ()
    # The prefix continues with the tokens of this segment and of those after it, up to the length that a segment reads.
    # After cached blocks these segments are KV blocks, which the forward caches.
    segment: int | None = None


@dataclass(frozen=True, eq=False)
class EmbedOverrides:
    """Tokens of a batch whose embedding is a vector in place of their row of the embedding table.

    A family that scales embeddings scales these vectors too, so a token's own row as its vector changes no bit.
    """

    tokens: Int64Array  # [E]: in ascending order
    vectors: Vectors  # [E, D]: rounded to the table's dtype by the backend

    def between(self, start: int, stop: int) -> EmbedOverrides | None:
        """Those of tokens start..stop, for a batch that begins at `start`."""
        first, last = np.searchsorted(self.tokens, [start, stop])
        return EmbedOverrides(self.tokens[first:last] - start, self.vectors[first:last]) if last > first else None


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass: the tokens, what each of them sees, and which logits to compute. Arrays are numpy."""

    layout: Layout
    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    segment_starts: Int64Array  # [segments + 1]: segment i is tokens segment_starts[i]..segment_starts[i + 1]
    prefix_index: Int64Array  # [segments]: which of `prefixes` it reads, -1 for none
    prefix_lens: Int64Array  # [segments]: how many tokens of it
    prefixes: tuple[Prefix, ...]
    sequence_starts: Int64Array  # [sequences + 1]: token offsets of the sequences of causal and packed layouts
    score_tokens: Int64Array  # [R]: logits are computed after these tokens
    label_ids: Int32Array  # [R, L]: for these vocabulary entries
    need_logsumexp: bool = False  # also the log-sum-exp over the whole vocabulary?
    need_hidden: bool = False  # also the hidden states of the scored tokens?
    # Also so many of the most likely tokens of the vocabulary. Then the label logits, [R, 1], and the log-sum-exp are
    # taken from the same pass over the vocabulary.
    top_k: int = 0
    cache_segments: tuple[int, ...] = ()  # segments of at most KV_BLOCK_SIZE tokens, each cached as a KVBlock
    mask: MaskImpl = "segment"  # packed layout only
    embed_overrides: EmbedOverrides | None = None
    lora_slots: Int32Array | None = None  # [T]: the slot of each token's LoRA adapter, 0: none; None: no token has one

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def read_lens(self) -> Int64Array:
        """[segments]: how many prefix tokens it reads."""
        return np.where(self.prefix_index >= 0, self.prefix_lens, 0)

    @cached_property
    def longest_reads(self) -> list[int]:
        """[prefixes]: the greatest number of its tokens that a segment reads."""
        longest = np.zeros(len(self.prefixes) + 1, np.int64)  # the last one for segments without a prefix: index -1
        np.maximum.at(longest, self.prefix_index, self.read_lens)
        found: list[int] = longest[:-1].tolist()
        return found


@dataclass(frozen=True)
class ForwardOutput:
    """The results on the host, and the KV blocks that stay on the device."""

    label_logits: NDArray[np.float32]  # [R, L]
    logsumexp: NDArray[np.float32] | None  # [R]
    blocks: tuple[KVBlock, ...]  # one per `cache_segments`
    hidden: NDArray[np.float32] | None = None  # [R, D]: after the final norm, where the batch needs them
    top_logits: NDArray[np.float32] | None = None  # [R, K]: the largest first, where the batch needs them
    top_ids: Int32Array | None = None  # [R, K]: their tokens


@dataclass(frozen=True)
class RunningForward:
    """A forward that the device may still be computing."""

    blocks: tuple[KVBlock, ...]  # one per `cache_segments`; forwards that start after this one may read them
    wait: Callable[[], ForwardOutput]  # until the device has computed all of it; raises an error of the device
