from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from prefixwise.contract.errors import BackendError
from prefixwise.forward.batch import KV_BLOCK_SIZE, KVBlock, Layout, Prefix
from prefixwise.forward.kv_pages import Pages, batch_tiles, page_table
from tests.backends.jax.batches import Blocks, Suffix, draw_ids, extend_batch, prefill_batch, sequences_batch


@dataclass(frozen=True)
class Page(KVBlock):
    """A KV block with an address that the test sets."""

    address: int


def address_of(block: KVBlock) -> int:
    assert isinstance(block, Page)
    return block.address


def pages(*addresses: int) -> Blocks:
    return tuple(Page(KV_BLOCK_SIZE, address) for address in addresses)


class TestInTheBatch:
    def test_key_tiles_are_consecutive_from_the_start_of_the_sequence(self) -> None:
        suffixes = [Suffix(ids, 300) for ids in draw_ids(0, 5, 6, 7)]
        batch = sequences_batch(draw_ids(1, 300)[0], [suffixes[:2], suffixes[2:]], Layout.PACKED)
        second = 300 + 5 + 6
        assert [found.tolist() for found in batch_tiles(batch)] == [
            [0, 128, 256],
            [second, second + 128, second + 256],
        ]

    def test_as_many_as_a_segment_reads(self) -> None:
        batch = sequences_batch(draw_ids(1, 300)[0], [[Suffix(draw_ids(0, 5)[0], 200)]], Layout.CAUSAL)
        assert [found.tolist() for found in batch_tiles(batch)] == [[0, 128]]

    def test_none_of_a_prefix_that_is_on_another_shard(self) -> None:
        batch = sequences_batch(draw_ids(1, 100)[0], [[Suffix(draw_ids(0, 5)[0], 100)]], Layout.CAUSAL)
        batch = replace(batch, prefixes=(*batch.prefixes, Prefix(segment=-7), Prefix(segment=99)))
        assert [found.tolist() for found in batch_tiles(batch)] == [[0], [], []]


class TestInTheKVCache:
    def test_pages_of_cached_blocks_as_far_as_a_segment_reads(self) -> None:
        suffixes = [
            Suffix(ids, length, prefix) for ids, length, prefix in zip(draw_ids(0, 3, 4), (129, 0), (0, 1), strict=True)
        ]
        batch = extend_batch(suffixes, [pages(7, 3, 9), pages(5)])
        assert [found.tolist() for found in page_table(batch, {}, address_of)] == [[7, 3], []]

    def test_after_them_the_pages_that_the_forward_writes(self) -> None:
        """No segment reads the last block of a prefix."""
        batch = prefill_batch(draw_ids(0, 300, 600), [(), pages(70, 30)])
        new = dict(zip(batch.cache_segments, (4, 2, 6, 8, 1, 5), strict=True))
        assert [found.tolist() for found in page_table(batch, new, address_of)] == [[4, 2], [70, 30, 8, 1]]

    def test_a_segment_that_is_not_cached_cannot_be_read_there(self) -> None:
        batch = sequences_batch(draw_ids(1, 100)[0], [[Suffix(draw_ids(0, 5)[0], 100)]], Layout.CAUSAL)
        with pytest.raises(AssertionError, match="must be cached, too"):
            page_table(batch, {}, address_of)

    def test_no_more_than_the_prefix_has(self) -> None:
        batch = extend_batch([Suffix(draw_ids(0, 3)[0], 200)], [pages(7)])
        with pytest.raises(AssertionError, match="a segment reads more than the prefix has"):
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

    def test_dropping_a_lease_frees_its_page(self) -> None:
        pages = Pages(2)
        leases = pages.take([1, 1])
        assert pages.num_free == 0
        del leases
        assert pages.num_free == 2

    def test_a_released_page_has_no_address(self) -> None:
        (lease,) = Pages(1).take([1])
        lease.release()
        with pytest.raises(BackendError, match="released before it was read"):
            _ = lease.address

    def test_all_or_none(self) -> None:
        pages = Pages(2)
        with pytest.raises(BackendError) as caught:
            pages.take([128, 128, 44])
        assert str(caught.value) == (
            "KV blocks with 300 tokens need 3 pages of 128 tokens, and 2 of 2 are free; "
            "give the KV cache more memory (prefix_cache_bytes), or choose the packed algorithm"
        )
        assert pages.num_free == 2
