"""A safetensors file, mapped: eight bytes of header length, a JSON header, then the raw tensors.

Read directly rather than through the safetensors package, whose numpy side has no bfloat16; the format is
these few lines, and a file cut short can be named as such.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.describe import describe
from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import StoredDtype, StoredTensor
from prefixwise.models.mapped_rows import map_rows

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
    """What whoever wrote the file says about it."""
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
