"""Quantised checkpoints in Hugging Face's layout: from `quantization_config` and the tensors of a format to weights.

    fp8                   weight (float8) and weight_scale_inv, of blocks of 128 x 128 (Qwen), or of the whole tensor
    fbgemm_fp8, modelopt  weight (float8) and weight_scale, of rows, blocks of 128 x 128 or the whole tensor
    compressed-tensors    weight (float8 or int8) and weight_scale; or weight_packed (4 or 8 bits) and weight_scale
    awq                   qweight, qzeros and scales, transposed; four bits in the order of AutoAWQ's GEMM kernels
    gptq                  qweight, qzeros and scales, transposed; four or eight bits, g_idx where columns were sorted

Only weights are read in their format. What a format says of activations is not used: they are computed in the model's
dtype. Whether a layer is quantised is seen from its tensors, so the lists of modules that were left out are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.checkpoint import Quantization, StoredTensor
from prefixwise.models.quantization.awq_gptq import awq, gptq
from prefixwise.models.quantization.compressed_tensors import compressed_tensors
from prefixwise.models.quantization.fp8 import fbgemm_fp8, fp8, modelopt
from prefixwise.models.quantization.layers import Layer, ReadWeight

# Scales of activations and of the KV cache, in layers of any method.
_OF_ACTIVATIONS = {"activation_scale", "kv_scale", "prob_output_scale"} | {
    f"{what}_{part}" for what in ("input", "output", "q", "k", "v") for part in ("scale", "zero_point")
}
# Of a layer that has no `weight`: of GPTQ and AWQ, compressed-tensors, ExLlama, HQQ and Quanto.
_IN_PLACE_OF_WEIGHT = ("qweight", "weight_packed", "q_weight", "trellis", "W_q", "_data")
# GPTQModel's keys that change every weight, as no tensor shows: a Hadamard transform of the inputs of `down_proj`; and
# FP8 codes that are divided by their scales.
_UNSUPPORTED_KEYS = ("rotation", "weight_scale_semantics")


@dataclass(frozen=True)
class QuantizationScheme:
    """What a `quantization_config` says."""

    quantization: Quantization | None  # None: no weights are quantised, only activations or the KV cache
    read_weight: ReadWeight


def read_quantization(raw: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> QuantizationScheme | None:
    """What config.json `raw` says of quantised weights, else a file `beside` it; None where neither says anything.

    Raises ModelLoadError for a method or a format that cannot be read. No weight file is needed for that: those of
    other methods may be of other kinds, and have other dtypes.
    """
    config = raw.get("quantization_config", raw.get("compression_config"))
    config = beside if config is None else config
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
    """The first models of bitsandbytes name none; those of MLX have a copy under `quantization`; ModelOpt's own file
    names the tool that has written it."""
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        return "bitsandbytes"
    producer = config.get("producer")
    if isinstance(producer, Mapping) and "quant_method" not in config:
        return producer.get("name")
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


def _layers(stored: Mapping[str, StoredTensor]) -> Iterator[Layer]:
    by_name: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        layer, _, part = name.rpartition(".")
        by_name.setdefault(layer, {})[part] = tensor
    return (Layer(name, parts) for name, parts in by_name.items())


_METHODS: dict[str, Callable[[Mapping[str, Any]], tuple[Quantization | None, ReadWeight]]] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
}
