"""The GGUF container: magic, counts, metadata, a table of tensors, their bytes. `gguf.py` interprets them.

We do not use `gguf.GGUFReader`: it builds a small array per string and takes 3 s for SmolLM2's vocabulary, where this
takes 0.05 s, and a truncated file ends in an error of numpy.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from prefixwise.contract.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4  # of a tensor, as in ggml
_MAX_DEPTH = 4  # of arrays of arrays
_LENGTH = struct.Struct("<Q")  # before every string
_STRING, _ARRAY = 8, 9  # type ids of metadata values; all other ids are numbers, by numpy's names:
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class TensorEntry:
    """A row of the table of tensors."""

    name: str
    shape: tuple[int, ...]  # rows first, as numpy has it; the file counts the other way
    type_id: int  # a value of gguf.GGMLQuantizationType
    offset: int  # of the first byte, from the start of the file


@dataclass(frozen=True)
class GgufFile:
    """The header of a file; arrays of numbers are numpy arrays, arrays of strings are lists."""

    path: Path
    size_bytes: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]  # in the file's order
    alignment: int  # every tensor begins at a multiple of it,
    data_start: int  # counted from here


class _TruncatedError(Exception):
    """The file ends within its header."""


def read_gguf_file(path: Path) -> GgufFile:
    """Read the header only. Raises ModelLoadError."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        magic = handle.read(len(_MAGIC))
        if magic != _MAGIC:
            raise ModelLoadError(f"{path} is not a GGUF file: expected {_MAGIC!r} at its start, got {magic!r}")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            metadata, entries, end_of_header = _read_header(path, _Cursor(mapped, len(_MAGIC)))
    alignment = _alignment(path, metadata)
    start = -(-end_of_header // alignment) * alignment  # offsets count from the first aligned byte after the header
    tensors = {name: replace(entry, offset=start + entry.offset) for name, entry in entries.items()}
    return GgufFile(path, size, metadata, tensors, alignment, start)


def _read_header(path: Path, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorEntry], int]:
    """Read the parts in the file's order, so that an error can name the one that fails. The last number is where the
    header ends."""
    step = "its header"
    try:
        _check_version(path, cursor.number("<u4"))
        num_tensors, num_values = cursor.number("<u8"), cursor.number("<u8")
        step = "its metadata"
        metadata = _by_name(cursor.key_and_value() for _ in range(num_values))
        step = "its table of tensors"
        entries = _by_name((entry.name, entry) for entry in (cursor.tensor_entry() for _ in range(num_tensors)))
    except _TruncatedError:
        raise ModelLoadError(f"{path} is truncated: {step} goes on past its {cursor.size} bytes") from None
    except ValueError as error:  # invalid UTF-8, or an unknown type id
        raise ModelLoadError(f"{path} is damaged: {step} cannot be read ({error})") from None
    return metadata, entries, cursor.position


def _by_name(pairs: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
    found: dict[str, _Value] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs twice")
        found[name] = value
    return found


def _check_version(path: Path, version: int) -> None:
    if version not in _VERSIONS:
        raise ModelLoadError(f"{path} is GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise ModelLoadError(f"{path} is damaged: its alignment is {alignment!r}, expected a power of two")
    return alignment


class _Cursor:
    """Walks through the header; every step raises `_TruncatedError` where the file ends too early."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.size = len(data)
        self.position = position

    def number(self, dtype: str) -> Any:
        return self._numbers(dtype, 1).item()

    def key_and_value(self) -> tuple[str, Any]:
        return self._strings(1)[0], self._value(self.number("<u4"))

    def tensor_entry(self) -> TensorEntry:
        name = self._strings(1)[0]
        dims = self._numbers("<u8", self.number("<u4")).tolist()
        if not 1 <= len(dims) <= _MAX_DIMENSIONS or 0 in dims:
            raise ValueError(f"tensor {name!r} has the dimensions {dims[:8]}")
        return TensorEntry(name, tuple(reversed(dims)), self.number("<u4"), self.number("<u8"))

    def _value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == _STRING:
            return self._strings(1)[0]
        if type_id == _ARRAY:
            return self._array(self.number("<u4"), self.number("<u8"), depth + 1)
        return self.number(_scalar_dtype(type_id))

    def _array(self, item_type: int, count: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"arrays within arrays are more than {_MAX_DEPTH} deep")
        if item_type == _STRING:
            return self._strings(count)
        if item_type == _ARRAY:
            return [self._value(_ARRAY, depth) for _ in range(count)]
        return self._numbers(_scalar_dtype(item_type), count)

    def _numbers(self, dtype: str, count: int) -> np.ndarray[tuple[int], np.dtype[Any]]:
        end = self.position + count * np.dtype(dtype).itemsize
        if end > self.size:
            raise _TruncatedError
        raw = self.data[self.position : end]  # a copy, so that the mapping can be closed
        if dtype == "?" and raw.strip(b"\0\1"):
            raise ValueError("a truth value is neither 0 nor 1")
        self.position = end
        return np.frombuffer(raw, dtype)

    def _strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary and its merges are some hundred thousand strings."""
        data, size, position = self.data, self.size, self.position
        length_at = _LENGTH.unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0] if start <= size else start
            if position > size:
                raise _TruncatedError
            strings.append(data[start:position].decode())
        self.position = position
        return strings


def _scalar_dtype(type_id: int) -> str:
    if type_id not in _SCALARS:
        raise ValueError(f"no metadata type has the id {type_id}")
    return _SCALARS[type_id]
