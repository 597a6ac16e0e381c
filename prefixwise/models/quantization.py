"""Quantised checkpoints in Hugging Face's layout: from `quantization_config` and the tensors of a format to weights.

    fp8                   weight (float8) and weight_scale_inv, of blocks of 128 x 128 (Qwen), or of the whole tensor
    compressed-tensors    weight (float8 or int8) and weight_scale; or weight_packed (4 or 8 bits) and weight_scale
    awq                   qweight, qzeros and scales, transposed; four bits in the order of AutoAWQ's GEMM kernels
    gptq                  qweight, qzeros and scales, transposed; four or eight bits, g_idx where columns were sorted

Only weights are read in their format. What a format says of activations is not used: they are computed in the model's
dtype. Whether a layer is quantised is seen from its tensors, so the lists of modules that were left out are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.checkpoint import NUMBER_DTYPES, Quantization, StoredDtype, StoredTensor
from prefixwise.models.quantised_tensors import PackedTensor, QuantisedTensor, TransposedTensor, packed_len

# Scales of activations and of the KV cache, in layers of any method.
_OF_ACTIVATIONS = {"activation_scale", "kv_scale", "prob_output_scale"} | {
    f"{what}_{part}" for what in ("input", "output", "q", "k", "v") for part in ("scale", "zero_point")
}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_UNPACKED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED_FORMAT = "pack-quantized"
_UNSORTED = -1  # in weight_g_idx, where columns were not sorted
# Of a layer that has no `weight`: of GPTQ and AWQ, compressed-tensors, ExLlama, HQQ and Quanto.
_IN_PLACE_OF_WEIGHT = ("qweight", "weight_packed", "q_weight", "trellis", "W_q", "_data")
# GPTQModel's keys that change every weight, as no tensor shows: a Hadamard transform of the inputs of `down_proj`; and
# FP8 codes that are divided by their scales.
_UNSUPPORTED_KEYS = ("rotation", "weight_scale_semantics")


class _Layer:
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


_ReadWeight = Callable[[_Layer], StoredTensor | None]  # takes what it uses; None: the layer is not quantised


@dataclass(frozen=True)
class QuantizationScheme:
    """What a `quantization_config` says."""

    quantization: Quantization | None  # None: no weights are quantised, only activations or the KV cache
    read_weight: _ReadWeight


def read_quantization(raw: Mapping[str, Any]) -> QuantizationScheme | None:
    """What config.json `raw` says of quantised weights; None where it says nothing.

    Raises ModelLoadError for a method or a format that cannot be read. No weight file is needed for that: those of
    other methods may be of other kinds, and have other dtypes.
    """
    config = raw.get("quantization_config", raw.get("compression_config"))
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ModelLoadError(f"config.json: quantization_config must be an object, got {describe(config)}")
    method = _method(raw, config)
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelLoadError(f"unsupported quantization {method!r}; supported: {', '.join(_METHODS)}")
    for key in _UNSUPPORTED_KEYS:
        if config.get(key):
            raise ModelLoadError(f"unsupported {method} {key} {describe(config[key])}; supported: none")
    return QuantizationScheme(*_METHODS[method](config))


def _method(raw: Mapping[str, Any], config: Mapping[str, Any]) -> object:
    """The first models of bitsandbytes name none; those of MLX have a copy under `quantization`."""
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        return "bitsandbytes"
    return config.get("quant_method", "mlx" if "quantization" in raw else None)


def dequantised_tensors(
    scheme: QuantizationScheme | None, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, each quantised layer's as its `weight`.

    Raises ModelLoadError for tensors that do not fit the scheme.
    """
    if scheme is None:
        for name in stored:
            if name.rpartition(".")[2] in _IN_PLACE_OF_WEIGHT:
                raise ModelLoadError(
                    f"the checkpoint has the tensor {name!r} of a quantised layer; expected a quantization_config in "
                    f"config.json that says how to read it; supported: {', '.join(_METHODS)}"
                )
        return dict(stored)
    tensors: dict[str, StoredTensor] = {}
    for layer in _layers(stored):
        weight = scheme.read_weight(layer)
        if weight is not None:
            layer.parts["weight"] = weight
        kept = (part for part in layer.parts if part not in _OF_ACTIVATIONS)
        tensors |= {f"{layer.name}.{part}" if layer.name else part: layer.parts[part] for part in kept}
    return tensors


