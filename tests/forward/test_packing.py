from __future__ import annotations

import numpy as np
import pytest

from prefixwise.forward.packing import ALIGNMENT, Packing


class TestPacking:
    def test_arrays_come_back_where_they_were_put(self) -> None:
        packing = Packing([5, 0, 33, 1])
        target = np.full(packing.size, -1, np.int32)
        arrays = [
            np.arange(3, dtype=np.int32),
            np.zeros(0, np.int32),
            np.arange(33, dtype=np.int32),
            np.ones(1, np.int32),
        ]
        packing.pack(arrays, target)
        found = packing.unpack(target)
        assert [len(each) for each in found] == [5, 0, 33, 1]
        for array, each in zip(arrays, found, strict=True):
            assert np.array_equal(each[: len(array)], array)
        assert found[0][3:].tolist() == [-1, -1], "what is not used stays as it was"

    def test_every_array_begins_at_an_aligned_place(self) -> None:
        packing = Packing([1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1])
        assert packing.size == 5 * ALIGNMENT
        numbers = np.arange(packing.size)
        assert all(each[0] % ALIGNMENT == 0 for each in packing.unpack(numbers))

    def test_an_array_beyond_its_capacity_is_refused(self) -> None:
        with pytest.raises(AssertionError, match="larger than its program"):
            Packing([2]).pack([np.zeros(3, np.int32)], np.zeros(32, np.int32))
