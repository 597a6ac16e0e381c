"""FP8 (e4m3) with a scale per tensor, row or block: `fp8`, `fbgemm_fp8`, and the FP8 formats of NVIDIA's ModelOpt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.checkpoint import NUMBER_DTYPES, Quantization, StoredTensor
from prefixwise.models.quantization.layers import Layer, ReadWeight, check_is, matrix_of, read_block, scale_grid
from prefixwise.models.quantization.tensors import QuantisedTensor

_ALL = 0  # rows or columns of a block
_TENSOR, _ROW = (_ALL, _ALL), (1, _ALL)
_MODELOPT_BLOCKS = {"FP8": _TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": _ROW, "FP8_PB_WO": (128, 128)}  # by `quant_algo`


def fp8(config: Mapping[str, Any]) -> tuple[Quantization, ReadWeight]:
    """Blocks as Qwen publishes them, or whole tensors. Their scales have either of two names, and are factors."""
    size = config.get("weight_block_size")
    return _format("fp8", _TENSOR if size is None else read_block(size), ("weight_scale", "weight_scale_inv"))


def fbgemm_fp8(config: Mapping[str, Any]) -> tuple[Quantization, ReadWeight]:
    """Rows, as Meta publishes Llama 3.1 405B."""
    return _format("fbgemm_fp8", _ROW)


def modelopt(config: Mapping[str, Any]) -> tuple[Quantization | None, ReadWeight]:
    """The config of `hf_quant_config.json`, or what newer exports make of it for config.json."""
    stated = config.get("quantization", config)
    if not isinstance(stated, Mapping):
        raise ModelLoadError(f"quantization_config: quantization must be an object, got {describe(stated)}")
    algorithm: Any = stated.get("quant_algo")
    algorithm = algorithm.upper() if isinstance(algorithm, str) else algorithm  # some exports write `fp8_pb_wo`
    has_cache = bool(stated.get("kv_cache_quant_algo") or stated.get("kv_cache_scheme"))
    if algorithm is None and has_cache:
        return None, lambda layer: None
    check_is({"quant_method": "modelopt"}, "quant_algo", algorithm, *_MODELOPT_BLOCKS)
    return _format("modelopt fp8", _MODELOPT_BLOCKS[algorithm], of_activations=algorithm != "FP8_PB_WO" or has_cache)


def _format(
    name: str, block: tuple[int, int], scale_parts: Sequence[str] = ("weight_scale",), *, of_activations: bool = True
) -> tuple[Quantization, ReadWeight]:
    """Layers with codes and scales, which have one of these names."""
    titles = {_TENSOR: "one scale per tensor", _ROW: "per channel"}
    scaled = titles.get(block, f"blocks of {block[0]} x {block[1]}")

    def read_weight(layer: Layer) -> StoredTensor | None:
        if "weight" not in layer.parts or layer.parts["weight"].dtype != "float8_e4m3fn":
            return None
        codes = matrix_of(layer, "weight", "float8_e4m3fn")
        part = next((each for each in scale_parts if each in layer.parts), scale_parts[-1])
        scales = layer.take(part, *NUMBER_DTYPES)
        each = block[0] or codes.shape[0], block[1] or codes.shape[1]
        return QuantisedTensor(codes.shape, "float32", codes, scale_grid(layer, part, scales, codes.shape, each), each)

    return Quantization(f"{name} (e4m3, {scaled})", of_activations=of_activations), read_weight
