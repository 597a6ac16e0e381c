"""Pages of the KV cache: which are free, which page holds which KV block, and the page table of a batch. numpy only.

A page holds one KV block of a prefix. It is free again when its lease is released. The page table of a batch lists, for
every prefix, where its key tiles lie, as far as its segments read them:

    in the batch      the tokens from a segment on, which lie one after the other
    in the KV cache   pages that were cached before, then those that this forward writes before it reads them
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from prefixwise.contract.errors import BackendError
from prefixwise.contract.ragged import Int32Array, Int64Array, ranges
from prefixwise.forward.batch import ForwardBatch, KVBlock, Prefix
from prefixwise.forward.tiles import KEY_TILE, read_lens

NOT_CACHED = -1  # the slot of a token whose keys and values go to no page


def cache_slots(batch: ForwardBatch, segments: Sequence[int], addresses: Sequence[int], num_tokens: int) -> Int32Array:
    """[num_tokens]: where each token's keys and values go. Those of `segments` to `addresses`, others nowhere."""
    slots = np.full(num_tokens, NOT_CACHED, np.int32)
    chosen = np.asarray(segments, np.int64)
    starts = batch.segment_starts[chosen]
    lens = batch.segment_starts[chosen + 1] - starts
    tokens = ranges(starts, lens)
    slots[tokens] = tokens + np.repeat(np.asarray(addresses, np.int64) - starts, lens)
    return slots


class PageLease:
    """A page that is given back once: when it is released, or when nobody holds the lease any more."""

    def __init__(self, page: int, give_back: Callable[[int], None]) -> None:
        self.page = page
        self.release = weakref.finalize(self, give_back, page)
        self.release.atexit = False

    @property
    def address(self) -> int:
        """Its first token's place in every layer of the pool. Raises where the page was given back."""
        if not self.release.alive:
            raise BackendError("this prefix was given back before it was read; compute it again")
        return self.page * KEY_TILE


class Pages:
    """Pages of KEY_TILE tokens, numbered from 0."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, lens: Sequence[int]) -> list[PageLease]:
        """A page for each block of so many tokens; all of them or none."""
        assert max(lens, default=0) <= KEY_TILE, "a block that is longer than a page"
        if len(lens) > len(self._free):
            raise BackendError(
                f"blocks of prefixes with {sum(lens)} tokens need {len(lens)} pages of {KEY_TILE} tokens, "
                f"and {len(self._free)} of {self.num_pages} are free; "
                "give the prefixes more memory (prefix_cache_bytes), or choose the packed algorithm"
            )
        return [PageLease(self._free.pop(), self._free.append) for _ in lens]


def batch_tiles(batch: ForwardBatch) -> list[Int64Array]:
    """Per prefix the first token of each of its blocks; none where nobody reads it, as on other shards."""
    return [_tokens(batch, *each) for each in zip(batch.prefixes, _longest_reads(batch), strict=True)]


def page_table(
    batch: ForwardBatch, new_pages: Mapping[int, int], address_of: Callable[[KVBlock], int]
) -> list[Int64Array]:
    """Per prefix the addresses of its pages. `new_pages`: those of the segments that this forward keeps."""
    longest = _longest_reads(batch)
    return [_pages(*each, new_pages, address_of) for each in zip(batch.prefixes, longest, strict=True)]


def _longest_reads(batch: ForwardBatch) -> list[int]:
    """Per prefix: the most tokens that a segment reads of it."""
    longest = np.zeros(len(batch.prefixes) + 1, np.int64)  # the last one is nobody's: who reads none has index -1
    np.maximum.at(longest, batch.prefix_index, read_lens(batch))
    found: list[int] = longest[:-1].tolist()
    return found


def _tokens(batch: ForwardBatch, prefix: Prefix, num_tokens: int) -> Int64Array:
    if not num_tokens:
        return np.zeros(0, np.int64)
    assert prefix.segment is not None, "kept blocks are in the pool"
    start = batch.segment_starts[prefix.segment]
    return np.arange(start, start + num_tokens, KEY_TILE)


def _pages(
    prefix: Prefix, num_tokens: int, new_pages: Mapping[int, int], address_of: Callable[[KVBlock], int]
) -> Int64Array:
    num_blocks = -(-num_tokens // KEY_TILE)
    kept = [address_of(block) for block in prefix.blocks[:num_blocks]]
    if len(kept) == num_blocks:
        return np.array(kept, np.int64)
    assert prefix.segment is not None, "a reader of more than the prefix has"
    segments = range(prefix.segment, prefix.segment + num_blocks - len(kept))
    assert all(segment in new_pages for segment in segments), "what is read behind kept blocks must be kept, too"
    return np.array([*kept, *(new_pages[segment] for segment in segments)], np.int64)
