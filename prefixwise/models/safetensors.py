"""Safetensors files: eight bytes of header length, a JSON header, then the raw tensors.

We read them ourselves because the safetensors package has no bfloat16 for numpy. The format takes few lines, and
tensors are mapped instead of read. We refuse every file that the package refuses; the error says what is damaged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.checkpoint import StoredDtype, StoredTensor, map_rows

_DTYPES: dict[str, StoredDtype] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}
_NUMPY_DTYPES: dict[StoredDtype, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # the bits: numpy has no bfloat16
    "float8_e4m3fn": np.uint8,  # the bits
    "uint8": np.uint8,
    "int8": np.int8,
    "int32": np.int32,
    "int64": np.int64,
}


_MAX_HEADER_BYTES = 100_000_000  # the package's limit
_TENSOR_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class MappedTensor(StoredTensor):
    """A range of bytes of the file."""

    path: Path
    offset: int  # of the first byte in the file

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return map_rows(self.path, self.offset, _NUMPY_DTYPES[self.dtype], self.shape, start, stop)


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the file by its name in the file. Raises ModelLoadError unless the tensors cover the file's data
    exactly, without gaps or overlaps."""
    size = path.stat().st_size
    header, data_start = _read_header(path, size)
    tensors: dict[str, MappedTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = _open_tensor(path, data_start, size, name, entry)
        except (KeyError, TypeError, ValueError):  # something is missing, or of another type
            raise ModelLoadError(f"{path} is damaged: its header says {describe(entry)} of tensor {name!r}") from None
    _check_layout(path, tensors, data_start, size)
    return dict(tensors)


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """The writer's own `__metadata__`; empty where there is none."""
    header, _ = _read_header(path, path.stat().st_size)
    metadata: dict[str, str] = header.get("__metadata__") or {}
    return metadata


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as handle:
        first = handle.read(8)
        if first == b"version ":
            raise ModelLoadError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull`")
        length = int.from_bytes(first, "little")
        if size < 8 or length > size - 8:
            raise ModelLoadError(f"{path} is truncated: its header needs {8 + length} bytes, the file has {size}")
        if length > _MAX_HEADER_BYTES:
            raise ModelLoadError(
                f"{path} is damaged: its header has {length} bytes, at most {_MAX_HEADER_BYTES} are legal"
            )
        text = handle.read(length)
    header = _parse_header(path, text)
    metadata = header.get("__metadata__") or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelLoadError(f"{path} is damaged: its metadata must be texts by name, got {describe(metadata)}")
    return header, 8 + length


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    """Parse what the package parses: UTF-8 that begins with an object, without NaN or a name that occurs twice."""
    try:
        header = json.loads(
            text.decode(),
            parse_int=lambda digits: -1 if digits == "-0" else int(digits),
            parse_constant=_no_constant,
            object_pairs_hook=_without_duplicates,
        )
        if b"\\u" in text:  # half a surrogate pair is no text
            json.dumps(header, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise ModelLoadError(f"{path} is not a safetensors file: its header is not a JSON object")
    return header


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _open_tensor(path: Path, data_start: int, size: int, name: str, entry: object) -> MappedTensor:
    if not isinstance(entry, dict) or entry.keys() != _TENSOR_KEYS:
        raise KeyError
    if entry["dtype"] not in _DTYPES:
        raise ModelLoadError(f"{path}: tensor {name!r} is {entry['dtype']}; supported: {', '.join(_DTYPES)}")
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(map(_count, entry["shape"]))
    begin, end = (data_start + _count(offset) for offset in entry["data_offsets"])
    if end > size:
        raise ModelLoadError(f"{path} is truncated: tensor {name!r} ends at byte {end}, the file has {size}")
    expected = math.prod(shape) * np.dtype(_NUMPY_DTYPES[dtype]).itemsize
    if end - begin != expected:
        raise ModelLoadError(
            f"{path}: tensor {name!r} of shape {list(shape)} needs {expected} bytes, has {end - begin}"
        )
    return MappedTensor(shape, dtype, path, begin)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:  # so that no product of a few of them is slow
        raise ValueError
    return value


def _check_layout(path: Path, tensors: Mapping[str, MappedTensor], data_start: int, size: int) -> None:
    """Raise ModelLoadError for a byte of the data that belongs to no tensor, or to two."""
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda each: (each[1].offset, math.prod(each[1].shape))):
        if tensor.offset != end:
            raise ModelLoadError(
                f"{path} is damaged: tensor {name!r} begins at byte {tensor.offset}, expected {end}; "
                "tensors must follow each other without gaps or overlaps"
            )
        end += math.prod(tensor.shape) * np.dtype(_NUMPY_DTYPES[tensor.dtype]).itemsize
    if end != size:
        raise ModelLoadError(f"{path} is damaged: its tensors end at byte {end}, the file has {size}")
