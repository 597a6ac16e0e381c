from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from prefixwise.backends.base import PREFIX_BLOCK, Layout, Prefix, PrefixBlock
from prefixwise.backends.layout.block_lists import batch_blocks, pool_blocks
from tests.backends.jax.batches import Blocks, Tail, draw_ids, extend_batch, prefill_batch, rows_batch


@dataclass(frozen=True)
class Page(PrefixBlock):
    """A block whose address is said by the test."""

    address: int


def address_of(block: PrefixBlock) -> int:
    assert isinstance(block, Page)
    return block.address


def pages(*addresses: int) -> Blocks:
    return tuple(Page(PREFIX_BLOCK, address) for address in addresses)


class TestInTheBatch:
    def test_blocks_follow_each_other_from_the_row_s_start(self) -> None:
        tails = [Tail(ids, 300) for ids in draw_ids(0, 5, 6, 7)]
        batch = rows_batch(draw_ids(1, 300)[0], [tails[:2], tails[2:]], Layout.PACKED)
        second = 300 + 5 + 6
        assert [found.tolist() for found in batch_blocks(batch)] == [
            [0, 128, 256],
            [second, second + 128, second + 256],
        ]

    def test_as_many_as_somebody_reads(self) -> None:
        batch = rows_batch(draw_ids(1, 300)[0], [[Tail(draw_ids(0, 5)[0], 200)]], Layout.CAUSAL)
        assert [found.tolist() for found in batch_blocks(batch)] == [[0, 128]]

    def test_none_of_a_prefix_that_is_on_another_shard(self) -> None:
        batch = rows_batch(draw_ids(1, 100)[0], [[Tail(draw_ids(0, 5)[0], 100)]], Layout.CAUSAL)
        batch = replace(batch, prefixes=(*batch.prefixes, Prefix(segment=-7), Prefix(segment=99)))
        assert [found.tolist() for found in batch_blocks(batch)] == [[0], [], []]


class TestInThePool:
    def test_pages_of_kept_blocks_as_far_as_somebody_reads(self) -> None:
        tails = [
            Tail(ids, length, prefix) for ids, length, prefix in zip(draw_ids(0, 3, 4), (129, 0), (0, 1), strict=True)
        ]
        batch = extend_batch(tails, [pages(7, 3, 9), pages(5)])
        assert [found.tolist() for found in pool_blocks(batch, {}, address_of)] == [[7, 3], []]

    def test_behind_them_the_pages_that_the_forward_fills(self) -> None:
        """A last block is read by none of the others."""
        batch = prefill_batch(draw_ids(0, 300, 600), [(), pages(70, 30)])
        new = dict(zip(batch.keep_segments, (4, 2, 6, 8, 1, 5), strict=True))
        assert [found.tolist() for found in pool_blocks(batch, new, address_of)] == [[4, 2], [70, 30, 8, 1]]

    def test_what_is_not_kept_cannot_be_read_there(self) -> None:
        batch = rows_batch(draw_ids(1, 100)[0], [[Tail(draw_ids(0, 5)[0], 100)]], Layout.CAUSAL)
        with pytest.raises(AssertionError, match="must be kept, too"):
            pool_blocks(batch, {}, address_of)

    def test_no_more_than_there_is(self) -> None:
        batch = extend_batch([Tail(draw_ids(0, 3)[0], 200)], [pages(7)])
        with pytest.raises(AssertionError, match="a reader of more than the prefix has"):
            pool_blocks(batch, {}, address_of)
