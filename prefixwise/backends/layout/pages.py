"""Which pages of a pool of keys and values are free, and what goes where: any backend can have its pool beside it.

A page holds a block of a prefix, and is given back when nobody holds its lease any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np

from prefixwise.backends.base import ForwardBatch
from prefixwise.backends.layout.tiles import KEY_BLOCK
from prefixwise.contract.errors import BackendError
from prefixwise.contract.ragged import Int32Array, ranges

NOT_KEPT = -1  # the slot of a token whose keys and values go to no page


def keep_slots(batch: ForwardBatch, segments: Sequence[int], addresses: Sequence[int], num_tokens: int) -> Int32Array:
    """[num_tokens]: where each token's keys and values go. Those of `segments` to `addresses`, others nowhere."""
    slots = np.full(num_tokens, NOT_KEPT, np.int32)
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
        return self.page * KEY_BLOCK


class Pages:
    """Pages of KEY_BLOCK tokens, numbered from 0."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, lens: Sequence[int]) -> list[PageLease]:
        """A page for each block of so many tokens; all of them or none."""
        assert max(lens, default=0) <= KEY_BLOCK, "a block that is longer than a page"
        if len(lens) > len(self._free):
            raise BackendError(
                f"blocks of prefixes with {sum(lens)} tokens need {len(lens)} pages of {KEY_BLOCK} tokens, "
                f"and {len(self._free)} of {self.num_pages} are free; "
                "give the prefixes more memory (prefix_cache_bytes), or choose the packed algorithm"
            )
        return [PageLease(self._free.pop(), self._free.append) for _ in lens]