def _layers(stored: Mapping[str, StoredTensor]) -> Iterator[_Layer]:
    by_name: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        layer, _, part = name.rpartition(".")
        by_name.setdefault(layer, {})[part] = tensor
    return (_Layer(name, parts) for name, parts in by_name.items())


def _integer(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if type(value) is not int:
        raise ModelLoadError(f"quantization_config: {key} must be a whole number, got {describe(value)}")
    return value


def _check_is(config: Mapping[str, Any], key: str, value: object, *supported: object) -> None:
    if value not in supported:
        names = ", ".join(map(str, supported))
        raise ModelLoadError(f"unsupported {config.get('quant_method')} {key} {value!r}; supported: {names}")


def _scale_grid(
    layer: _Layer, part: str, tensor: StoredTensor, shape: tuple[int, ...], block: tuple[int, int]
) -> StoredTensor:
    """The tensor as [blocks of rows, blocks of columns] of a matrix; axes of 1 may be missing."""
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if [size for size in tensor.shape if size != 1] != [size for size in grid if size != 1]:
        raise layer.refuse(part, tensor, f"{list(grid)}: one for {block[0]} x {block[1]} of {list(shape)}")
    return replace(tensor, shape=grid)


def _matrix(layer: _Layer, part: str, *dtypes: StoredDtype) -> StoredTensor:
    tensor = layer.take(part, *dtypes)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise layer.refuse(part, tensor, "a matrix")
    return tensor


# fp8


def _fp8(config: Mapping[str, Any]) -> tuple[Quantization, _ReadWeight]:
    size = config.get("weight_block_size")
    block = None if size is None else _block(size)
    scaled = "one scale per tensor" if block is None else f"blocks of {block[0]} x {block[1]}"

    def read_weight(layer: _Layer) -> StoredTensor | None:
        if "weight" not in layer.parts or layer.parts["weight"].dtype != "float8_e4m3fn":
            return None
        codes = _matrix(layer, "weight", "float8_e4m3fn")
        part = "weight_scale" if "weight_scale" in layer.parts else "weight_scale_inv"  # both are factors
        scales = layer.take(part, *NUMBER_DTYPES)
        each = (codes.shape[0], codes.shape[1]) if block is None else block
        return QuantisedTensor(codes.shape, "float32", codes, _scale_grid(layer, part, scales, codes.shape, each), each)

    return Quantization(f"fp8 (e4m3, {scaled})", of_activations=True), read_weight


def _block(size: Any) -> tuple[int, int]:
    """Of [rows, columns], or of the text `128x128` of older files."""
    try:
        rows, columns = map(int, size.split("x") if isinstance(size, str) else size)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise ModelLoadError(f"quantization_config: a block must be its rows and columns, got {describe(size)}")
    return rows, columns


# compressed-tensors


@dataclass(frozen=True)
class _Group:
    """The layers that share a scheme."""

    targets: tuple[str, ...]  # names, `re:` and an expression, or classes
    format: str
    num_bits: int
    is_float: bool
    strategy: str
    group_size: int
    block: tuple[int, int] | None

    @property
    def title(self) -> str:
        blocks = {"tensor": "one scale per tensor", "channel": "per channel", "group": f"groups of {self.group_size}"}
        scaled = f"blocks of {self.block[0]} x {self.block[1]}" if self.block else blocks[self.strategy]
        return f"{self.format} ({'fp' if self.is_float else 'int'}{self.num_bits}, {scaled})"

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The rows and columns that share a scale, in a matrix of this shape."""
        if self.block is not None:
            return self.block
        columns = self.group_size if self.strategy == "group" else shape[1]
        return (shape[0] if self.strategy == "tensor" else 1), columns

    def rank(self, layer: str) -> tuple[int, str] | None:
        """How closely a target names the layer, the closest first; None where none does."""
        cls = "Embedding" if layer.endswith("embed_tokens") else "Linear"
        ranks = [(0, target) for target in self.targets if target == layer]
        ranks += [(1, each) for each in self.targets if each[:3] == "re:" and re.match(each[3:], layer)]
        ranks += [(2, target) for target in self.targets if target == cls]
        return min(ranks, default=None)


def _compressed_tensors(config: Mapping[str, Any]) -> tuple[Quantization | None, _ReadWeight]:
    for key in ("sparsity_config", "transform_config"):
        stated = config.get(key)
        is_dense = isinstance(stated, Mapping) and (stated.get("format") == "dense" or stated == {"config_groups": {}})
        if stated and not is_dense:
            raise ModelLoadError(f"unsupported compressed-tensors {key} {describe(stated)}; supported: none")
    schemes = config.get("config_groups", {})
    if not isinstance(schemes, Mapping) or not all(isinstance(each, Mapping) for each in schemes.values()):
        raise ModelLoadError(f"quantization_config: config_groups must be an object, got {describe(schemes)}")
    groups = [_group(config, scheme) for scheme in schemes.values() if scheme.get("weights") is not None]
    if not groups:
        return None, lambda layer: _compressed_weight(layer, groups)
    activations = [
        scheme.get(key) for scheme in schemes.values() for key in ("input_activations", "output_activations")
    ]
    quantization = Quantization(
        "compressed-tensors " + " and ".join(dict.fromkeys(group.title for group in groups)),
        of_activations=any((*activations, config.get("kv_cache_scheme"))),
    )
    return quantization, lambda layer: _compressed_weight(layer, groups)


def _group(config: Mapping[str, Any], scheme: Mapping[str, Any]) -> _Group:
    weights, stored_as = scheme["weights"], scheme.get("format") or config.get("format")
    if not isinstance(weights, Mapping):
        raise ModelLoadError(f"quantization_config: weights must be an object, got {describe(weights)}")
    _check_is(config, "format", stored_as, *_UNPACKED_FORMATS, _PACKED_FORMAT)
    num_bits, is_float = _integer(weights, "num_bits", 8), weights.get("type", "int") == "float"
    _check_is(config, "num_bits", num_bits, *((8,) if is_float else (4, 8)))
    group_size: Any = weights.get("group_size")
    strategy = weights.get("strategy") or (
        "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    )
    _check_is(config, "strategy", strategy, "tensor", "channel", "group", "block")
    if strategy == "group" and (type(group_size) is not int or group_size < 1):
        raise ModelLoadError(f"quantization_config: group_size must be at least 1, got {describe(group_size)}")
    return _Group(
        targets=tuple(map(str, scheme.get("targets") or ())),
        format=str(stored_as),
        num_bits=num_bits,
        is_float=is_float,
        strategy=strategy,
        group_size=group_size if strategy == "group" else 0,
        block=_block(weights.get("block_structure")) if strategy == "block" else None,
    )


def _compressed_weight(layer: _Layer, groups: list[_Group]) -> StoredTensor | None:
    is_packed = "weight_packed" in layer.parts
    if not is_packed and ("weight" not in layer.parts or layer.parts["weight"].dtype in NUMBER_DTYPES):
        return None
    ranked = [(rank, number) for number, group in enumerate(groups) if (rank := group.rank(layer.name)) is not None]
    if not ranked:
        raise ModelLoadError(f"the layer {layer.name!r} is quantised, but no group of quantization_config names it")
    group = groups[min(ranked)[1]]
    codes = _packed_codes(layer, group) if is_packed else _matrix(layer, "weight", "float8_e4m3fn", "int8")
    block = group.block_of(codes.shape)
    scales = _scale_grid(layer, "weight_scale", layer.take("weight_scale", *NUMBER_DTYPES), codes.shape, block)
    weight = QuantisedTensor(codes.shape, "float32", codes, scales, block)
    if is_packed:
        weight = replace(weight, zero_point=1 << (group.num_bits - 1))  # codes count from the least number
    if "weight_zero_point" in layer.parts:
        zero_points = _zero_points(layer, group, weight)
        is_offset = isinstance(zero_points, PackedTensor)  # from the least number, too
        weight = replace(weight, zero_points=zero_points, zero_point=0 if is_offset else weight.zero_point)
    if "weight_g_idx" in layer.parts:
        index = _column_blocks(layer, "weight_g_idx", scales.shape[1], codes.shape[1])
        weight = replace(weight, block_of_column=index)
    return weight


def _packed_codes(layer: _Layer, group: _Group) -> StoredTensor:
    words, stated = _matrix(layer, "weight_packed", "int32"), layer.take("weight_shape", "int64", "int32")
    if stated.shape != (2,):
        raise layer.refuse("weight_shape", stated, "[2]")
    rows, columns = map(int, stated.read_rows(0, 2))
    if words.shape != (rows, packed_len(columns, group.num_bits)):
        raise layer.refuse("weight_packed", words, f"{group.num_bits} bits of {[rows, columns]}")
    return PackedTensor((rows, columns), "uint8", words, group.num_bits)


def _zero_points(layer: _Layer, group: _Group, weight: QuantisedTensor) -> StoredTensor:
    """Packed like the codes, but along rows; as they are with one scale per tensor, in unpacked formats, and in files
    of compressed-tensors before 0.9.4."""
    stored = layer.take("weight_zero_point", "int8", "int32", "int64", "float8_e4m3fn", *NUMBER_DTYPES)
    shape = weight.scales.shape
    if isinstance(weight.codes, PackedTensor) and stored.dtype == "int32":
        words = (packed_len(shape[0], group.num_bits), shape[1])
        if stored.shape != words:
            raise layer.refuse("weight_zero_point", stored, list(words))
        return PackedTensor(shape, "uint8", stored, group.num_bits, packs_rows=True)
    return _scale_grid(layer, "weight_zero_point", stored, weight.shape, weight.block)


def _column_blocks(layer: _Layer, part: str, num_blocks: int, num_columns: int) -> NDArray[np.int64] | None:
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


# AWQ and GPTQ


def _awq(config: Mapping[str, Any]) -> tuple[Quantization, _ReadWeight]:
    is_llm_awq = config.get("backend") == "llm-awq"
    _check_is(config, "version", "llm-awq" if is_llm_awq else "gemm", "gemm")
    for key in ("version", "format", "checkpoint_format"):
        _check_is(config, key, str(config.get(key) or "gemm").lower(), "gemm")
    _check_is(config, "bits", config.get("bits", config.get("w_bit", 4)), 4)
    group_size = _integer(config, "group_size", _integer(config, "q_group_size", 128))

    def read_weight(layer: _Layer) -> StoredTensor | None:
        if "qweight" not in layer.parts:
            return None
        words = _transposed(_matrix(layer, "qweight", "int32"))
        shape = (8 * words.shape[0], words.shape[1])
        codes = PackedTensor(shape, "uint8", words, 4, packs_rows=True, order=_AWQ_ORDER)
        return _weight_by_groups(layer, codes, group_size)

    return Quantization(f"awq (int4, {_groups_title(group_size)})"), read_weight


@dataclass(frozen=True)
class _GptqScheme:
    format: str
    num_bits: int
    group_size: int
    is_sorted: bool
    is_symmetric: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _GptqScheme:
        stated = [str(config[key]).lower() for key in ("checkpoint_format", "format") if config.get(key)]
        stored_as = "marlin" if config.get("is_marlin_format") else stated[0] if stated else "gptq"
        _check_is(config, "checkpoint_format", stored_as, "gptq", "gptq_v2")
        if len(set(stated)) > 1:  # transformers reads the first, GPTQModel the second
            raise ModelLoadError(
                f"quantization_config: checkpoint_format is {stated[0]!r}, but format is {stated[1]!r}; expected one"
            )
        num_bits, group_size = _integer(config, "bits", 4), _integer(config, "group_size", -1)
        _check_is(config, "bits", num_bits, 4, 8)
        is_sorted, is_symmetric = bool(config.get("desc_act")), config.get("sym") is True
        return cls(stored_as, num_bits, group_size, is_sorted, is_symmetric)

    @property
    def title(self) -> str:
        is_sorted = ", desc_act" if self.is_sorted else ""
        return f"{self.format} (int{self.num_bits}, {_groups_title(self.group_size)}{is_sorted})"


def _gptq(config: Mapping[str, Any]) -> tuple[Quantization, _ReadWeight]:
    general, special = _GptqScheme.of(config), _dynamic_schemes(config)

    def read_weight(layer: _Layer) -> StoredTensor | None:
        if "qweight" not in layer.parts:
            return None
        scheme = next((each for pattern, each in special if pattern.match(layer.name)), general)
        words = _transposed(_matrix(layer, "qweight", "int32"))
        shape = (words.shape[0], words.shape[1] * 32 // scheme.num_bits)
        _drop_empty_bias(layer)
        codes, zeros = PackedTensor(shape, "uint8", words, scheme.num_bits), layer.parts.get("qzeros")
        weight = _weight_by_groups(
            *(layer, codes, scheme.group_size), plus_one=scheme.format == "gptq", needs_index=scheme.is_sorted
        )
        return _symmetric(weight, zeros, scheme.num_bits) if scheme.is_symmetric else weight

    titles = dict.fromkeys([general.title, *(each.title for _, each in special)])
    return Quantization(" and ".join(titles)), read_weight


def _symmetric(weight: QuantisedTensor, zeros: StoredTensor | None, num_bits: int) -> QuantisedTensor:
    """With the middle of the codes for a zero point, as all of symmetric weights are. Some files store others: those of
    `gptq_v2` while they say `gptq`, or one less by the bits of another layer. Zero points that differ from each other
    are used, as such weights are not symmetric."""
    assert zeros is not None, "the weight has zero points"
    if len(np.unique(zeros.read_rows(0, 1).view(np.uint8))) > 1:
        return weight
    return replace(weight, zero_points=None, zero_point=1 << (num_bits - 1))


def _dynamic_schemes(config: Mapping[str, Any]) -> list[tuple[re.Pattern[str], _GptqScheme]]:
    """`dynamic` of GPTQModel: what differs in the layers that an expression names, the first that does. One after `-:`
    names layers that are not quantised, as their tensors say."""
    stated = config.get("dynamic") or {}
    if not isinstance(stated, Mapping) or not all(isinstance(each, Mapping) for each in stated.values()):
        raise ModelLoadError(f"quantization_config: dynamic must be objects by expressions, got {describe(stated)}")
    found = []
    for expression, changes in stated.items():
        if expression.startswith("-:"):
            continue
        try:
            pattern = re.compile(expression.removeprefix("+:"))
        except re.error as error:
            raise ModelLoadError(
                f"quantization_config: dynamic has {expression!r}, which is no expression: {error}"
            ) from None
        found.append((pattern, _GptqScheme.of({**config, **changes})))
    return found


def _weight_by_groups(
    layer: _Layer, codes: PackedTensor, group_size: int, *, plus_one: bool = False, needs_index: bool = False
) -> QuantisedTensor:
    """Scales and zero points are [groups, rows out]."""
    block = (1, codes.shape[1] if group_size == -1 else group_size)
    if block[1] < 1:
        raise ModelLoadError(f"quantization_config: group_size must be -1 or at least 1, got {group_size}")
    grid = (codes.shape[0], -(-codes.shape[1] // block[1]))
    scales, zeros = _matrix(layer, "scales", *NUMBER_DTYPES), _matrix(layer, "qzeros", "int32")
    words = (grid[1], packed_len(grid[0], codes.num_bits))
    for part, tensor, expected in (("scales", scales, grid[::-1]), ("qzeros", zeros, words)):
        if tensor.shape != expected:
            raise layer.refuse(part, tensor, list(expected))
    zero_points = PackedTensor(
        grid, "uint8", _transposed(zeros), codes.num_bits, packs_rows=True, order=codes.order, plus_one=plus_one
    )
    has_index = needs_index or "g_idx" in layer.parts
    index = _column_blocks(layer, "g_idx", grid[1], codes.shape[1]) if has_index else None
    return QuantisedTensor(
        codes.shape, "float32", codes, _transposed(scales), block, zero_points, block_of_column=index
    )


def _drop_empty_bias(layer: _Layer) -> None:
    """Older files have a bias of zeros in every layer; the biases of queries, keys and values may be the model's,
    unless the three are fused: no family with such a layer has biases."""
    bias = layer.parts.get("bias")
    if bias is None or layer.name.endswith((".q_proj", ".k_proj", ".v_proj")) or bias.dtype not in NUMBER_DTYPES:
        return
    if not bias.read_rows(0, bias.shape[0]).any():
        del layer.parts["bias"]


def _transposed(tensor: StoredTensor) -> TransposedTensor:
    return TransposedTensor(tensor.shape[::-1], tensor.dtype, tensor)


def _groups_title(group_size: int) -> str:
    return "per channel" if group_size == -1 else f"groups of {group_size}"


_METHODS: dict[str, Callable[[Mapping[str, Any]], tuple[Quantization | None, _ReadWeight]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
}
