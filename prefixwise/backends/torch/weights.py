"""Weights on the device: allocated once in their final shape and dtype, then filled row by row from the checkpoint.

Q, K and V are one matrix, gate and up another. No tensor exists twice, so loading needs the model's size and a few
megabytes for each thread. All threads fill the matrices once all are allocated; dequantising keeps them busy.

In FP8 the matrices of the layers are codes with a scale per row, made on the device while they are filled. Codes that a
checkpoint stores with one scale per row, or per tensor, are taken as they are. Scales of V, O, up and down have powers
of two in them (`forward/fp8.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixwise.backends.torch.fp8 import FP8, quantise_rows
from prefixwise.backends.torch.workers import Workers
from prefixwise.forward.fp8 import up_factor, value_factor
from prefixwise.models.checkpoint import Checkpoint, ChosenRows, StoredTensor
from prefixwise.models.config import ModelConfig
from prefixwise.models.quantization.tensors import QuantisedTensor

_COPY_BYTES = 4 << 20  # that each thread reads, and converts where needed, at a time


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of one layer: a matrix for each of the E experts, on a GPU in one tensor."""

    router: Tensor  # [E, D] float32
    gate_up: tuple[Tensor, ...] | Tensor  # [2 F, D] or [E, 2 F, D]
    down: tuple[Tensor, ...] | Tensor  # [D, F] or [E, D, F]


@dataclass(frozen=True)
class Fp8Scales:
    """Of the rows out of a layer's matrices in FP8, float32: a weight is its code times the scale of its row. Where
    static scales are folded into them (`forward/fp8.py`), V and up are that times a power of two, O and down divided by
    it."""

    qkv: Tensor  # [(N + 2 K) H]
    o: Tensor  # [D]
    gate_up: Tensor  # [2 F]
    down: Tensor  # [D]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [rows out, columns in]."""

    attention_norm: Tensor | None  # [D]; norms may be float32 whatever the dtype of the rest
    qkv: Tensor  # [(N + 2 K) H, D]
    qkv_bias: Tensor | None  # [(N + 2 K) H]; in FP8 V's is scaled as V is
    qk_norm: Tensor | None  # [N + K, H]: the query heads' weights, then the key heads'
    o: Tensor  # [D, N H]
    mlp_norm: Tensor | None  # [D]
    gate_up: Tensor | None  # [2 F, D]; None: the layer has experts
    down: Tensor | None  # [D, F]
    post_attention_norm: Tensor | None = None  # [D]
    post_mlp_norm: Tensor | None = None  # [D]
    experts: ExpertWeights | None = None
    fp8_scales: Fp8Scales | None = None  # None: the matrices are no codes


@dataclass(frozen=True)
class ModelWeights:
    """The whole model; `head` is `embedding` itself when they are tied."""

    embedding: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [D]
    head: Tensor  # [V, D], or a classifier's few rows, in float32


@dataclass(frozen=True)
class _Piece:
    """Rows of a stored tensor, and the rows of the weights that they become."""

    source: StoredTensor
    start: int
    stop: int
    target: Tensor
    scales: Tensor | None = None  # of FP8 codes, for these rows


class Float32Layers:
    """One layer at a time in float32, in buffers that are reused: for weights in a dtype that the CPU emulates. Experts
    stay as they are: a forward may need few of them."""

    def __init__(self, layers: Sequence[LayerWeights], workers: Workers) -> None:
        self._layers = layers
        self._workers = workers
        self._buffers = {
            name: torch.empty(tensor.shape, dtype=torch.float32) for name, tensor in _tensors_of(layers[0]).items()
        }
        self._held: int | None = None  # the layer that the buffers hold

    def read(self, number: int) -> LayerWeights:
        """Valid until another layer is read."""
        layer = self._layers[number]
        if self._held != number:
            self._held = None
            sources = _tensors_of(layer)
            pairs = [
                pair
                for name, buffer in self._buffers.items()
                for pair in zip(
                    *(each.chunk(self._workers.num_threads) for each in (buffer, sources[name])), strict=True
                )
            ]
            self._workers.run(lambda pair: pair[0].copy_(pair[1]), pairs)
            self._held = number
        buffers: dict[str, Any] = dict(self._buffers)
        return replace(layer, **buffers)


def _tensors_of(layer: LayerWeights) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in vars(layer).items() if isinstance(tensor, Tensor)}


