from __future__ import annotations

from itertools import pairwise

import pytest

from prefixwise.backends.layout.buckets import token_buckets


class TestTokenBuckets:
    def test_four_to_a_doubling_as_far_as_multiples_allow(self) -> None:
        found = token_buckets(4096, smallest=256)
        assert found == (256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)

    @pytest.mark.parametrize("largest", [1, 256, 257, 40_961, 65_536])
    @pytest.mark.parametrize("smallest", [256, 2048])
    def test_the_last_holds_the_largest_and_none_is_far_above_the_one_before(self, largest: int, smallest: int) -> None:
        found = token_buckets(largest, smallest=smallest)
        assert found[-1] - smallest < largest <= found[-1]
        assert all(each % smallest == 0 for each in found)
        assert all(a < b <= max(a + smallest, 1.25 * a) for a, b in pairwise(found))
