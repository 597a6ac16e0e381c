"""Token counts that forwards are padded to."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.forward.backend import BackendInfo
from prefixwise.forward.buckets import Buckets, token_buckets


def test_multiples_reach_the_largest_that_is_asked_for() -> None:
    assert Buckets.multiples(256, 1000).sizes == (256, 512, 768, 1024)
    assert Buckets.multiples(256, 1024).sizes == (256, 512, 768, 1024)
    assert Buckets.multiples(256, 1).sizes == (256,)


@pytest.mark.parametrize(("num_tokens", "bucket"), [(1, 10), (10, 10), (11, 15), (40, 40), (41, 50), (99, 100)])
def test_the_smallest_that_holds_them_and_above_the_largest_a_multiple(num_tokens: int, bucket: int) -> None:
    assert Buckets((10, 15, 40)).fit(num_tokens) == bucket


@given(step=st.integers(1, 300), largest=st.integers(1, 3000), num_tokens=st.integers(1, 5000))
def test_less_than_one_step_is_padding(step: int, largest: int, num_tokens: int) -> None:
    bucket = Buckets.multiples(step, largest).fit(num_tokens)
    assert 0 <= bucket - num_tokens < step
    assert bucket % step == 0


@pytest.mark.parametrize("sizes", [(), (2, 1), (1, 1)])
def test_sizes_ascend(sizes: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Buckets(sizes)


def test_a_backend_pads_to_its_programs_or_else_to_its_multiple() -> None:
    info = BackendInfo("fake", "cpu", "cpu", "float32", True, token_multiple=256, token_budget=1000)
    assert Buckets.of(info).sizes == (256, 512, 768, 1024)
    assert Buckets.of(replace(info, token_buckets=(100, 300))).sizes == (100, 300)


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
