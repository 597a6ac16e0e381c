"""Rows of different lengths as one flat array: how token ids travel from the request to the device.

Stands at the very start of the data path. A request of 10,000 items is two arrays here, not 10,000 lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """`len(self)` rows of int32 ids; row `i` is `flat[starts[i]:starts[i + 1]]`."""

    flat: Int32Array  # [sum of lengths]
    starts: Int64Array  # [rows + 1], starts[0] == 0

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]] | Sequence[Int32Array]) -> Ragged:
        lens = np.fromiter((len(row) for row in rows), np.int64, count=len(rows))
        starts = starts_from_lens(lens)
        flat = np.fromiter(chain.from_iterable(rows), np.int32, count=int(starts[-1]))
        return cls(flat, starts)

    @cached_property
    def lens(self) -> Int64Array:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Int32Array:
        return self.flat[self.starts[row] : self.starts[row + 1]]

    def __iter__(self) -> Iterator[Int32Array]:
        return (self[row] for row in range(len(self)))

    def take(self, rows: Int64Array) -> Ragged:
        """The given rows, in the given order."""
        lens = self.lens[rows]
        starts = starts_from_lens(lens)
        return Ragged(self.flat[ranges(self.starts[:-1][rows], lens)], starts)


_NUMBERS = np.arange(1 << 14)
_NUMBERS.setflags(write=False)


def numbers(count: int) -> Int64Array:
    """0, 1, ..., count - 1; not to be written to.

    NumPy lets go of the interpreter lock to count, and whoever takes it may keep it for milliseconds: that is far more
    than small requests cost, so these have been counted once.
    """
    return _NUMBERS[:count] if count <= len(_NUMBERS) else np.arange(count)


def starts_from_lens(lens: Int64Array) -> Int64Array:
    """Lengths [n] to offsets [n + 1]."""
    starts = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=starts[1:])
    return starts


def ranges(begins: Int64Array, lens: Int64Array) -> Int64Array:
    """The numbers begins[i], begins[i] + 1, ..., begins[i] + lens[i] - 1 for every i, one after the other."""
    row_starts = starts_from_lens(lens)
    return numbers(int(row_starts[-1])) + (begins - row_starts[:-1]).repeat(lens)
