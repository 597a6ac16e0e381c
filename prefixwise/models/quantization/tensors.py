"""Matrices that are stored as small codes with scales, and how their rows become float32 numbers.

    number[i, j] = (code[i, j] - zero point) * scale        one zero point and scale per block of rows and columns

The other modules find the codes, scales and zero points of each format. Codes are read and scaled row by row like any
stored tensor, so loading holds a few megabytes beside the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.models.checkpoint import StoredDtype, StoredTensor, as_float32

_WORD_BITS = 32
_STEP_NUMBERS = 65_536  # dequantised at a time: they stay in the processor's cache


@dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """A matrix [rows out, columns in] of codes, as float32. It is dequantised on every read."""

    codes: StoredTensor  # [rows, columns]: float8_e4m3fn, int8 or uint8
    scales: StoredTensor  # [blocks of rows, blocks of columns]
    block: tuple[int, int]  # the rows and columns that share a scale; the last block may be smaller
    zero_points: StoredTensor | None = None  # one for each scale
    zero_point: int = 0  # of all, beside those
    block_of_column: NDArray[np.int64] | None = None  # where the columns of a block are not next to each other

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        codes, scales = self.codes.read_rows(start, stop), self._of_rows(self.scales, start, stop)
        zero_points = None if self.zero_points is None else self._of_rows(self.zero_points, start, stop)
        numbers = np.empty((stop - start, self.shape[1]), np.float32)
        step = max(1, _STEP_NUMBERS // self.shape[1])
        for first in range(0, stop - start, step):
            rows = slice(first, first + step)
            part = numbers[rows]
            _fill(part, codes[rows], self.codes.dtype)
            if zero_points is not None:
                part -= self._of_columns(zero_points[rows])
            if self.zero_point:
                part -= np.float32(self.zero_point)
            part *= self._of_columns(scales[rows])
        return numbers

    @property
    def is_fp8_by_rows(self) -> bool:
        """Is it FP8 with one scale per row, or per tensor? Then a GEMM can use the codes themselves."""
        has_zeros = self.zero_points is not None or self.zero_point or self.block_of_column is not None
        return self.codes.dtype == "float8_e4m3fn" and self.block[1] >= self.shape[1] and not has_zeros

    def read_codes(self, start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """The codes of some rows of a tensor that `is_fp8_by_rows`, and the scale of each row."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        return self.codes.read_rows(start, stop), self._of_rows(self.scales, start, stop)[:, 0]

    def _of_rows(self, grid: StoredTensor, start: int, stop: int) -> NDArray[np.float32]:
        """The grid's values for each row, [rows, blocks of columns]."""
        height = self.block[0]
        first = start // height
        stored = grid.read_rows(first, -(-stop // height))
        values = np.empty(stored.shape, np.float32)
        _fill(values, stored, grid.dtype)
        return values if height == 1 else values[np.arange(start, stop) // height - first]

    def _of_columns(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The value for each number of the rows; one column where a row has one block."""
        if self.block_of_column is not None:
            return values[:, self.block_of_column]
        return values if values.shape[1] == 1 else np.repeat(values, self.block[1], axis=1)[:, : self.shape[1]]


@dataclass(frozen=True)
class TransposedTensor(StoredTensor):
    """A stored matrix with rows and columns exchanged."""

    stored: StoredTensor

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return self.stored.read_rows(0, self.shape[1])[:, start:stop].T


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A matrix of unsigned codes of 4 or 8 bits, several of them in one int32, the first in its lowest bits."""

    words: StoredTensor  # int32: [rows, words of a row], or [words of a column, columns]
    num_bits: int
    packs_rows: bool = False  # a word holds codes of one column and several rows
    order: tuple[int, ...] | None = None  # where in its word the i-th code of 4 bits is; None: at place i
    plus_one: bool = False  # one less is stored of each code, taken from the whole word: 0 borrows from the next code

    def read_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        if self.packs_rows:
            per_word = _WORD_BITS // self.num_bits
            first = start // per_word
            words = self.words.read_rows(first, -(-stop // per_word)).T
            codes = self._unpacked(words)[:, start - first * per_word : stop - first * per_word].T
        else:
            codes = self._unpacked(self.words.read_rows(start, stop))[:, : self.shape[1]]
        return codes

    def _unpacked(self, words: NDArray[np.int32]) -> NDArray[np.uint8]:
        """[n, words] to [n, codes]."""
        if self.plus_one:
            ones = np.uint32(((1 << _WORD_BITS) - 1) // ((1 << self.num_bits) - 1))
            words = (words.view(np.uint32) + ones).view(np.int32)
        packed = np.ascontiguousarray(words).view(np.uint8)
        if self.num_bits == 8:
            return packed
        codes = np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
        places = self.order or (0, 1)
        for first, place in enumerate(places):  # strides, which are quicker than indexes
            half = packed[:, place // 2 :: len(places) // 2]
            codes[:, first :: len(places)] = half >> 4 if place % 2 else half & 15
        return codes


def packed_len(count: int, num_bits: int) -> int:
    """The words that hold so many codes."""
    return -(-count * num_bits // _WORD_BITS)


def _fill(numbers: NDArray[np.float32], stored: NDArray[Any], dtype: StoredDtype) -> None:
    if dtype == "float8_e4m3fn":
        np.take(_FLOAT8, stored, out=numbers, mode="clip")  # a third of the time of an index
    else:
        numbers[:] = as_float32(stored, dtype) if dtype == "bfloat16" else stored


def _float8_table() -> NDArray[np.float32]:
    """The numbers of the 256 codes of float8_e4m3fn: a sign, four bits of exponent, three of mantissa, no infinity."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponents, np.ldexp(8.0 + mantissas, exponents - 10), np.ldexp(1.0 * mantissas, -9))
    sizes[codes & 127 == 127] = np.nan
    table: NDArray[np.float32] = np.where(codes & 128, -sizes, sizes).astype(np.float32)
    return table


_FLOAT8 = _float8_table()
