from __future__ import annotations

import pytest

from prefixwise.backends.layout.pages import Pages
from prefixwise.contract.errors import BackendError


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
