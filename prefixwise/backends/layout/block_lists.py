"""Where the key blocks of a batch's prefixes lie, each as far as its readers read: numpy only.

in the batch   the tokens from a segment on, which lie one after the other
in the pool    pages that were kept before, then those that this forward writes before it reads them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from prefixwise.backends.base import ForwardBatch, Prefix, PrefixBlock
from prefixwise.backends.layout.tiles import KEY_BLOCK, read_lens
from prefixwise.contract.ragged import Int64Array


def batch_blocks(batch: ForwardBatch) -> list[Int64Array]:
    """Per prefix the first token of each of its blocks; none where nobody reads it, as on other shards."""
    return [_tokens(batch, *each) for each in zip(batch.prefixes, _longest_reads(batch), strict=True)]


def pool_blocks(
    batch: ForwardBatch, new_pages: Mapping[int, int], address_of: Callable[[PrefixBlock], int]
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
    return np.arange(start, start + num_tokens, KEY_BLOCK)


def _pages(
    prefix: Prefix, num_tokens: int, new_pages: Mapping[int, int], address_of: Callable[[PrefixBlock], int]
) -> Int64Array:
    num_blocks = -(-num_tokens // KEY_BLOCK)
    kept = [address_of(block) for block in prefix.blocks[:num_blocks]]
    if len(kept) == num_blocks:
        return np.array(kept, np.int64)
    assert prefix.segment is not None, "a reader of more than the prefix has"
    segments = range(prefix.segment, prefix.segment + num_blocks - len(kept))
    assert all(segment in new_pages for segment in segments), "what is read behind kept blocks must be kept, too"
    return np.array([*kept, *(new_pages[segment] for segment in segments)], np.int64)
