"""Safetensors files: eight bytes of header length, a JSON header, then the raw tensors.

We read them ourselves because the safetensors package has no bfloat16 for numpy. The format takes few lines, tensors
are mapped instead of read, and a truncated file gets an error that says so. The writer makes the files of the weight
cache: it converts stored tensors to bfloat16 in parallel.
"""

from __future__ import annotations

import glob
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.host import replacing
from prefixwise.models.checkpoint import StoredDtype, StoredTensor, as_float32, map_rows

_DTYPES: dict[str, StoredDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMPY_DTYPES: dict[StoredDtype, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # the bits: numpy has no bfloat16
}


@dataclass(frozen=True)
class MappedTensor(StoredTensor):
    """A range of bytes of the file."""

    path: Path
    offset: int  # of the first byte in the file

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return map_rows(self.path, self.offset, _NUMPY_DTYPES[self.dtype], self.shape, start, stop)


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the file by its name in the file."""
    size = path.stat().st_size
    header, data_start = _read_header(path, size)
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = _open_tensor(path, data_start, size, name, entry)
        except (KeyError, TypeError, ValueError):  # something is missing, or of another type
            raise ModelLoadError(f"{path} is damaged: its header says {describe(entry)} of tensor {name!r}") from None
    return tensors


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """The writer's own `__metadata__`; empty where there is none."""
    header, _ = _read_header(path, path.stat().st_size)
    metadata = header.get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as handle:
        first = handle.read(8)
        if first == b"version ":
            raise ModelLoadError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull`")
        length = int.from_bytes(first, "little")
        if size < 8 or length > size - 8:
            raise ModelLoadError(f"{path} is truncated: its header needs {8 + length} bytes, the file has {size}")
        try:
            header = json.loads(handle.read(length))
        except ValueError as error:
            raise ModelLoadError(f"{path} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path} is not a safetensors file: its header is not a JSON object")
    return header, 8 + length


def _open_tensor(path: Path, data_start: int, size: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ModelLoadError(f"{path}: tensor {name!r} is {entry['dtype']}; supported: {', '.join(_DTYPES)}")
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(entry["shape"])
    begin, end = (data_start + offset for offset in entry["data_offsets"])
    if end > size:
        raise ModelLoadError(f"{path} is truncated: tensor {name!r} ends at byte {end}, the file has {size}")
    expected = math.prod(shape) * np.dtype(_NUMPY_DTYPES[dtype]).itemsize
    if end - begin != expected:
        raise ModelLoadError(
            f"{path}: tensor {name!r} of shape {list(shape)} needs {expected} bytes, has {end - begin}"
        )
    return MappedTensor(shape, dtype, path, begin)


_ITEM_BYTES = 2
_ALIGNMENT = 64  # bytes: where the first tensor begins
_PIECE_BYTES = 4 << 20  # of float32, per thread
_MAX_THREADS = 8  # more do not help: the disk is the limit
_NAN_BITS = 0x7FC0
_ABANDONED_SECONDS = 3600  # without a write: its process was killed


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor, and where they go."""

    source: StoredTensor
    start: int
    stop: int
    offset: int  # of their first byte in the file


def bfloat16_file_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """The size of the file without its header."""
    return sum(_ITEM_BYTES * math.prod(tensor.shape) for tensor in tensors.values())


def write_bfloat16_safetensors(path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """Write all of the file or nothing, however many processes do so at once. Raises OSError."""
    _remove_abandoned(path)
    header = _header(tensors, metadata)
    with replacing(path) as temporary:
        with temporary.open("xb") as file:
            file.write(header)
            file.truncate(len(header) + bfloat16_file_bytes(tensors))
        _fill(temporary, _pieces(tensors, len(header)))


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote."""
    for temporary in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):  # another process may remove it at the same time
            if time.time() - temporary.stat().st_mtime > _ABANDONED_SECONDS:
                temporary.unlink()


def _header(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON text, padded with spaces as the format has it."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + _ITEM_BYTES * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensors: Mapping[str, StoredTensor], offset: int) -> Iterator[_Piece]:
    for tensor in tensors.values():
        row_len = math.prod(tensor.shape[1:])
        step = max(1, _PIECE_BYTES // (4 * row_len))
        for start in range(0, tensor.shape[0], step):
            stop = min(start + step, tensor.shape[0])
            yield _Piece(tensor, start, stop, offset + _ITEM_BYTES * row_len * start)
        offset += _ITEM_BYTES * row_len * tensor.shape[0]


def _fill(path: Path, pieces: Iterator[_Piece]) -> None:
    def write(piece: _Piece) -> None:
        rows = as_float32(piece.source.read_rows(piece.start, piece.stop), piece.source.dtype)
        with path.open("rb+") as file:  # per thread: a position cannot be shared
            file.seek(piece.offset)
            file.write(bfloat16_bits(rows).data)

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "prefixwise-dequantise") as pool:
        for _ in pool.map(write, pieces):  # raises a thread's error and drops the pieces that have not begun
            pass


def bfloat16_bits(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round each number to the nearest bfloat16, ties to even: the same bits as PyTorch and JAX."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    is_nan = np.isnan(numbers)
    if is_nan.any():  # the sum above carries a NaN over into another number
        rounded[is_nan] = _NAN_BITS
    return rounded.astype(np.uint16)
