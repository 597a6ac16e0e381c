"""Long items: where an item is cut, so that it is computed in pieces that fit a step beside others.

The first tokens of a long item, its *head*, become KV blocks behind the query's, and only its *tail* of at most a block
is scored. With blocks of 4 tokens, a query of 6 and an item of 11:

    query, item    q q q q q q | a b c d e f g h i j k
    aligned        [q q q q] [q q a b] [c d e f] [g h i j] | k       blocks begin at multiples of their size
    ragged         [q q q q] [q q] [a b c d] [e f g h] | i j k       blocks begin behind the query

Aligned blocks compute the query's last tokens once more for every long item; ragged ones compute nothing twice, where a
backend reads short blocks in the middle of a prefix. The cut follows from the query and the item alone, so an item's
bits do not depend on other items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.segments import Segments


@dataclass(frozen=True)
class ItemCut:
    """How long items are cut. `shared` is always the number of query tokens that an item reads."""

    max_whole_item: int  # tokens of an item that is computed in one piece
    is_ragged: bool  # do blocks of an item begin behind the query?

    def __post_init__(self) -> None:
        assert self.max_whole_item >= KV_BLOCK_SIZE, "a shorter item has no whole block behind the query"

    def head_lens(self, shared: Int64Array, item_lens: Int64Array) -> Int64Array:
        """Tokens of query and head. At least one token of the item is left, after which logits are read."""
        if self.is_ragged:
            return shared + (item_lens - 1) // KV_BLOCK_SIZE * KV_BLOCK_SIZE
        return (shared + item_lens - 1) // KV_BLOCK_SIZE * KV_BLOCK_SIZE

    def query_tokens(self, shared: Int64Array, query_len: int) -> Int64Array:
        """Tokens in the blocks that the query of `query_len` tokens has, too."""
        in_full_blocks = shared // KV_BLOCK_SIZE * KV_BLOCK_SIZE
        return np.where(shared == query_len, shared, in_full_blocks) if self.is_ragged else in_full_blocks

    def block_starts(self, shared: int, head_len: int) -> list[int]:
        """Where the blocks of query and head begin; at last, where the last one ends."""
        if self.is_ragged:
            return [*range(0, shared, KV_BLOCK_SIZE), *range(shared, head_len, KV_BLOCK_SIZE), head_len]
        return prefix_block_starts(head_len)

    def num_blocks(self, shared: Int64Array, head_lens: Int64Array) -> Int64Array:
        if self.is_ragged:
            return -(-shared // KV_BLOCK_SIZE) - (-(head_lens - shared) // KV_BLOCK_SIZE)
        return -(-head_lens // KV_BLOCK_SIZE)

    def long_items(self, segments: Segments, num_kv_blocks: int) -> tuple[int, ...]:
        """The items to cut: those that are long and whose blocks fit in the KV cache."""
        if segments.tokens.lens.max(initial=0) <= self.max_whole_item:  # as in most requests
            return ()
        per_item = segments.segments_per_item
        lens, shared = segments.item_lens[::per_item], segments.prefix_lens[::per_item]
        fits = self.num_blocks(shared, self.head_lens(shared, lens)) <= num_kv_blocks
        return tuple(((lens > self.max_whole_item) & fits).nonzero()[0].tolist())


def prefix_block_starts(prefix_len: int, rest_size: int = KV_BLOCK_SIZE) -> list[int]:
    """Where the KV blocks of a prefix begin; at last, where the last one ends. Behind the last whole block they have
    `rest_size` tokens."""
    whole = prefix_len // KV_BLOCK_SIZE * KV_BLOCK_SIZE
    return [*range(0, whole, KV_BLOCK_SIZE), *range(whole, prefix_len, rest_size), prefix_len]
