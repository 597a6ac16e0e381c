"""compressed-tensors: groups of layers, each with a format of its own (FP8, int8, or packed int4 and int8)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.checkpoint import NUMBER_DTYPES, Quantization, StoredTensor
from prefixwise.models.quantization.layers import (
    Layer,
    ReadWeight,
    check_is,
    column_blocks,
    integer,
    matrix_of,
    read_block,
    regular_expression,
    scale_grid,
)
from prefixwise.models.quantization.tensors import PackedTensor, QuantisedTensor, packed_len

_UNPACKED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED_FORMAT = "pack-quantized"


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


def compressed_tensors(config: Mapping[str, Any]) -> tuple[Quantization | None, ReadWeight]:
    """What the config says, and how weights are read. Raises ModelLoadError for what cannot be read."""
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
    check_is(config, "format", stored_as, *_UNPACKED_FORMATS, _PACKED_FORMAT)
    num_bits, is_float = integer(weights, "num_bits", 8), weights.get("type", "int") == "float"
    check_is(config, "num_bits", num_bits, *((8,) if is_float else (4, 8)))
    group_size: Any = weights.get("group_size")
    strategy = weights.get("strategy") or (
        "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    )
    check_is(config, "strategy", strategy, "tensor", "channel", "group", "block")
    if strategy == "group" and (type(group_size) is not int or group_size < 1):
        raise ModelLoadError(f"quantization_config: group_size must be at least 1, got {describe(group_size)}")
    targets = tuple(map(str, scheme.get("targets") or ()))
    for target in targets:
        if target.startswith("re:"):
            regular_expression("targets", target[3:])
    return _Group(
        targets=targets,
        format=str(stored_as),
        num_bits=num_bits,
        is_float=is_float,
        strategy=strategy,
        group_size=group_size if strategy == "group" else 0,
        block=read_block(weights.get("block_structure")) if strategy == "block" else None,
    )


def _compressed_weight(layer: Layer, groups: list[_Group]) -> StoredTensor | None:
    is_packed = "weight_packed" in layer.parts
    if not is_packed and ("weight" not in layer.parts or layer.parts["weight"].dtype in NUMBER_DTYPES):
        return None
    ranked = [(rank, number) for number, group in enumerate(groups) if (rank := group.rank(layer.name)) is not None]
    if not ranked:
        raise ModelLoadError(f"the layer {layer.name!r} is quantised, but no group of quantization_config names it")
    group = groups[min(ranked)[1]]
    codes = _packed_codes(layer, group) if is_packed else matrix_of(layer, "weight", "float8_e4m3fn", "int8")
    block = group.block_of(codes.shape)
    scales = scale_grid(layer, "weight_scale", layer.take("weight_scale", *NUMBER_DTYPES), codes.shape, block)
    weight = QuantisedTensor(codes.shape, "float32", codes, scales, block)
    if is_packed:
        weight = replace(weight, zero_point=1 << (group.num_bits - 1))  # codes count from the least number
    if "weight_zero_point" in layer.parts:
        zero_points = _zero_points(layer, group, weight)
        is_offset = isinstance(zero_points, PackedTensor)  # from the least number, too
        weight = replace(weight, zero_points=zero_points, zero_point=0 if is_offset else weight.zero_point)
    if "weight_g_idx" in layer.parts:
        index = column_blocks(layer, "weight_g_idx", scales.shape[1], codes.shape[1])
        weight = replace(weight, block_of_column=index)
    return weight


def _packed_codes(layer: Layer, group: _Group) -> StoredTensor:
    words, stated = matrix_of(layer, "weight_packed", "int32"), layer.take("weight_shape", "int64", "int32")
    if stated.shape != (2,):
        raise layer.refuse("weight_shape", stated, "[2]")
    rows, columns = map(int, stated.read_rows(0, 2))
    if words.shape != (rows, packed_len(columns, group.num_bits)):
        raise layer.refuse("weight_packed", words, f"{group.num_bits} bits of {[rows, columns]}")
    return PackedTensor((rows, columns), "uint8", words, group.num_bits)


def _zero_points(layer: Layer, group: _Group, weight: QuantisedTensor) -> StoredTensor:
    """Packed like the codes, but along rows; as they are with one scale per tensor, in unpacked formats, and in files
    of compressed-tensors before 0.9.4."""
    stored = layer.take("weight_zero_point", "int8", "int32", "int64", "float8_e4m3fn", *NUMBER_DTYPES)
    shape = weight.scales.shape
    if isinstance(weight.codes, PackedTensor) and stored.dtype == "int32":
        words = (packed_len(shape[0], group.num_bits), shape[1])
        if stored.shape != words:
            raise layer.refuse("weight_zero_point", stored, list(words))
        return PackedTensor(shape, "uint8", stored, group.num_bits, packs_rows=True)
    return scale_grid(layer, "weight_zero_point", stored, weight.shape, weight.block)
