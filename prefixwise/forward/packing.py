"""Many small arrays of int32 in one buffer, at offsets that follow from their capacities: numpy only.

A transfer to a device costs the same for 4 bytes and for 400 kilobytes, so all integers of a forward travel as one
array, and are cut apart where they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from prefixwise.contract.ragged import Int32Array

ALIGNMENT = 64  # numbers: every array begins at a multiple of 256 bytes, as kernels of jax want it


class Packing:
    """Where arrays of at most these lengths lie in the buffer."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self._capacities = tuple(capacities)
        sizes = [-(-capacity // ALIGNMENT) * ALIGNMENT for capacity in capacities]
        *self._starts, self.size = accumulate(sizes, initial=0)

    def pack(self, arrays: Sequence[Int32Array], target: Int32Array) -> None:
        """Write the arrays to their places. What is behind the end of one stays as it was."""
        for array, start, capacity in zip(arrays, self._starts, self._capacities, strict=True):
            assert len(array) <= capacity, "a batch that is larger than its program"
            target[start : start + len(array)] = array

    def unpack(self, packed: Any) -> list[Any]:
        """The arrays, each of its capacity, as slices of whatever the buffer is."""
        places = zip(self._starts, self._capacities, strict=True)
        return [packed[start : start + capacity] for start, capacity in places]
