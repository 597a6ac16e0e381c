"""Quantised copies of small checkpoints, in the formats of their own tools, for tests to load.

compressed-tensors writes its own. AWQ's and GPTQ's are packed number by number, as AutoAWQ's and AutoGPTQ's `pack` do
it, from codes that the tests know.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Quantise = Callable[[str, Tensor], dict[str, Tensor]]  # a layer's name and weight, to its tensors
FLOAT8_MAX = 448.0


def quantised_copy(source: Path, folder: Path, config: dict[str, Any], quantise: Quantise) -> Path:
    """Write the model of a folder with the weights of its linear layers quantised."""
    folder.mkdir(parents=True)
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        parts = quantise(layer, tensor) if name.endswith("_proj.weight") else None
        tensors |= {name: tensor} if parts is None else {f"{layer}.{part}": each for part, each in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_fp8(source: Path, folder: Path, block: tuple[int, int] | None = (128, 128), **config: Any) -> Path:
    """Blocks with one scale each, as Qwen publishes; or one scale for a tensor, with one for its inputs."""
    size = None if block is None else list(block)
    stated = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size} | config

    def quantise(layer: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scales = float8_blocks(weight, block or (weight.shape[0], weight.shape[1]))
        if block is None:
            return {"weight": codes, "weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.5)}
        return {"weight": codes, "weight_scale_inv": scales}

    return quantised_copy(source, folder, stated, quantise)


def make_scaled_fp8(source: Path, folder: Path, config: dict[str, Any], kind: str) -> Path:
    """Codes and `weight_scale`, as fbgemm ("row of 1") and ModelOpt ("tensor", "row", "block") export them."""

    def quantise(layer: str, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        block = {"tensor": (rows, columns), "block": (128, 128)}.get(kind, (1, columns))
        codes, scales = float8_blocks(weight, block)
        shape = {"tensor": (), "row": (rows,), "block": (scales.shape[0], 1, scales.shape[1], 1)}.get(kind, (rows, 1))
        return {"weight": codes, "weight_scale": scales.reshape(shape), "input_scale": torch.tensor(0.5)}

    return quantised_copy(source, folder, config, quantise)


def float8_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes, and the scale of each block, whose largest number becomes float8's largest."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    codes, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            place = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[place].abs().max() / FLOAT8_MAX
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def compressed_scheme(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Any:
    """A scheme of compressed-tensors for all linear layers."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
        format=form,
    )


def make_compressed(source: Path, folder: Path, scheme: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Compressed by compressed-tensors; scales are of the dtype, as those of a model in it are."""
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    config = {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }

    def quantise(layer: str, weight: Tensor) -> dict[str, Tensor]:
        scales, zeros = compressed_scales(weight, scheme.weights)
        parts = {"weight": weight.to(dtype), "weight_scale": scales.to(dtype)}
        if not scheme.weights.symmetric:
            parts["weight_zero_point"] = zeros
        compressed: dict[str, Tensor] = compressor.compress(parts, scheme)
        if scheme.input_activations is not None and not scheme.input_activations.dynamic:
            compressed["input_scale"] = torch.tensor([0.5])
        return compressed

    return quantised_copy(source, folder, config, quantise)


def compressed_scales(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    from compressed_tensors.quantization.utils import calculate_qparams

    rows, columns = weight.shape
    if args.strategy == "block":
        height, width = args.block_structure
        parts = weight.reshape(rows // height, height, columns // width, width)
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    else:
        width = args.group_size if args.strategy == "group" else columns
        parts = weight.reshape(rows, columns // width, width)
        low, high = parts.amin(-1), parts.amax(-1)
        if args.strategy == "tensor":
            low, high = low.min().reshape(1), high.max().reshape(1)
    scales, zeros = calculate_qparams(low, high, args)
    return scales, zeros


def grouped_codes(
    weight: Tensor, group_of_column: Tensor, num_bits: int, *, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], zero points and float16 scales [out, groups], as AWQ and GPTQ make them."""
    num_groups, top = int(group_of_column.max()) + 1, 2**num_bits - 1
    groups = [weight[:, group_of_column == group] for group in range(num_groups)]
    low = torch.stack([each.amin(1).clamp(max=0) for each in groups], 1)
    high = torch.stack([each.amax(1).clamp(min=0) for each in groups], 1)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).half()
    zeros = torch.full_like(low, top // 2 + 1).int() if symmetric else (-low / scales).round().clamp(0, top).int()
    codes = (weight / scales[:, group_of_column] + zeros[:, group_of_column]).round().clamp(0, top).int()
    return codes, zeros, scales


def packed(codes: Tensor, num_bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, codes] to [n, words]; place i of a word holds its code number order[i]."""
    per_word = 32 // num_bits
    words = torch.zeros(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place in range(per_word):
            code = codes[:, word * per_word + (order[place] if order else place)]
            words[:, word] |= code.long() << (num_bits * place)
    return words.to(torch.int32)  # keeps the bits


def make_awq(source: Path, folder: Path, group_size: int = 32, **config: Any) -> tuple[Path, dict[str, Tensor]]:
    """AutoAWQ's GEMM version. Returns the weights, too."""
    stated = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    weights: dict[str, Tensor] = {}

    def quantise(layer: str, weight: Tensor) -> dict[str, Tensor]:
        group = torch.arange(weight.shape[1]) // group_size
        codes, zeros, scales = grouped_codes(weight, group, 4)
        weights[layer] = (codes - zeros[:, group]) * scales[:, group].float()
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": packed(codes.T, 4, order),
            "qzeros": packed(zeros.T, 4, order),
            "scales": scales.T.contiguous(),
        }

    return quantised_copy(source, folder, stated | config, quantise), weights


def make_gptq(
    source: Path, folder: Path, num_bits: int = 4, group_size: int = 32, *, desc_act: bool = False, **config: Any
) -> tuple[Path, dict[str, Tensor]]:
    """The first format, or with `checkpoint_format="gptq_v2"` the second, as GPTQModel saves them: of the first, it
    subtracts one from each zero point of a word at once. Returns the weights, too."""
    stated = {"quant_method": "gptq", "bits": num_bits, "group_size": group_size, "desc_act": desc_act, "sym": False}
    weights: dict[str, Tensor] = {}
    is_v2 = "gptq_v2" in (config.get("checkpoint_format"), config.get("format"))
    less = 0 if is_v2 else {4: 0x11111111, 8: 0x01010101}[num_bits]

    def quantise(layer: str, weight: Tensor) -> dict[str, Tensor]:
        columns = weight.shape[1]
        order = (
            torch.randperm(columns, generator=torch.Generator().manual_seed(0)) if desc_act else torch.arange(columns)
        )
        group = order // (columns if group_size == -1 else group_size)
        codes, zeros, scales = grouped_codes(weight, group, num_bits, symmetric=config.get("sym", False))
        weights[layer] = (codes - zeros[:, group]) * scales[:, group].float()
        parts = {
            "qweight": packed(codes, num_bits).T.contiguous(),
            "qzeros": packed(zeros.T, num_bits) - less,
            "scales": scales.T.contiguous(),
            "g_idx": group.int(),
        }
        if layer.endswith(("o_proj", "qkv_proj")):  # as older files have them
            parts["bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
        return parts

    return quantised_copy(source, folder, stated | config, quantise), weights
