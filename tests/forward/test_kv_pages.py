from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from prefixwise.contract.errors import BackendError
from prefixwise.forward.batch import KV_BLOCK_SIZE, KVBlock, Layout, Prefix
from prefixwise.forward.kv_pages import Pages, batch_tiles, page_table
from tests.backends.jax.batches import Blocks, Tail, draw_ids, extend_batch, prefill_batch, rows_batch


@dataclass(frozen=True)
class Page(KVBlock):
    """A block whose address is said by the test."""

    address: int


def address_of(block: KVBlock) -> int:
    assert isinstance(block, Page)
    return block.address


def pages(*addresses: int) -> Blocks:
    return tuple(Page(KV_BLOCK_SIZE, address) for address in addresses)


class TestInTheBatch:
    def test_blocks_follow_each_other_from_the_row_s_start(self) -> None:
        tails = [Tail(ids, 300) for ids in draw_ids(0, 5, 6, 7)]
        batch = rows_batch(draw_ids(1, 300)[0], [tails[:2], tails[2:]], Layout.PACKED)
        second = 300 + 5 + 6
        assert [found.tolist() for found in batch_tiles(batch)] == [
            [0, 128, 256],
            [second, second + 128, second + 256],
        ]

    def test_as_many_as_somebody_reads(self) -> None:
        batch = rows_batch(draw_ids(1, 300)[0], [[Tail(draw_ids(0, 5)[0], 200)]], Layout.CAUSAL)
        assert [found.tolist() for found in batch_tiles(batch)] == [[0, 128]]

    def test_none_of_a_prefix_that_is_on_another_shard(self) -> None:
        batch = rows_batch(draw_ids(1, 100)[0], [[Tail(draw_ids(0, 5)[0], 100)]], Layout.CAUSAL)
        batch = replace(batch, prefixes=(*batch.prefixes, Prefix(segment=-7), Prefix(segment=99)))
        assert [found.tolist() for found in batch_tiles(batch)] == [[0], [], []]


class TestInThePool:
    def test_pages_of_kept_blocks_as_far_as_somebody_reads(self) -> None:
        tails = [
            Tail(ids, length, prefix) for ids, length, prefix in zip(draw_ids(0, 3, 4), (129, 0), (0, 1), strict=True)
        ]
        batch = extend_batch(tails, [pages(7, 3, 9), pages(5)])
        assert [found.tolist() for found in page_table(batch, {}, address_of)] == [[7, 3], []]

    def test_behind_them_the_pages_that_the_forward_fills(self) -> None:
        """A last block is read by none of the others."""
        batch = prefill_batch(draw_ids(0, 300, 600), [(), pages(70, 30)])
        new = dict(zip(batch.cache_segments, (4, 2, 6, 8, 1, 5), strict=True))
        assert [found.tolist() for found in page_table(batch, new, address_of)] == [[4, 2], [70, 30, 8, 1]]

    def test_what_is_not_kept_cannot_be_read_there(self) -> None:
        batch = rows_batch(draw_ids(1, 100)[0], [[Tail(draw_ids(0, 5)[0], 100)]], Layout.CAUSAL)
        with pytest.raises(AssertionError, match="must be kept, too"):
            page_table(batch, {}, address_of)

    def test_no_more_than_there_is(self) -> None:
        batch = extend_batch([Tail(draw_ids(0, 3)[0], 200)], [pages(7)])
        with pytest.raises(AssertionError, match="a reader of more than the prefix has"):
            page_table(batch, {}, address_of)


class TestPages:
    def test_pages_are_taken_from_the_first_on(self) -> None:
        leases = Pages(3).take([128, 5])
        assert [lease.address for lease in leases] == [0, 128]

    def test_a_released_page_is_free_once(self) -> None:
        pages = Pages(2)
        first, second = pages.take([1, 1])
        first.release()
        first.release()
        assert pages.num_free == 1
        assert pages.take([1])[0].page == first.page
        assert second.address == 128

    def test_a_lease_that_nobody_holds_gives_its_page_back(self) -> None:
        pages = Pages(2)
        leases = pages.take([1, 1])
        assert pages.num_free == 0
        del leases
        assert pages.num_free == 2

    def test_a_page_that_was_given_back_has_no_address(self) -> None:
        (lease,) = Pages(1).take([1])
        lease.release()
        with pytest.raises(BackendError, match="given back before it was read"):
            _ = lease.address

    def test_all_or_none(self) -> None:
        pages = Pages(2)
        with pytest.raises(BackendError) as caught:
            pages.take([128, 128, 44])
        assert str(caught.value) == (
            "blocks of prefixes with 300 tokens need 3 pages of 128 tokens, and 2 of 2 are free; "
            "give the prefixes more memory (prefix_cache_bytes), or choose the packed algorithm"
        )
        assert pages.num_free == 2
