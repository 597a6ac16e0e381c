"""Weights on the device: allocated once in their final shape and dtype, then filled row by row from the checkpoint.

Q, K and V are one matrix, gate and up another. No tensor exists twice, so loading needs the model's size and a few
megabytes for each thread. All threads fill the matrices once all are allocated; dequantising keeps them busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefixwise.backends.torch.workers import Workers
from prefixwise.models.checkpoint import Checkpoint, ChosenRows, StoredTensor
from prefixwise.models.config import ModelConfig

_COPY_BYTES = 4 << 20  # that each thread reads, and converts where needed, at a time


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of one layer, one matrix for each of the E experts."""

    router: Tensor  # [E, D] float32
    gate_up: tuple[Tensor, ...]  # [2 F, D]
    down: tuple[Tensor, ...]  # [D, F]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [rows out, columns in]."""

    attention_norm: Tensor | None  # [D]; norms may be float32 whatever the dtype of the rest
    qkv: Tensor  # [(N + 2 K) H, D]
    qkv_bias: Tensor | None  # [(N + 2 K) H]
    qk_norm: Tensor | None  # [N + K, H]: the query heads' weights, then the key heads'
    o: Tensor  # [D, N H]
    mlp_norm: Tensor | None  # [D]
    gate_up: Tensor | None  # [2 F, D]; None: the layer has experts
    down: Tensor | None  # [D, F]
    post_attention_norm: Tensor | None = None  # [D]
    post_mlp_norm: Tensor | None = None  # [D]
    experts: ExpertWeights | None = None


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

    def load_rows(self, names: Sequence[str], start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """The same of some rows of each stored tensor."""
        order = np.arange(start, stop)
        return self._load([ChosenRows.of(self._tensors[name], order) for name in names], dtype)

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
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, workers: Workers | None = None
) -> ModelWeights:
    """Read all weights; nothing of the checkpoint stays in memory. Without workers this thread reads them all."""
    config, loader = checkpoint.config, _Loader(checkpoint.tensors, device)
    norm_dtype = torch.float32 if config.float32_norms else dtype
    embedding = loader.load(["embedding"], dtype)
    head_dtype = torch.float32 if config.num_classes > 0 else dtype
    weights = ModelWeights(
        embedding=embedding,
        layers=tuple(_load_layer(config, loader, layer, dtype) for layer in range(config.num_layers)),
        final_norm=loader.load(["final_norm"], norm_dtype),
        head=embedding if config.tied_head else loader.load(["head"], head_dtype),
    )
    loader.fill_matrices(workers or Workers(None))
    return weights


def _load_layer(config: ModelConfig, loader: _Loader, layer: int, dtype: torch.dtype) -> LayerWeights:
    def load(*names: str) -> Tensor:
        return loader.load([f"layers.{layer}.{name}" for name in names], dtype)

    def load_norm(name: str) -> Tensor:
        return loader.load([f"layers.{layer}.{name}"], torch.float32 if config.float32_norms else dtype)

    return LayerWeights(
        attention_norm=load_norm("attention_norm") if config.pre_norms else None,
        qkv=load("q", "k", "v"),
        qkv_bias=load("q_bias", "k_bias", "v_bias") if config.qkv_bias else None,
        qk_norm=_per_head(config, load_norm("q_norm"), load_norm("k_norm")) if config.qk_norm else None,
        o=load("o"),
        mlp_norm=load_norm("mlp_norm") if config.pre_norms else None,
        gate_up=load("gate", "up") if config.experts is None else None,
        down=load("down") if config.experts is None else None,
        post_attention_norm=load_norm("post_attention_norm") if config.post_norms else None,
        post_mlp_norm=load_norm("post_mlp_norm") if config.post_norms else None,
        experts=None if config.experts is None else _load_experts(config, loader, f"layers.{layer}", dtype),
    )


def _load_experts(config: ModelConfig, loader: _Loader, layer: str, dtype: torch.dtype) -> ExpertWeights:
    assert config.experts is not None
    numbers, f, d = range(config.experts.num_experts), config.mlp_size, config.model_size
    gate_up = [f"{layer}.gate", f"{layer}.up"]
    return ExpertWeights(
        router=loader.load([f"{layer}.router"], torch.float32),
        gate_up=tuple(loader.load_rows(gate_up, number * f, (number + 1) * f, dtype) for number in numbers),
        down=tuple(loader.load_rows([f"{layer}.down"], number * d, (number + 1) * d, dtype) for number in numbers),
    )


def _per_head(config: ModelConfig, q_norm: Tensor, k_norm: Tensor) -> Tensor:
    if config.whole_qk_norm:
        return torch.cat([q_norm, k_norm]).view(-1, config.head_size)
    return torch.cat([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])


def _cut(parts: Sequence[StoredTensor], target: Tensor) -> Iterator[_Piece]:
    step = max(1, _COPY_BYTES // max(1, 4 * target[0].numel()))
    first_row = 0
    for part in parts:
        for start in range(0, part.shape[0], step):
            stop = min(start + step, part.shape[0])
            yield _Piece(part, start, stop, target[first_row + start : first_row + stop])
        first_row += part.shape[0]


def _copy(piece: _Piece) -> None:
    rows = piece.source.read_rows(piece.start, piece.stop)
    is_bfloat16 = piece.source.dtype == "bfloat16"
    if is_bfloat16 and piece.target.dtype == torch.bfloat16 and piece.target.device.type == "cpu":
        np.copyto(piece.target.view(torch.uint16).numpy(), rows)  # bits, copied from the mapped file
        return
    tensor = torch.from_numpy(rows if rows.flags.writeable else np.array(rows))  # mapped views are read-only
    piece.target.copy_(tensor.view(torch.bfloat16) if is_bfloat16 else tensor)
