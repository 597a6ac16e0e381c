"""The weight cache: a quantised checkpoint's matrices in bfloat16 on disk, made on first use.

Dequantising takes longer than the rest of a start. So all cores do it once, into a safetensors file that later starts
map. The file holds exactly the bits that a backend would round the dequantised numbers to.

A file has a hash of its source's content in its name and header, so that it is never taken for another source, not even
for one that was replaced in place with the same size and time. It also has checksums of all its bytes. Every start
reads source and file whole and compares both; a damaged file is made again, with a warning. A file gets its name when
it is complete and on disk, so readers see all of it or nothing, however many processes start at once. Where nothing can
be written, weights are dequantised on every read.
"""

from __future__ import annotations

import glob
import json
import logging
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError
from prefixwise.host import replacing, user_cache_folder
from prefixwise.models.checkpoint import Checkpoint, StoredTensor, as_float32
from prefixwise.models.safetensors import open_safetensors, read_safetensors_metadata

log = logging.getLogger("prefixwise")

WEIGHT_CACHE_VARIABLE = "PREFIXWISE_WEIGHT_CACHE"
OFF = "off"
_FORMAT = "2"  # goes up when the same source would give other bytes
_LEAST_FREE_SHARE = 0.5  # of the disk's free space that is left to others

_Task = TypeVar("_Task")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class _Entry:
    """The file of one checkpoint; it may not exist yet."""

    path: Path
    metadata: dict[str, str]  # in its header
    sources: Mapping[str, StoredTensor]  # by canonical name: the quantised tensors

    @classmethod
    def of(cls, checkpoint: Checkpoint, folder: Path) -> _Entry:
        source = checkpoint.path
        digest = content_digest(source)
        metadata = {"source": source.name, "source_digest": digest, "prefixwise_format": _FORMAT}
        sources = {name: checkpoint.tensors[name] for name in sorted(checkpoint.quantised)}
        return cls(folder / f"{source.stem}-{digest[:16]}-{_FORMAT}.safetensors", metadata, sources)

    def read(self) -> dict[str, StoredTensor] | None:
        """The mapped tensors; None where the file is missing or, with a warning, where it is damaged."""
        if not self.path.exists():
            return None
        try:
            check_bfloat16_safetensors(self.path, self.sources, self.metadata)
            return open_safetensors(self.path)
        except (OSError, ModelLoadError) as error:
            log.warning("the weight cache's file %s is damaged and not used: %s", self.path, error)
            return None

    def write(self) -> None:
        """Dequantise into the file. Raises OSError where the disk is too full or cannot be written."""
        num_bytes = bfloat16_file_bytes(self.sources)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path.parent).free
        if num_bytes > (1 - _LEAST_FREE_SHARE) * free:
            raise OSError(f"{num_bytes >> 20} MB are needed in {self.path.parent}, where {free >> 20} MB are free")
        write_bfloat16_safetensors(self.path, self.sources, self.metadata)
        # A warning, because it uses disk space; it is logged once per model.
        log.warning(
            "wrote %d MB to %s, so that the next start is quicker; turn off with --no-weight-cache or %s=%s",
            *(num_bytes >> 20, self.path, WEIGHT_CACHE_VARIABLE, OFF),
        )


def with_bfloat16_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its quantised tensors in bfloat16 from the cache, which is filled on first use.

    Returns the checkpoint unchanged where nothing is quantised, the cache is off, or it cannot be written. Only for
    backends that compute in bfloat16.
    """
    folder = weight_cache_folder()
    if folder is None or not checkpoint.quantised:
        return checkpoint
    try:
        entry = _Entry.of(checkpoint, folder)
        tensors = entry.read()
        if tensors is None:
            entry.write()
            tensors = entry.read()
    except OSError as error:
        log.warning("dequantised weights are not cached: %s", error)
        return checkpoint
    if tensors is None:  # the disk does not keep what was written
        return checkpoint
    return replace(checkpoint, tensors={**checkpoint.tensors, **tensors}, quantised=frozenset())


def weight_cache_folder() -> Path | None:
    """The cache's folder; None where the environment turns the cache off."""
    setting = os.environ.get(WEIGHT_CACHE_VARIABLE)
    if setting == OFF:
        return None
    return Path(setting).expanduser() if setting else user_cache_folder() / "prefixwise" / "weights"


# The file

