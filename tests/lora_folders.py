"""LoRA adapters as `peft` saves them, written by hand, and models with their adapters merged into the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.reference import Reference

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_BLOCKS = {**dict.fromkeys(ALL[:4], "self_attn"), **dict.fromkeys(ALL[4:], "mlp")}


def write_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ALL,
    head: str | None = None,
    size: float = 0.15,
    **config: Any,
) -> Path:
    """A random adapter of the model in `base`. `head`: the module in `modules_to_save`, `lm_head` or `score`."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if head == "score" else AutoModelForCausalLM
    model = kind.from_pretrained(base, dtype=torch.float32)
    random = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float32]] = {}

    def numbers(*shape: int) -> NDArray[np.float32]:
        return (size * random.standard_normal(shape)).astype(np.float32)

    for layer in range(model.config.num_hidden_layers):
        for target in targets:
            name = f"model.layers.{layer}.{_BLOCKS[target]}.{target}"
            rows, columns = model.get_submodule(name).weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = numbers(rank, columns)
            tensors[f"base_model.model.{name}.lora_B.weight"] = numbers(rows, rank)
    if head is not None:
        tensors[f"base_model.model.{head}.weight"] = numbers(*model.get_submodule(head).weight.shape)
    fields = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if head == "score" else "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "modules_to_save": None if head is None else [head],
        "bias": "none",
        **config,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merged(base: Path, adapter: Path) -> Reference:
    """transformers' model with W + alpha / r * B A in place of W, and the adapter's head."""
    reference = Reference.load(base)
    merge_into(reference.model, adapter)
    return reference


def merge_into(model: Any, adapter: Path) -> None:
    from safetensors.numpy import load_file

    tensors: Mapping[str, NDArray[np.float32]] = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    for name, a in tensors.items():
        module = name.removeprefix("base_model.model.")
        if module.endswith(".lora_A.weight"):
            b = tensors[name.replace("lora_A", "lora_B")]
            delta = scale * (b.astype(np.float64) @ a.astype(np.float64))
            weight = model.get_submodule(module.removesuffix(".lora_A.weight")).weight
            weight.data += torch.from_numpy(delta).float()
        elif not module.endswith(".lora_B.weight"):  # a head, perhaps tied to the embedding
            model.get_submodule(module.removesuffix(".weight")).weight = torch.nn.Parameter(torch.from_numpy(a))
