"""AWQ and GPTQ: transposed codes, and zero points and scales of groups of columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.checkpoint import NUMBER_DTYPES, Quantization, StoredTensor
from prefixwise.models.quantization.layers import (
    Layer,
    ReadWeight,
    check_is,
    column_blocks,
    integer,
    matrix_of,
    regular_expression,
)
from prefixwise.models.quantization.tensors import PackedTensor, QuantisedTensor, TransposedTensor, packed_len

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def awq(config: Mapping[str, Any]) -> tuple[Quantization, ReadWeight]:
    """What the config says, and how weights are read. Raises ModelLoadError for what cannot be read."""
    is_llm_awq = config.get("backend") == "llm-awq"
    check_is(config, "version", "llm-awq" if is_llm_awq else "gemm", "gemm")
    for key in ("version", "format", "checkpoint_format"):
        check_is(config, key, str(config.get(key) or "gemm").lower(), "gemm")
    check_is(config, "bits", config.get("bits", config.get("w_bit", 4)), 4)
    group_size = integer(config, "group_size", integer(config, "q_group_size", 128))

    def read_weight(layer: Layer) -> StoredTensor | None:
        if "qweight" not in layer.parts:
            return None
        words = _transposed(matrix_of(layer, "qweight", "int32"))
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
        check_is(config, "checkpoint_format", stored_as, "gptq", "gptq_v2")
        if len(set(stated)) > 1:  # transformers reads the first, GPTQModel the second
            message = f"checkpoint_format is {stated[0]!r}, but format is {stated[1]!r}; expected the same in both"
            raise ModelLoadError(f"quantization_config: {message}")
        num_bits, group_size = integer(config, "bits", 4), integer(config, "group_size", -1)
        check_is(config, "bits", num_bits, 4, 8)
        is_sorted, is_symmetric = bool(config.get("desc_act")), config.get("sym") is True
        return cls(stored_as, num_bits, group_size, is_sorted, is_symmetric)

    @property
    def title(self) -> str:
        is_sorted = ", desc_act" if self.is_sorted else ""
        return f"{self.format} (int{self.num_bits}, {_groups_title(self.group_size)}{is_sorted})"


def gptq(config: Mapping[str, Any]) -> tuple[Quantization, ReadWeight]:
    """As `awq`."""
    general, special = _GptqScheme.of(config), _dynamic_schemes(config)

    def read_weight(layer: Layer) -> StoredTensor | None:
        if "qweight" not in layer.parts:
            return None
        scheme = next((each for pattern, each in special if pattern.match(layer.name)), general)
        words = _transposed(matrix_of(layer, "qweight", "int32"))
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
    if len(np.unique(zeros.read_rows(0, zeros.shape[0]).view(np.uint8))) > 1:
        return weight
    return replace(weight, zero_points=None, zero_point=1 << (num_bits - 1))


def _dynamic_schemes(config: Mapping[str, Any]) -> list[tuple[re.Pattern[str], _GptqScheme]]:
    """`dynamic` of GPTQModel: what differs in the layers that an expression names, the first that does. One after `-:`
    names layers that are not quantised, as their tensors say."""
    stated = config.get("dynamic") or {}
    if not isinstance(stated, Mapping) or not all(isinstance(each, Mapping) for each in stated.values()):
        message = "quantization_config: dynamic must be an object of regular expressions and objects"
        raise ModelLoadError(f"{message}, got {describe(stated)}")
    found = []
    for expression, changes in stated.items():
        if expression.startswith("-:"):
            continue
        pattern = regular_expression("dynamic", expression.removeprefix("+:"))
        found.append((pattern, _GptqScheme.of({**config, **changes})))
    return found


def _weight_by_groups(
    layer: Layer, codes: PackedTensor, group_size: int, *, plus_one: bool = False, needs_index: bool = False
) -> QuantisedTensor:
    """Scales and zero points are [groups, rows out]."""
    block = (1, codes.shape[1] if group_size == -1 else group_size)
    if block[1] < 1:
        raise ModelLoadError(f"quantization_config: group_size must be -1 or at least 1, got {group_size}")
    grid = (codes.shape[0], -(-codes.shape[1] // block[1]))
    scales, zeros = matrix_of(layer, "scales", *NUMBER_DTYPES), matrix_of(layer, "qzeros", "int32")
    words = (grid[1], packed_len(grid[0], codes.num_bits))
    for part, tensor, expected in (("scales", scales, grid[::-1]), ("qzeros", zeros, words)):
        if tensor.shape != expected:
            raise layer.refuse(part, tensor, list(expected))
    zero_points = PackedTensor(
        grid, "uint8", _transposed(zeros), codes.num_bits, packs_rows=True, order=codes.order, plus_one=plus_one
    )
    has_index = needs_index or "g_idx" in layer.parts
    index = column_blocks(layer, "g_idx", grid[1], codes.shape[1]) if has_index else None
    return QuantisedTensor(
        codes.shape, "float32", codes, _transposed(scales), block, zero_points, block_of_column=index
    )


def _drop_empty_bias(layer: Layer) -> None:
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
