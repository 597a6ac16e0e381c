"""Reading adapters of peft: what is read, and one clear error for each thing that can be wrong with a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.config import ModelConfig
from prefixwise.models.lora import read_lora, read_lora_rank
from prefixwise.models.sources import open_checkpoint
from tests.lora_folders import write_adapter

NAME = "base_model.model.model.layers.1.self_attn.{}_proj.lora_{}.weight"
Tensors = dict[str, NDArray[Any]]


@pytest.fixture
def config(checkpoint_of: Callable[[str], Path]) -> ModelConfig:
    return open_checkpoint(checkpoint_of("qwen3")).config


@pytest.fixture
def folder(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> Path:
    """An adapter of some modules, with ranks and scales of their own."""
    return write_adapter(
        tmp_path / "adapter",
        checkpoint_of("qwen3"),
        targets=("q_proj", "v_proj", "down_proj"),
        rank=2,
        alpha=3,
        alpha_pattern={"v_proj": 5, "layers.0.self_attn.q_proj": 4},
        use_rslora=True,
    )


def test_parts_of_a_matrix_are_one_pair(folder: Path, config: ModelConfig) -> None:
    adapter, tensors = read_lora(folder, config), load_file(folder / "adapter_model.safetensors")
    assert [sorted(pairs) for pairs in adapter.layers] == [["down", "qkv"]] * 2
    assert (adapter.rank, adapter.head, read_lora_rank(folder)) == (2, None, 2)
    pair = adapter.layers[1]["qkv"]
    q_rows, kv_rows = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    assert (pair.a.shape, pair.b.shape) == ((4, config.model_size), (q_rows + 2 * kv_rows, 4))
    parts = {"q": (slice(0, q_rows), slice(0, 2), 3.0), "v": (slice(q_rows + kv_rows, None), slice(2, 4), 5.0)}
    rest = pair.b.copy()
    for part, (rows, ranks, alpha) in parts.items():
        np.testing.assert_array_equal(pair.a[ranks], tensors[NAME.format(part, "A")])
        np.testing.assert_allclose(pair.b[rows, ranks], tensors[NAME.format(part, "B")] * alpha / 2**0.5, rtol=1e-6)
        rest[rows, ranks] = 0
    assert not rest.any()


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, 'peft_type must be LORA, got "IA3"'),
    ({"use_dora": True}, "use_dora is not supported"),
    ({"use_new_thing": True}, "use_new_thing is not supported"),
    ({"lora_bias": True}, "lora_bias is not supported"),
    ({"bias": "all"}, "bias is not supported"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
    ({"target_parameters": ["mlp.experts"]}, "target_parameters is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the model"),
    ({"r": 0}, "r must be a whole number of at least 1, got 0"),
    ({"r": 65}, "r must be at most 64"),
    ({"rank_pattern": {"q_proj": 100}}, "at most 64"),
    ({"rank_pattern": {"q_proj(": 2}}, "not a regular expression"),
    ({"lora_alpha": "much"}, "lora_alpha must be a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
    ({"target_modules": ["q_proj", "lm_head"]}, "target_modules must be of q_proj, .*lm_head"),
    ({"target_modules": None}, "target_modules must be a list"),
    ({"target_modules": ["q_proj", "v_proj"]}, "down_proj has tensors, and target_modules does not name it"),
    ({"target_modules": ["q_proj", "v_proj", "down_proj", "k_proj"]}, "k_proj is named .* its tensors are missing"),
    ({"layers_to_transform": ["all"]}, "layers_to_transform must be a list of layers"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save names a head, and its tensor is missing"),
    ({"modules_to_save": ["embed_tokens"]}, "modules_to_save of a language model must be of lm_head"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=lambda value: next(iter(value)) if value else None)
def test_a_config_that_cannot_be_used(folder: Path, config: ModelConfig, fields: dict[str, Any], message: str) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(ModelLoadError, match=message) as raised:
        read_lora(folder, config)
    assert "adapter_" in str(raised.value), "it names the file"
    assert "\n" not in str(raised.value)


def _reshaped(tensors: Tensors) -> None:
    tensors[NAME.format("q", "A")] = tensors[NAME.format("q", "A")][:, :-1].copy()


def _infinite(tensors: Tensors) -> None:
    tensors[NAME.format("v", "B")][3, 1] = np.inf


TENSORS: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda tensors: tensors.pop(NAME.format("q", "B")), r"lora_B of model\.layers\.1\.self_attn\.q_proj is missing"),
    (_reshaped, r"lora_A of model\.layers\.1\.self_attn\.q_proj must be \[2, 64\] for this model, got \[2, 63\]"),
    (_infinite, r"lora_B of model\.layers\.1\.self_attn\.v_proj has a number that is not finite"),
    (
        lambda tensors: tensors.update({"base_model.model.model.norm.weight": np.zeros(3, np.float32)}),
        "no linear layer",
    ),
    (
        lambda tensors: tensors.update({NAME.replace("1", "2").format("q", "A"): np.zeros((2, 64), np.float32)}),
        "no linear layer",  # the model has two layers
    ),
    (lambda tensors: tensors.update({NAME.format("q", "A"): np.zeros((2, 64), np.int32)}), "must be float32"),
    (
        lambda tensors: tensors.update({"base_model.model.lm_head.weight": np.zeros((3, 64), np.float32)}),
        "the head must",
    ),
]


@pytest.mark.parametrize(("change", "message"), TENSORS, ids=range(len(TENSORS)))
def test_tensors_that_do_not_fit(
    folder: Path, config: ModelConfig, change: Callable[[Tensors], object], message: str
) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=message) as raised:
        read_lora(folder, config)
    assert str(file) in str(raised.value)


def test_folders_that_are_none(folder: Path, config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="a LoRA adapter is a folder with adapter_config"):
        read_lora(tmp_path / "nowhere", config)
    (folder / "adapter_model.bin").touch()
    weights = (folder / "adapter_model.safetensors").rename(folder / "kept")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors is missing .*may run code"):
        read_lora(folder, config)
    (folder / "adapter_model.safetensors").write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ModelLoadError, match="truncated"):
        read_lora(folder, config)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not JSON"):
        read_lora(folder, config)
