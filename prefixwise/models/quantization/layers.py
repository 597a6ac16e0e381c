"""The stored tensors of a quantised layer, and what every format checks of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.checkpoint import StoredDtype, StoredTensor

_UNSORTED = -1  # in weight_g_idx, where columns were not sorted


class Layer:
    """The stored tensors of one layer by the last part of their names. Those that were taken are gone."""

    def __init__(self, name: str, parts: dict[str, StoredTensor]) -> None:
        self.name = name
        self.parts = parts

    def take(self, part: str, *dtypes: StoredDtype) -> StoredTensor:
        """Raises ModelLoadError where the tensor is missing or of another dtype."""
        if part not in self.parts:
            raise ModelLoadError(f"the checkpoint lacks the tensor '{self.name}.{part}' of a quantised layer")
        tensor = self.parts.pop(part)
        if tensor.dtype not in dtypes:
            raise ModelLoadError(
                f"the tensor '{self.name}.{part}' is {tensor.dtype}, but its format has {' or '.join(dtypes)}"
            )
        return tensor

    def refuse(self, part: str, tensor: StoredTensor, expected: object) -> ModelLoadError:
        return ModelLoadError(
            f"the tensor '{self.name}.{part}' has shape {list(tensor.shape)}, but its format asks for {expected}"
        )


ReadWeight = Callable[[Layer], StoredTensor | None]  # takes what it uses; None: the layer is not quantised


def integer(config: Mapping[str, Any], key: str, default: int) -> int:
    """The value of a key. Raises ModelLoadError for any other type."""
    value = config.get(key, default)
    if type(value) is not int:
        raise ModelLoadError(f"quantization_config: {key} must be a whole number, got {describe(value)}")
    return value


def check_is(config: Mapping[str, Any], key: str, value: object, *supported: object) -> None:
    """Raises ModelLoadError for another value than these."""
    if value not in supported:
        names = ", ".join(map(str, supported))
        raise ModelLoadError(f"unsupported {config.get('quant_method')} {key} {value!r}; supported: {names}")


def regular_expression(key: str, text: str) -> re.Pattern[str]:
    """What a key names layers by. Raises ModelLoadError for other text."""
    try:
        return re.compile(text)
    except re.error as error:
        message = f"quantization_config: {key} must have regular expressions, got {text!r}: {error}"
        raise ModelLoadError(message) from None


def scale_grid(
    layer: Layer, part: str, tensor: StoredTensor, shape: tuple[int, ...], block: tuple[int, int]
) -> StoredTensor:
    """The tensor as [blocks of rows, blocks of columns] of a matrix; axes of 1 may be missing."""
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if [size for size in tensor.shape if size != 1] != [size for size in grid if size != 1]:
        raise layer.refuse(part, tensor, f"{list(grid)}: one for {block[0]} x {block[1]} of {list(shape)}")
    return replace(tensor, shape=grid)


def matrix_of(layer: Layer, part: str, *dtypes: StoredDtype) -> StoredTensor:
    """Take a part that must be a matrix."""
    tensor = layer.take(part, *dtypes)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise layer.refuse(part, tensor, "a matrix")
    return tensor


def read_block(size: Any) -> tuple[int, int]:
    """Of [rows, columns], or of the text `128x128` of older files."""
    try:
        rows, columns = map(int, size.split("x") if isinstance(size, str) else size)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise ModelLoadError(f"quantization_config: a block must be [rows, columns], got {describe(size)}")
    return rows, columns


def column_blocks(layer: Layer, part: str, num_blocks: int, num_columns: int) -> NDArray[np.int64] | None:
    """Which scale each column has; None where they are in order."""
    stored = layer.take(part, "int32", "int64")
    if stored.shape != (num_columns,):
        raise layer.refuse(part, stored, [num_columns])
    index = np.array(stored.read_rows(0, num_columns), np.int64)
    if (index == _UNSORTED).all() or np.array_equal(index, np.arange(num_columns) // -(-num_columns // num_blocks)):
        return None
    if index.min() < 0 or index.max() >= num_blocks:
        raise ModelLoadError(f"the tensor '{layer.name}.{part}' has numbers outside 0 to {num_blocks - 1}")
    return index
