"""A GGUF file as a checkpoint: its quantisation blocks become rows of float32. `gguf_config.py` reads its metadata.

Imported only when a GGUF file is opened, with the gguf package, which dequantises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import (
    Checkpoint,
    ChosenRows,
    Quantization,
    StoredDtype,
    StoredTensor,
    TokenizerFiles,
    check_layer_count,
    check_no_unused_tensors,
    check_tensors,
    map_rows,
    names_of,
    naming_file,
    split_rows,
    with_rotary_halves,
)
from prefixwise.models.config import ModelConfig, parameter_shapes
from prefixwise.models.families import (
    GGUF_FUSED_GATE_UP,
    GGUF_FUSED_QKV,
    GGUF_TENSOR_NAMES,
    family_of_gguf,
    gguf_tensor_names,
    stored_name,
)
from prefixwise.models.gguf_config import read_gguf_config
from prefixwise.models.gguf_file import GgufFile, TensorEntry, read_gguf_file

# Types whose bytes are numbers already: numpy's name and ours. The others become float32.
_PLAIN: dict[GGMLQuantizationType, tuple[type[np.generic], StoredDtype]] = {
    GGMLQuantizationType.F32: (np.float32, "float32"),
    GGMLQuantizationType.F16: (np.float16, "float16"),
    GGMLQuantizationType.BF16: (np.uint16, "bfloat16"),
}
_DEQUANTISE_BYTES = 65_536  # per step: small enough that a step's float32 stay in the cache


@dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """Rows of quantisation blocks; they are dequantised on every read."""

    path: Path
    offset: int  # of the first byte in the file
    quant_type: GGMLQuantizationType
    row_bytes: int
    row_order: NDArray[np.int64] | None = None  # which stored row is row i; None: the i-th

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        raw = self._stored_rows(start, stop)
        shape = (len(raw), *self.shape[1:])
        if self.quant_type in _PLAIN:
            return raw.view(_PLAIN[self.quant_type][0]).reshape(shape)
        return _dequantised(raw, self.quant_type).reshape(shape)

    def _stored_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of the rows, [rows, bytes per row]."""
        stored_shape = (self.shape[0], self.row_bytes)
        if self.row_order is None:
            return map_rows(self.path, self.offset, np.uint8, stored_shape, start, stop)
        order = self.row_order[start:stop]
        first, last = int(order.min(initial=self.shape[0])), int(order.max(initial=-1))
        return map_rows(self.path, self.offset, np.uint8, stored_shape, first, last + 1)[order - first]