_ITEM_BYTES = 2
_ALIGNMENT = 64  # bytes: where the first tensor begins
_PIECE_BYTES = 4 << 20  # of float32, per thread
_MAX_THREADS = 8  # more do not help: the disk is the limit
_CHECKSUMS = "crc32"  # in the metadata: of every piece, eight hexadecimal digits each
_SOURCE_PIECE_BYTES = 8 << 20
_BUFFER_BYTES = 1 << 20
_NAN_BITS = 0x7FC0
_ABANDONED_SECONDS = 3600  # without a write: its process was killed


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor, and where they go."""

    source: StoredTensor
    start: int
    stop: int
    offset: int  # of their first byte in the data

    @property
    def num_bytes(self) -> int:
        return _ITEM_BYTES * (self.stop - self.start) * math.prod(self.source.shape[1:])


def bfloat16_file_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """The size of the file without its header."""
    return sum(_ITEM_BYTES * math.prod(tensor.shape) for tensor in tensors.values())


def write_bfloat16_safetensors(path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """Write all of the file or nothing, however many processes do so at once. Raises OSError."""
    _remove_abandoned(path)
    pieces = list(_pieces(tensors))
    unfinished = _header(tensors, metadata, [0] * len(pieces))
    with replacing(path) as temporary:
        with temporary.open("xb") as file:
            file.truncate(len(unfinished) + bfloat16_file_bytes(tensors))
        checksums = _fill(temporary, pieces, len(unfinished))
        with temporary.open("rb+") as file:
            file.write(_header(tensors, metadata, checksums))


def check_bfloat16_safetensors(path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """Read the whole file and compare it with its checksums. Raises ModelLoadError where a bit differs from what
    `write_bfloat16_safetensors` wrote for the same arguments, OSError where the file cannot be read."""
    pieces = list(_pieces(tensors))
    stored = read_safetensors_metadata(path).get(_CHECKSUMS, "")
    try:
        expected = [int.from_bytes(bytes.fromhex(stored[8 * i : 8 * i + 8])) for i in range(len(pieces))]
    except ValueError:
        expected = []
    header = _header(tensors, metadata, expected) if len(expected) == len(pieces) else b""
    with path.open("rb") as file:
        if not header or file.read(len(header)) != header:
            raise ModelLoadError("its header is not the one that was written")
    found = file_checksums(path, [(len(header) + piece.offset, piece.num_bytes) for piece in pieces])
    wrong = [piece for piece, crc, right in zip(pieces, found, expected, strict=True) if crc != right]
    if wrong:
        num_bytes = sum(piece.num_bytes for piece in wrong)
        raise ModelLoadError(
            f"{num_bytes} bytes from byte {len(header) + wrong[0].offset} on do not fit their checksums"
        )


def content_digest(path: Path) -> str:
    """Identify the file's content by a hash of the CRC-32 of each piece. It reads the whole file, on all cores, and is
    as fast as CRC-32: six times as fast as SHA-256. It protects from damage and mistakes, not from an attacker."""
    size, step = path.stat().st_size, _SOURCE_PIECE_BYTES
    checksums = file_checksums(path, [(start, min(step, size - start)) for start in range(0, size, step)])
    return sha256(f"{size} {checksums}".encode()).hexdigest()[:32]


def file_checksums(path: Path, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """The CRC-32 of each (first byte, number of bytes) of the file; bytes beyond its end are missing from it."""

    def checksum(span: tuple[int, int]) -> int:
        start, num_bytes = span
        crc, buffer = 0, memoryview(bytearray(min(num_bytes, _BUFFER_BYTES)))
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while num_bytes and (count := file.readinto(buffer[: min(num_bytes, len(buffer))])):
                crc = zlib.crc32(buffer[:count], crc)
                num_bytes -= count
        return crc

    return _on_all_cores(checksum, ranges)


def _on_all_cores(task: Callable[[_Task], _Answer], arguments: Iterable[_Task]) -> list[_Answer]:
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "prefixwise-weights") as pool:
        return list(pool.map(task, arguments))  # raises a thread's error and drops the tasks that have not begun


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote."""
    for temporary in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):  # another process may remove it at the same time
            if time.time() - temporary.stat().st_mtime > _ABANDONED_SECONDS:
                temporary.unlink()


def _header(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], checksums: Iterable[int]) -> bytes:
    """The length and the JSON text, padded with spaces as the format has it."""
    stored = {**metadata, _CHECKSUMS: "".join(f"{crc:08x}" for crc in checksums)}
    header: dict[str, Any] = {"__metadata__": stored}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + _ITEM_BYTES * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensors: Mapping[str, StoredTensor]) -> Iterator[_Piece]:
    offset = 0
    for tensor in tensors.values():
        row_len = math.prod(tensor.shape[1:])
        step = max(1, _PIECE_BYTES // (4 * row_len))
        for start in range(0, tensor.shape[0], step):
            stop = min(start + step, tensor.shape[0])
            yield _Piece(tensor, start, stop, offset + _ITEM_BYTES * row_len * start)
        offset += _ITEM_BYTES * row_len * tensor.shape[0]


def _fill(path: Path, pieces: Iterable[_Piece], data_start: int) -> list[int]:
    """Write the data; returns the CRC-32 of each piece."""

    def write(piece: _Piece) -> int:
        rows = as_float32(piece.source.read_rows(piece.start, piece.stop), piece.source.dtype)
        bits = bfloat16_bits(rows)
        with path.open("rb+") as file:  # per thread: a position cannot be shared
            file.seek(data_start + piece.offset)
            file.write(bits.data)
        return zlib.crc32(bits.data)

    return _on_all_cores(write, pieces)


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
