"""A GGUF file as a checkpoint: its metadata becomes a `ModelConfig`, its quantisation blocks become rows of float32.

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
)
from prefixwise.models.config import ModelConfig, RopeConfig, parameter_shapes
from prefixwise.models.families import GGUF_TENSOR_NAMES, Family, family_of_gguf, stored_name
from prefixwise.models.gguf_file import GgufFile, TensorEntry, read_gguf_file

# Types whose bytes are numbers already: numpy's name and ours. The others become float32.
_PLAIN: dict[GGMLQuantizationType, tuple[type[np.generic], StoredDtype]] = {
    GGMLQuantizationType.F32: (np.float32, "float32"),
    GGMLQuantizationType.F16: (np.float16, "float16"),
    GGMLQuantizationType.BF16: (np.uint16, "bfloat16"),
}
_DEQUANTISE_BYTES = 65_536  # per step: small enough that a step's float32 stay in the cache
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's rope scaling, the one tensor that is no parameter


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
    family = family_of_gguf(str(file.metadata.get("general.architecture")))
    _check_is_whole(file)
    stored = {name: _open_tensor(file, entry) for name, entry in file.tensors.items()}
    _check_layout(file, stored)
    config = _model_config(file.metadata, family, stored)
    check_layer_count(config, stored, "blk")
    file_names = {key: stored_name(key, GGUF_TENSOR_NAMES, "blk") for key in parameter_shapes(config)}
    tensors = {key: stored[name] for key, name in file_names.items() if name in stored}
    check_tensors(config, tensors, file_names)
    check_no_unused_tensors(config, stored, file_names, "blk")
    if family.gguf_permutes_qk:
        tensors = {key: _unpermuted(key, tensor, config) for key, tensor in tensors.items()}
    stated = (file.metadata.get(key) for key in ("general.name", "general.basename"))
    names = names_of(given_name, path, *stated)
    quantised = frozenset(key for key, tensor in tensors.items() if _is_quantised_matrix(tensor))
    types = sorted({tensors[key].quant_type.name for key in quantised})
    quantization = Quantization(f"gguf ({', '.join(types)})") if types else None
    return Checkpoint(path.stem, path, config, tensors, lambda: _tokenizer_files(file), names, quantised, quantization)


def _is_quantised_matrix(tensor: GgufTensor) -> bool:
    return tensor.quant_type not in _PLAIN and len(tensor.shape) == 2


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


def _unpermuted(key: str, tensor: GgufTensor, config: ModelConfig) -> GgufTensor:
    """llama.cpp interleaves the two rotary halves of each head: row half * H/2 + i is stored at 2i + half."""
    if key.rpartition(".")[2] not in ("q", "k", "q_bias", "k_bias"):
        return tensor
    rows = np.arange(tensor.shape[0]).reshape(-1, config.head_size // 2, 2)
    return replace(tensor, row_order=rows.swapaxes(1, 2).reshape(-1))


def _model_config(metadata: Mapping[str, Any], family: Family, stored: Mapping[str, StoredTensor]) -> ModelConfig:
    values = _Metadata(metadata)
    values.refuse_unsupported()
    return ModelConfig(
        family=family.name,
        vocab_size=_vocab_size(stored),
        model_size=values.integer("embedding_length"),
        mlp_size=values.integer("feed_forward_length"),
        num_layers=values.integer("block_count"),
        num_heads=values.integer("attention.head_count"),
        num_kv_heads=values.integer("attention.head_count_kv", values.integer("attention.head_count")),
        head_size=values.head_size(),
        norm_eps=float(values.number("attention.layer_norm_rms_epsilon")),
        rope=_rope_config(values, stored.get(_ROPE_FACTORS)),
        qkv_bias=family.qkv_bias or stored_name("layers.0.q_bias", GGUF_TENSOR_NAMES, "blk") in stored,
        qk_norm=family.qk_norm,
        tied_head=GGUF_TENSOR_NAMES["head"] not in stored,
        max_context_len=values.integer("context_length"),
        activation=family.activation,
        embedding_scale=family.embedding_scale(values.integer("embedding_length")),
        float32_norms=family.one_plus_norms,
    )


def _vocab_size(stored: Mapping[str, StoredTensor]) -> int:
    name = GGUF_TENSOR_NAMES["embedding"]
    if name not in stored:
        raise ModelLoadError(f"the checkpoint lacks the tensor {name!r}, the embedding")
    return stored[name].shape[0]


class _Metadata:
    """The numbers that describe the model; their keys begin with the architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._prefix = metadata["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> int | float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            got = "nothing" if value is None else f"a {type(value).__name__}"
            raise ModelLoadError(f"the GGUF metadata needs one number for '{self._prefix}.{key}', got {got}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int):
            raise ModelLoadError(f"the GGUF metadata needs a whole number for '{self._prefix}.{key}', got {value!r}")
        return value

    def head_size(self) -> int:
        num_heads = max(1, self.integer("attention.head_count"))  # ModelConfig refuses less
        return self.integer("attention.key_length", self.integer("embedding_length") // num_heads)

    def refuse_unsupported(self) -> None:
        """Raise for variants that share an architecture's name but compute something else."""
        if self.integer("expert_count", 0):
            raise ModelLoadError("unsupported: a mixture of experts; expected a dense model")
        head_size = self.head_size()
        for key in ("rope.dimension_count", "attention.value_length"):
            if self.integer(key, head_size) != head_size:
                raise ModelLoadError(
                    f"unsupported: '{self._prefix}.{key}' is {self.get(key)}, but a head has {head_size}"
                )


def _rope_config(values: _Metadata, factors: StoredTensor | None) -> RopeConfig:
    theta = float(values.number("rope.freq_base", 10_000.0))
    kind = values.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelLoadError(f"unsupported rope scaling {kind!r}; supported: none, linear, Llama 3's factors")
    if factors is not None:
        return RopeConfig(theta, frequency_factors=_frequency_factors(factors, values.head_size() // 2))
    linear = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    return RopeConfig(theta, linear_factor=float(linear) if kind == "linear" else 1.0)


def _frequency_factors(factors: StoredTensor, expected_len: int) -> tuple[float, ...]:
    if factors.shape != (expected_len,):
        raise ModelLoadError(
            f"the tensor {_ROPE_FACTORS!r} has shape {list(factors.shape)}, but the config asks for {[expected_len]}"
        )
    return tuple(factors.read_rows(0, expected_len).tolist())