def _dequantised(raw: NDArray[np.uint8], quant_type: GGMLQuantizationType) -> NDArray[np.float32]:
    """Whole rows as float32. gguf works on sixteen rows at a time. Narrow rows go in side by side, which halves the
    time; quantisation blocks are independent, so no bit changes."""
    num_rows, row_bytes = raw.shape
    if num_rows == 0:
        return np.empty(0, np.float32)
    side_by_side = math.gcd(num_rows, 1 << max(0, (_DEQUANTISE_BYTES // 16 // row_bytes).bit_length() - 1))
    wide = raw.reshape(num_rows // side_by_side, side_by_side * row_bytes)
    return np.asarray(dequantize(wide, quant_type), np.float32)


def open_gguf(path: Path, given_name: str = "") -> Checkpoint:
    """Open the file, which the user named `given_name`; tensors are mapped and dequantised on every read. Raises
    ModelLoadError, which names the file."""
    with naming_file(path):
        return _open(path, given_name)


def _open(path: Path, given_name: str) -> Checkpoint:
    file = read_gguf_file(path)
    architecture = str(file.metadata.get("general.architecture"))
    family = family_of_gguf(architecture, has_experts=bool(file.metadata.get(f"{architecture}.expert_count")))
    _check_is_whole(file)
    opened = {name: _open_tensor(file, entry) for name, entry in file.tensors.items()}
    _check_layout(file, opened)
    stored: Mapping[str, StoredTensor] = opened
    config = read_gguf_config(file.metadata, family, stored)
    check_layer_count(config, stored, "blk")
    if family.fuses_projections:
        stored = _split_projections(stored, config)
    if config.experts is not None:
        stored = {name: _flattened(tensor) for name, tensor in opened.items()}
    names_in_file = gguf_tensor_names(family)
    file_names = {key: stored_name(key, names_in_file, "blk") for key in parameter_shapes(config)}
    tensors = {key: stored[name] for key, name in file_names.items() if name in stored}
    check_tensors(config, tensors, file_names)
    check_no_unused_tensors(config, stored, file_names, "blk")
    if family.gguf_permutes_qk:
        tensors = {key: _unpermuted(key, tensor, config) for key, tensor in tensors.items()}
    tensors = with_rotary_halves(tensors, config)
    stated = (file.metadata.get(key) for key in ("general.name", "general.basename"))
    names = names_of(given_name, path, *stated)
    quant_types = {key: found for key, tensor in tensors.items() if (found := _quant_type_of(tensor)) is not None}
    types = sorted({found.name for found in quant_types.values()})
    quantization = Quantization(f"gguf ({', '.join(types)})") if types else None
    return Checkpoint(
        path.stem, path, config, tensors, lambda: _tokenizer_files(file), names, frozenset(quant_types), quantization
    )


def _quant_type_of(tensor: StoredTensor) -> GGMLQuantizationType | None:
    """Of a quantised matrix, or of the one whose rows it has; None for other tensors."""
    if isinstance(tensor, ChosenRows):
        return _quant_type_of(tensor.stored)
    assert isinstance(tensor, GgufTensor)
    return tensor.quant_type if len(tensor.shape) == 2 and tensor.quant_type not in _PLAIN else None


def _split_projections(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Q, K and V of one matrix, gate and up of one that has the name of `up`."""
    q_rows, kv_rows = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    names = GGUF_TENSOR_NAMES
    stored = split_rows(stored, GGUF_FUSED_QKV, {names["q"]: q_rows, names["k"]: kv_rows, names["v"]: kv_rows})
    return split_rows(stored, GGUF_FUSED_GATE_UP, {names["gate"]: config.mlp_size, names["up"]: config.mlp_size})


def _flattened(tensor: GgufTensor) -> GgufTensor:
    """The matrices of all experts, [E, rows, columns], one above the other; other tensors as they are."""
    if len(tensor.shape) != 3:
        return tensor
    num_experts, num_rows, num_columns = tensor.shape
    if num_columns % GGML_QUANT_SIZES[tensor.quant_type][0]:
        raise ModelLoadError(f"{tensor.path} is damaged: rows of {num_columns} numbers of {tensor.quant_type.name}")
    return replace(tensor, shape=(num_experts * num_rows, num_columns), row_bytes=tensor.row_bytes // num_rows)


def _tokenizer_files(file: GgufFile) -> TokenizerFiles:
    from prefixwise.models.gguf_tokenizer import read_gguf_tokenizer  # token ids need no tokenizer

    return read_gguf_tokenizer(file)


def _check_is_whole(file: GgufFile) -> None:
    num_parts = file.metadata.get("split.count", 1)
    if not isinstance(num_parts, int):
        raise ModelLoadError(f"{file.path} is damaged: its number of parts is {num_parts!r}")
    if num_parts > 1:
        raise ModelLoadError(f"{file.path} is one of {num_parts} parts; merge them with llama-gguf-split --merge")


def _open_tensor(file: GgufFile, entry: TensorEntry) -> GgufTensor:
    quant_type = _quant_type(file, entry)
    block_len, block_bytes = GGML_QUANT_SIZES[quant_type]
    row_len = math.prod(entry.shape[1:])
    if row_len % block_len:
        raise ModelLoadError(
            f"{file.path}: tensor {entry.name!r} has rows of {row_len} numbers, "
            f"but {quant_type.name} stores them in blocks of {block_len}"
        )
    row_bytes = row_len // block_len * block_bytes
    end = entry.offset + entry.shape[0] * row_bytes
    if end > file.size_bytes:
        raise ModelLoadError(
            f"{file.path} is truncated: tensor {entry.name!r} ends at byte {end}, the file has {file.size_bytes}"
        )
    dtype: StoredDtype = _PLAIN[quant_type][1] if quant_type in _PLAIN else "float32"
    return GgufTensor(entry.shape, dtype, file.path, entry.offset, quant_type, row_bytes)


def _check_layout(file: GgufFile, stored: Mapping[str, GgufTensor]) -> None:
    """Raise ModelLoadError unless the tensors cover the data exactly. As ggml has it, they follow each other in the
    order of the table, each at the next aligned byte, and the file ends with the last or with its padding."""
    end = start = file.data_start
    for name, tensor in stored.items():
        if tensor.offset != start:
            raise ModelLoadError(
                f"{file.path} is damaged: tensor {name!r} begins at byte {tensor.offset}, expected {start}; "
                "tensors must follow each other without gaps or overlaps"
            )
        end = start + tensor.shape[0] * tensor.row_bytes
        start = -(-end // file.alignment) * file.alignment
    if stored and file.size_bytes not in (end, start):
        raise ModelLoadError(f"{file.path} is damaged: its tensors end at byte {end}, the file has {file.size_bytes}")
    with file.path.open("rb") as handle:
        handle.seek(end)
        if any(handle.read(file.alignment)):
            raise ModelLoadError(f"{file.path} is damaged: the bytes after its last tensor are not zero")


def _quant_type(file: GgufFile, entry: TensorEntry) -> GGMLQuantizationType:
    known = {member.value: member for member in GGMLQuantizationType}
    quant_type = known.get(entry.type_id)
    if quant_type is None or not _can_read(quant_type):
        name = f"type {entry.type_id}" if quant_type is None else quant_type.name
        raise ModelLoadError(
            f"{file.path}: tensor {entry.name!r} is {name}, which cannot be read; "
            "supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and the K-quants"
        )
    return quant_type


@cache
def _can_read(quant_type: GGMLQuantizationType) -> bool:
    """Whether the gguf package can dequantise the type: it has no list, so it gets one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quant_type][1]), np.uint8), quant_type)
    except NotImplementedError:
        return False
    return True


def _unpermuted(key: str, tensor: StoredTensor, config: ModelConfig) -> StoredTensor:
    """llama.cpp interleaves the two rotary halves of each head: row half * H/2 + i is stored at 2i + half."""
    if key.rpartition(".")[2] not in ("q", "k", "q_bias", "k_bias"):
        return tensor
    assert isinstance(tensor, GgufTensor)
    rows = np.arange(tensor.shape[0]).reshape(-1, config.head_size // 2, 2)
    return replace(tensor, row_order=rows.swapaxes(1, 2).reshape(-1))
