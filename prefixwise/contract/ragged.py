"""Sequences of different lengths as one flat array, from the request to the device.

A request of 10,000 items is two arrays here, not 10,000 lists.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """`len(self)` sequences of int32 ids; sequence `i` is `flat[starts[i]:starts[i + 1]]`."""

    flat: Int32Array  # [sum of lengths]
    starts: Int64Array  # [sequences + 1], starts[0] == 0

    @classmethod
    def from_sequences(cls, sequences: Sequence[Sequence[int]] | Sequence[Int32Array]) -> Ragged:
        lens = np.fromiter((len(sequence) for sequence in sequences), np.int64, count=len(sequences))
        starts = starts_from_lens(lens)
        flat = np.fromiter(chain.from_iterable(sequences), np.int32, count=int(starts[-1]))
        return cls(flat, starts)

    @classmethod
    def concatenated(cls, parts: Sequence[Ragged]) -> Ragged:
        """The sequences of all parts."""
        flat = np.concatenate([np.zeros(0, np.int32), *(part.flat for part in parts)])
        return cls(flat, starts_from_lens(np.concatenate([np.zeros(0, np.int64), *(part.lens for part in parts)])))

    @cached_property
    def lens(self) -> Int64Array:
        return self.starts[1:] - self.starts[:-1]  # `np.diff` takes four times as long for few

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Int32Array:
        return self.flat[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[Int32Array]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: Int64Array) -> Ragged:
        """These sequences, in this order."""
        lens = self.lens[indices]
        starts = starts_from_lens(lens)
        return Ragged(self.flat[ranges(self.starts[:-1][indices], lens)], starts)


class IdLists(Sequence[list[int]]):
    """Ragged ids as lists, each made when it is read."""

    def __init__(self, ids: Ragged) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        places = range(len(self))[index]
        return self._list(places) if isinstance(places, int) else [self._list(each) for each in places]

    def __repr__(self) -> str:
        """The first lists."""
        return reprlib.repr(self[:7])  # it shows 6, and dots for more

    def _list(self, index: int) -> list[int]:
        ids: list[int] = self._ids[index].tolist()
        return ids


_NUMBERS = np.arange(1 << 14)
_NUMBERS.setflags(write=False)


def numbers(count: int) -> Int64Array:
    """0, 1, ..., count - 1, as a read-only array.

    `np.arange` releases the interpreter lock, and another thread may hold it for milliseconds, far longer than a small
    request takes. So small ranges are slices of one array.
    """
    return _NUMBERS[:count] if count <= len(_NUMBERS) else np.arange(count)


def starts_from_lens(lens: Int64Array) -> Int64Array:
    """Lengths [n] to offsets [n + 1]."""
    starts = np.zeros(len(lens) + 1, np.int64)
    lens.cumsum(out=starts[1:])
    return starts


def ranges(begins: Int64Array, lens: Int64Array) -> Int64Array:
    """The numbers begins[i], begins[i] + 1, ..., begins[i] + lens[i] - 1 of every i, concatenated."""
    range_starts = starts_from_lens(lens)
    return numbers(int(range_starts[-1])) + (begins - range_starts[:-1]).repeat(lens)
