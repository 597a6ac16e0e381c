"""Pages of the KV cache: which are free, which page holds which KV block, and the page table of a batch. numpy only.

A page holds one KV block of a prefix. Releasing its lease frees it. The page table of a batch lists, for
every prefix, where its key tiles lie, as far as its segments read them:

    in the batch      the tokens from a segment on, which are consecutive
    in the KV cache   pages that were cached before, then those that this forward writes before it reads them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from prefixwise.contract.errors import BackendError
from prefixwise.contract.ragged import Int32Array, Int64Array, ranges
from prefixwise.forward.batch import ForwardBatch, KVBlock, Prefix
from prefixwise.forward.tiles import KEY_TILE

NOT_CACHED = -1  # the slot of a token whose keys and values go to no page


def cache_slots(batch: ForwardBatch, segments: Sequence[int], addresses: Sequence[int], num_tokens: int) -> Int32Array:
    """[num_tokens]: the KV cache slot of each token. Tokens of `segments` go to `addresses`, the rest have none."""
    slots = np.full(num_tokens, NOT_CACHED, np.int32)
    if not segments:
        return slots
    chosen = np.array(segments, np.int64)
    starts = batch.segment_starts[chosen]
    lens = batch.segment_starts[chosen + 1] - starts
    tokens = ranges(starts, lens)
    slots[tokens] = tokens + (np.array(addresses, np.int64) - starts).repeat(lens)
    return slots


class PageLease:
    """A reserved page. It is freed once: by `release`, or with the last reference to the lease."""

    def __init__(self, page: int, free: Callable[[int], None]) -> None:
        self.page = page
        self._free: Callable[[int], None] | None = free  # None: it was released

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """A second call does nothing."""
        free, self._free = self._free, None
        if free is not None:
            free(self.page)

    @property
    def address(self) -> int:
        """The slot of its first token, in every layer of the KV cache. Raises where the page was released."""
        if self._free is None:
            raise BackendError("this prefix was released before it was read; compute it again")
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
        """Reserve a page for each block of so many tokens; all of them or none."""
        assert max(lens, default=0) <= KEY_TILE, "a KV block is longer than a page"
        if len(lens) > len(self._free):
            raise BackendError(
                f"KV blocks with {sum(lens)} tokens need {len(lens)} pages of {KEY_TILE} tokens, "
                f"and {len(self._free)} of {self.num_pages} are free; "
                "give the KV cache more memory (prefix_cache_bytes), or choose the packed algorithm"
            )
        return [PageLease(self._free.pop(), self._free.append) for _ in lens]


def batch_tiles(batch: ForwardBatch) -> list[Int64Array]:
    """Per prefix the first token of each of its key tiles; none where no segment reads it, as on other shards."""
    return [_tokens(batch, *each) for each in zip(batch.prefixes, batch.longest_reads, strict=True)]


def page_table(
    batch: ForwardBatch, new_pages: Mapping[int, int], address_of: Callable[[KVBlock], int]
) -> list[Int64Array]:
    """Per prefix the addresses of its pages. `new_pages`: those of the segments that this forward caches."""
    return [_pages(*each, new_pages, address_of) for each in zip(batch.prefixes, batch.longest_reads, strict=True)]


def _tokens(batch: ForwardBatch, prefix: Prefix, num_tokens: int) -> Int64Array:
    if not num_tokens:
        return np.zeros(0, np.int64)
    assert prefix.segment is not None, "cached blocks are in the KV cache"
    start = batch.segment_starts[prefix.segment]
    return np.arange(start, start + num_tokens, KEY_TILE)


def _pages(
    prefix: Prefix, num_tokens: int, new_pages: Mapping[int, int], address_of: Callable[[KVBlock], int]
) -> Int64Array:
    num_blocks = -(-num_tokens // KEY_TILE)
    cached = [address_of(block) for block in prefix.blocks[:num_blocks]]
    if len(cached) == num_blocks:
        return np.array(cached, np.int64)
    assert prefix.segment is not None, "a segment reads more than the prefix has"
    segments = range(prefix.segment, prefix.segment + num_blocks - len(cached))
    assert all(segment in new_pages for segment in segments), "segments after cached blocks must be cached, too"
    return np.array([*cached, *(new_pages[segment] for segment in segments)], np.int64)