class _Loader:
    """Allocates tensors. Vectors are filled at once, matrices by `fill_matrices`."""

    def __init__(self, tensors: Mapping[str, StoredTensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._of_matrices: list[_Piece] = []

    def load(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Stored tensors stacked along their rows into one new tensor."""
        return self._load([self._tensors[name] for name in names], dtype)

    def load_fp8(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Stored matrices stacked along their rows as FP8 codes, and the scales of the rows."""
        parts = [self._tensors[name] for name in names]
        num_rows = sum(part.shape[0] for part in parts)
        codes = torch.empty((num_rows, parts[0].shape[1]), dtype=FP8, device=self._device)
        scales = torch.empty(num_rows, dtype=torch.float32, device=self._device)
        self._of_matrices += _cut(parts, codes, scales)
        return codes, scales

    def load_experts(self, names: Sequence[str], num_experts: int, dtype: torch.dtype) -> tuple[Tensor, ...] | Tensor:
        """The same for each expert: each stored tensor has the rows of all of them. On a GPU they are in one tensor."""
        stored = [self._tensors[name] for name in names]
        num_rows = stored[0].shape[0] // num_experts
        orders = [np.arange(number * num_rows, (number + 1) * num_rows) for number in range(num_experts)]
        parts = [[ChosenRows.of(tensor, order) for tensor in stored] for order in orders]
        if self._device.type != "cuda":
            return tuple(self._load(each, dtype) for each in parts)
        shape = num_experts, len(names) * num_rows, stored[0].shape[1]
        target = torch.empty(shape, dtype=dtype, device=self._device)
        for each, matrix in zip(parts, target, strict=True):
            self._of_matrices += _cut(each, matrix)
        return target

    def _load(self, parts: Sequence[StoredTensor], dtype: torch.dtype) -> Tensor:
        num_rows = sum(part.shape[0] for part in parts)
        target = torch.empty((num_rows, *parts[0].shape[1:]), dtype=dtype, device=self._device)
        pieces = list(_cut(parts, target))
        if target.dim() > 1:
            self._of_matrices += pieces
        else:
            for piece in pieces:
                _copy(piece)
        return target

    def fill_matrices(self, workers: Workers) -> None:
        pieces, self._of_matrices = self._of_matrices, []
        workers.run(_copy, pieces)


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    workers: Workers | None = None,
    *,
    is_fp8: bool = False,
) -> ModelWeights:
    """Read all weights; nothing of the checkpoint stays in memory. Without workers this thread reads them all.

    `is_fp8`: the matrices of the layers in FP8, the rest in `dtype`.
    """
    config, loader = checkpoint.config, _Loader(checkpoint.tensors, device)
    norm_dtype = torch.float32 if config.float32_norms else dtype
    embedding = loader.load(["embedding"], dtype)
    head_dtype = torch.float32 if config.num_classes > 0 else dtype
    weights = ModelWeights(
        embedding=embedding,
        layers=tuple(_load_layer(config, loader, layer, dtype, is_fp8=is_fp8) for layer in range(config.num_layers)),
        final_norm=loader.load(["final_norm"], norm_dtype),
        head=embedding if config.tied_head else loader.load(["head"], head_dtype),
    )
    loader.fill_matrices(workers or Workers(None))
    for layer in weights.layers:
        _fold_static_scales(config, layer)
    return weights


def _load_layer(config: ModelConfig, loader: _Loader, layer: int, dtype: torch.dtype, *, is_fp8: bool) -> LayerWeights:
    def load(*names: str) -> Tensor:
        return loader.load([f"layers.{layer}.{name}" for name in names], dtype)

    def load_norm(name: str) -> Tensor:
        return loader.load([f"layers.{layer}.{name}"], torch.float32 if config.float32_norms else dtype)

    scales: dict[str, Tensor] = {}

    def load_matrix(matrix: str, *names: str) -> Tensor:
        if not is_fp8:
            return load(*names)
        codes, scales[matrix] = loader.load_fp8([f"layers.{layer}.{name}" for name in names])
        return codes

    weights = LayerWeights(
        attention_norm=load_norm("attention_norm") if config.pre_norms else None,
        qkv=load_matrix("qkv", "q", "k", "v"),
        qkv_bias=load("q_bias", "k_bias", "v_bias") if config.qkv_bias else None,
        qk_norm=_per_head(config, load_norm("q_norm"), load_norm("k_norm")) if config.qk_norm else None,
        o=load_matrix("o", "o"),
        mlp_norm=load_norm("mlp_norm") if config.pre_norms else None,
        gate_up=load_matrix("gate_up", "gate", "up") if config.experts is None else None,
        down=load_matrix("down", "down") if config.experts is None else None,
        post_attention_norm=load_norm("post_attention_norm") if config.post_norms else None,
        post_mlp_norm=load_norm("post_mlp_norm") if config.post_norms else None,
        experts=None if config.experts is None else _load_experts(config, loader, f"layers.{layer}", dtype),
    )
    return replace(weights, fp8_scales=Fp8Scales(**scales)) if is_fp8 else weights


def _fold_static_scales(config: ModelConfig, layer: LayerWeights) -> None:
    """Fold that of attention's output in FP8 into V and O, and that of the MLP's activations into up and down."""
    if layer.fp8_scales is None or layer.attention_norm is None or layer.mlp_norm is None:
        return
    _fold_output_scale(config, layer, layer.fp8_scales, layer.attention_norm)
    assert layer.gate_up is not None
    gate, up = _row_norms(layer.gate_up, layer.fp8_scales.gate_up, layer.mlp_norm).view(2, -1).square().mean(1).sqrt()
    factor = up_factor(float(gate), float(up))
    layer.fp8_scales.gate_up[config.mlp_size :] *= factor
    layer.fp8_scales.down.div_(factor)


def _row_norms(codes: Tensor, scales: Tensor, norm: Tensor) -> Tensor:
    """Of a matrix behind the weights of a norm."""
    step = max(1, _COPY_BYTES // (4 * codes.shape[1]))
    weights = norm.float()
    return torch.cat([(some.float() * weights).norm(dim=1) for some in torch.split(codes, step)]) * scales


def _fold_output_scale(config: ModelConfig, layer: LayerWeights, fp8_scales: Fp8Scales, norm: Tensor) -> None:
    rows = slice((config.num_heads + config.num_kv_heads) * config.head_size, None)
    scales = fp8_scales.qkv[rows]
    bounds = sqrt(config.model_size) * _row_norms(layer.qkv[rows], scales, norm)
    if layer.qkv_bias is not None:
        bounds += layer.qkv_bias[rows].abs()
    factor = value_factor(float(bounds.max()))
    scales *= factor
    fp8_scales.o.div_(factor)
    if layer.qkv_bias is not None:
        layer.qkv_bias[rows] *= factor


def _load_experts(config: ModelConfig, loader: _Loader, layer: str, dtype: torch.dtype) -> ExpertWeights:
    assert config.experts is not None
    number = config.experts.num_experts
    return ExpertWeights(
        router=loader.load([f"{layer}.router"], torch.float32),
        gate_up=loader.load_experts([f"{layer}.gate", f"{layer}.up"], number, dtype),
        down=loader.load_experts([f"{layer}.down"], number, dtype),
    )


def _per_head(config: ModelConfig, q_norm: Tensor, k_norm: Tensor) -> Tensor:
    if config.whole_qk_norm:
        return torch.cat([q_norm, k_norm]).view(-1, config.head_size)
    return torch.cat([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])


def _cut(parts: Sequence[StoredTensor], target: Tensor, scales: Tensor | None = None) -> Iterator[_Piece]:
    step = max(1, _COPY_BYTES // max(1, 4 * target[0].numel()))
    first_row = 0
    for part in parts:
        for start in range(0, part.shape[0], step):
            stop = min(start + step, part.shape[0])
            rows = slice(first_row + start, first_row + stop)
            yield _Piece(part, start, stop, target[rows], None if scales is None else scales[rows])
        first_row += part.shape[0]


def _copy(piece: _Piece) -> None:
    if piece.scales is not None:
        _quantise(piece, piece.scales)
        return
    rows = piece.source.read_rows(piece.start, piece.stop)
    is_bfloat16 = piece.source.dtype == "bfloat16"
    if is_bfloat16 and piece.target.dtype == torch.bfloat16 and piece.target.device.type == "cpu":
        np.copyto(piece.target.view(torch.uint16).numpy(), rows)  # bits, copied from the mapped file
        return
    tensor = _tensor(rows)
    piece.target.copy_(tensor.view(torch.bfloat16) if is_bfloat16 else tensor)


def _quantise(piece: _Piece, scales: Tensor) -> None:
    """Rows to FP8 codes and scales, on the device."""
    source, device = piece.source, piece.target.device
    if isinstance(source, QuantisedTensor) and source.is_fp8_by_rows:
        codes, row_scales = source.read_codes(piece.start, piece.stop)
        piece.target.view(torch.uint8).copy_(_tensor(codes))
        scales.copy_(_tensor(row_scales))
        return
    rows = _tensor(source.read_rows(piece.start, piece.stop)).to(device)
    made, made_scales = quantise_rows(rows.view(torch.bfloat16) if source.dtype == "bfloat16" else rows)
    piece.target.copy_(made)
    scales.copy_(made_scales)


def _tensor(rows: NDArray[Any]) -> Tensor:
    return torch.from_numpy(rows if rows.flags.writeable else np.array(rows))  # mapped views are read-only
