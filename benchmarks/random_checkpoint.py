"""A checkpoint that is not on disk: the exact shape of a known model with random weights, for benchmarks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import TokenizerError
from prefixwise.models.checkpoint import Checkpoint, StoredTensor, TokenizerFiles
from prefixwise.models.config import ModelConfig, RopeConfig, parameter_shapes

QWEN3_06B = ModelConfig(
    family="qwen3",
    vocab_size=151_936,
    model_size=1024,
    mlp_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    norm_eps=1e-6,
    rope=RopeConfig(1e6),
    qkv_bias=False,
    qk_norm=True,
    tied_head=True,
    max_context_len=40_960,
)


@dataclass(frozen=True)
class RandomTensor(StoredTensor):
    """Normal numbers: 0.02 wide for matrices, around 1 for norms."""

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        drawn = np.random.default_rng(start).standard_normal((stop - start, *self.shape[1:]), dtype=np.float32)
        return drawn * 0.02 if len(self.shape) > 1 else 1 + 0.1 * drawn


@dataclass(frozen=True)
class RepeatedTensor(StoredTensor):
    """The same normal numbers, 0.02 wide, again and again in bfloat16: as quick to read as a file."""

    def read_rows(self, start: int, stop: int) -> NDArray[np.uint16]:
        shape = (stop - start, *self.shape[1:])
        return np.resize(_some_bfloat16(), prod(shape)).reshape(shape)


@cache
def _some_bfloat16() -> NDArray[np.uint16]:
    drawn = np.random.default_rng(0).standard_normal(1_000_003, dtype=np.float32)  # a prime: no two rows are the same
    return ((0.02 * drawn).view(np.uint32) >> 16).astype(np.uint16)


def random_checkpoint(config: ModelConfig = QWEN3_06B) -> Checkpoint:
    """The model, ready for a backend."""
    tensors = {name: RandomTensor(shape, "float32") for name, shape in parameter_shapes(config).items()}
    return Checkpoint("random", Path(), config, tensors, _no_tokenizer)


def repeated_checkpoint(config: ModelConfig) -> Checkpoint:
    """A model of billions of weights, which would take minutes to draw."""
    tensors: dict[str, StoredTensor] = {
        name: RepeatedTensor(shape, "bfloat16") if len(shape) > 1 else RandomTensor(shape, "float32")
        for name, shape in parameter_shapes(config).items()
    }
    return Checkpoint("random", Path(), config, tensors, _no_tokenizer)


def write_lora(folder: Path, config: ModelConfig, rank: int) -> None:
    """A random adapter of all linear layers, as `peft` saves one."""
    from safetensors.numpy import save_file

    d, f, heads, kv = (
        config.model_size,
        config.mlp_size,
        *(config.head_size * each for each in (config.num_heads, config.num_kv_heads)),
    )
    attention = {"q_proj": (heads, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, heads)}
    mlp = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
    random, tensors = np.random.default_rng(0), {}
    for layer in range(config.num_layers):
        for block, shapes in (("self_attn", attention), ("mlp", mlp)):
            for name, (rows, columns) in shapes.items():
                module = f"base_model.model.model.layers.{layer}.{block}.{name}"
                tensors[f"{module}.lora_A.weight"] = 0.02 * random.standard_normal((rank, columns), np.float32)
                tensors[f"{module}.lora_B.weight"] = 0.02 * random.standard_normal((rows, rank), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*attention, *mlp]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def _no_tokenizer() -> TokenizerFiles:
    raise TokenizerError("random weights have no tokenizer")
