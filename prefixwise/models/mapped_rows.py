"""Rows of a tensor in a file, mapped for as long as someone holds them.

Every read has a mapping of its own. One mapping of the whole file would stay resident page by page while a
backend copies tensor after tensor, and loading would cost twice the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def map_rows(path: Path, offset: int, dtype: DTypeLike, shape: tuple[int, ...], start: int, stop: int) -> NDArray[Any]:
    """Rows start..stop, read-only, of the tensor of this shape whose first byte is at `offset`."""
    start, stop, _ = slice(start, stop).indices(shape[0])
    rows_shape = (max(0, stop - start), *shape[1:])
    if 0 in rows_shape:  # nothing to map, and mmap refuses to map nothing
        return np.empty(rows_shape, dtype)
    row_bytes = np.dtype(dtype).itemsize * int(np.prod(shape[1:]))
    return np.asarray(np.memmap(path, dtype, "r", offset + start * row_bytes, rows_shape))
