"""Writes stored tensors in bfloat16 into one safetensors file: in parallel, and so that nobody sees half of it."""

from __future__ import annotations

import glob
import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.models.checkpoint import StoredTensor, as_float32

_ITEM_BYTES = 2
_ALIGNMENT = 64  # bytes: where the first tensor begins
_PIECE_BYTES = 4 << 20  # of float32, per thread
_MAX_THREADS = 8  # then the disk is what is waited for
_NAN_BITS = 0x7FC0
_PART = ".part"
_ABANDONED_SECONDS = 3600  # since it was last written: whoever began it was killed


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
    """Write beside the path, wait for the disk, and rename. Raises OSError, and then leaves nothing behind."""
    _remove_abandoned(path)
    part = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_PART}")
    try:
        header = _header(tensors, metadata)
        with part.open("xb") as file:
            file.write(header)
            file.truncate(len(header) + bfloat16_file_bytes(tensors))
        _fill(part, _pieces(tensors, len(header)))
        with part.open("rb+") as file:
            os.fsync(file.fileno())  # else a power cut could leave the name without the bytes
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    for part in path.parent.glob(f"{glob.escape(path.name)}.*{_PART}"):
        with suppress(OSError):  # another process may be at it, too
            if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                part.unlink()


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
        with path.open("rb+") as file:  # one of its own: threads do not share a position
            file.seek(piece.offset)
            file.write(bfloat16_bits(rows).data)

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "prefixwise-dequantise") as pool:
        for _ in pool.map(write, pieces):  # raises what a thread raised, and drops what has not begun
            pass


def bfloat16_bits(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16 of each number, of two the even one: the bits that PyTorch and JAX round to."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    is_nan = np.isnan(numbers)
    if is_nan.any():  # which the sum above would carry over into another number
        rounded[is_nan] = _NAN_BITS
    return rounded.astype(np.uint16)
