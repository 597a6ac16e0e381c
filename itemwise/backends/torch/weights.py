"""Weights on the device: allocated once in their final place and dtype, then filled row by row from the checkpoint.

Q, K and V are one matrix, gate and up another. No tensor exists twice, so loading needs the model's size and a few
megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from itemwise.models.checkpoint import Checkpoint, StoredTensor
from itemwise.models.config import ModelConfig

_COPY_BYTES = 8 << 20  # how much is read, and converted where it must be, at a time


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [rows out, columns in]."""

    attention_norm: Tensor  # [D]; norms may be in float32 whatever the rest is in
    qkv: Tensor  # [(N + 2 K) H, D]
    qkv_bias: Tensor | None  # [(N + 2 K) H]
    qk_norm: Tensor | None  # [N + K, H]: the query heads' weights, then the key heads'
    o: Tensor  # [D, N H]
    mlp_norm: Tensor  # [D]
    gate_up: Tensor  # [2 F, D]
    down: Tensor  # [D, F]


@dataclass(frozen=True)
class ModelWeights:
    """The whole model; `head` is `embedding` itself when they are tied."""

    embedding: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [D]
    head: Tensor  # [V, D], or a classifier's few rows, in float32


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Read all weights; nothing of the checkpoint stays in memory."""
    tensors, config = checkpoint.tensors, checkpoint.config

    def load(name: str, *, is_wide: bool = False) -> Tensor:
        return _load_stacked([tensors[name]], torch.float32 if is_wide else dtype, device)

    embedding = load("embedding")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_load_layer(config, tensors, layer, dtype, device) for layer in range(config.num_layers)),
        final_norm=load("final_norm", is_wide=config.float32_norms),
        head=embedding if config.tied_head else load("head", is_wide=config.num_classes > 0),
    )


def _load_layer(
    config: ModelConfig, tensors: Mapping[str, StoredTensor], layer: int, dtype: torch.dtype, device: torch.device
) -> LayerWeights:
    def load(*names: str) -> Tensor:
        return _load_stacked([tensors[f"layers.{layer}.{name}"] for name in names], dtype, device)

    def load_norm(name: str) -> Tensor:
        wide = torch.float32 if config.float32_norms else dtype
        return _load_stacked([tensors[f"layers.{layer}.{name}"]], wide, device)

    return LayerWeights(
        attention_norm=load_norm("attention_norm"),
        qkv=load("q", "k", "v"),
        qkv_bias=load("q_bias", "k_bias", "v_bias") if config.qkv_bias else None,
        qk_norm=_per_head(config, load_norm("q_norm"), load_norm("k_norm")) if config.qk_norm else None,
        o=load("o"),
        mlp_norm=load_norm("mlp_norm"),
        gate_up=load("gate", "up"),
        down=load("down"),
    )


def _per_head(config: ModelConfig, q_norm: Tensor, k_norm: Tensor) -> Tensor:
    return torch.cat([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])


def _load_stacked(parts: list[StoredTensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stored tensors stacked along their rows into one new tensor."""
    num_rows = sum(part.shape[0] for part in parts)
    target = torch.empty((num_rows, *parts[0].shape[1:]), dtype=dtype, device=device)
    first_row = 0
    for part in parts:
        _copy_rows(part, target[first_row : first_row + part.shape[0]])
        first_row += part.shape[0]
    return target


def _copy_rows(source: StoredTensor, target: Tensor) -> None:
    row_bytes = max(1, 4 * target[0].numel())
    step = max(1, _COPY_BYTES // row_bytes)
    for start in range(0, source.shape[0], step):
        stop = min(start + step, source.shape[0])
        rows = np.array(source.read_rows(start, stop))  # a copy of a few megabytes: mapped views are read-only
        tensor = torch.from_numpy(rows)
        target[start:stop] = tensor.view(torch.bfloat16) if source.dtype == "bfloat16" else tensor
