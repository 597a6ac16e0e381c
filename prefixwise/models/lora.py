"""A LoRA adapter in a folder of Hugging Face's `peft`: adapter_config.json and adapter_model.safetensors.

An adapter adds B (A x) * scale to the output W x of linear layers. Reading checks everything that can be wrong with a
folder before an engine sees it: the config, names, shapes and numbers of all tensors. What an engine gets is one pair
of matrices for each matrix of its layers, where Q, K and V are one matrix, and gate and up another.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.checkpoint import NUMBER_DTYPES, StoredTensor, as_float32, naming_file, rotary_order
from prefixwise.models.config import ModelConfig
from prefixwise.models.families import FAMILIES
from prefixwise.models.safetensors import open_safetensors

Matrix = Literal["qkv", "o", "gate_up", "down"]
Array = NDArray[np.float32]

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 64
MATRICES: tuple[Matrix, ...] = ("qkv", "o", "gate_up", "down")
_PARTS: Mapping[Matrix, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
# The modules of a layer that an adapter may change, by their names in transformers.
_OTHERS: Mapping[str, tuple[Matrix, tuple[str, ...]]] = {
    "self_attn.o_proj": ("o", ("o",)),
    "mlp.down_proj": ("down", ("down",)),
}
_SEPARATE: Mapping[str, tuple[Matrix, tuple[str, ...]]] = {
    "self_attn.q_proj": ("qkv", ("q",)),
    "self_attn.k_proj": ("qkv", ("k",)),
    "self_attn.v_proj": ("qkv", ("v",)),
    "mlp.gate_proj": ("gate_up", ("gate",)),
    "mlp.up_proj": ("gate_up", ("up",)),
    **_OTHERS,
}
_FUSED: Mapping[str, tuple[Matrix, tuple[str, ...]]] = {  # of Phi-3
    "self_attn.qkv_proj": ("qkv", ("q", "k", "v")),
    "mlp.gate_up_proj": ("gate_up", ("gate", "up")),
    **_OTHERS,
}
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d{1,5})\.([a-z_]+\.[a-z_]+)\.lora_([AB])\.weight")
_HEAD = re.compile(r"base_model\.model\.(lm_head|score|classifier)(?:\.modules_to_save)?\.weight")
# What peft can do and we cannot, by the field of the config that asks for it, and the values that do not.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "megatron_config": (None,),
}
# Initialisations after which an adapter belongs to a base model with other weights.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MAX_PATTERN = 1000  # characters of a regular expression


@dataclass(frozen=True, eq=False)
class LoraPair:
    """What an adapter adds to a linear layer: B (A x). The scale is in B."""

    a: Array  # [R, columns in]
    b: Array  # [rows out, R]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter that fits the model, in memory, in float32."""

    path: str
    rank: int  # the largest of its modules
    layers: tuple[Mapping[Matrix, LoraPair], ...]  # a matrix that it does not change is absent
    head: Array | None  # [V, D] or [classes, D] in place of the model's head; None: the model's own


@dataclass(frozen=True)
class _Settings:
    """The fields of adapter_config.json that decide what is computed."""

    rank: int
    alpha: float
    uses_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key that matches the end of the module's name, as peft finds it."""
    found = next((key for key in pattern if re.match(rf"(.*\.)?({key})$", module)), None)
    return default if found is None else pattern[found]


def read_lora(path: str | Path, config: ModelConfig, max_rank: int = MAX_RANK) -> LoraAdapter:
    """Read and check an adapter for the model of this config. Raises ModelLoadError, which names the wrong file."""
    if config.experts is not None:
        raise ModelLoadError("LoRA adapters are not supported for models with experts (MoE)")
    folder = _checked_folder(path)
    with naming_file(folder / CONFIG_FILE):
        raw = _read_config(folder / CONFIG_FILE)
        settings = _settings(raw, max_rank)
        targets = _targets(raw, config)
        _check_saved_modules(raw, config)
    with naming_file(folder / WEIGHTS_FILE):
        modules, head = _sort_tensors(open_safetensors(folder / WEIGHTS_FILE), config)
        _check_complete(set(modules), targets)
        if raw.get("modules_to_save") and head is None:
            raise ModelLoadError("modules_to_save names a head, and its tensor is missing")
        layers = tuple(_layer(number, modules, settings, config) for number in range(config.num_layers))
        rank = max((settings.rank_of(_full_name(*each)) for each in modules), default=1)
        return LoraAdapter(str(path), rank, layers, None if head is None else _head(head, config))


def read_lora_rank(path: str | Path) -> int:
    """The largest rank of an adapter, from its config alone. Raises ModelLoadError."""
    file = _checked_folder(path) / CONFIG_FILE
    with naming_file(file):
        settings = _settings(_read_config(file), MAX_RANK)
        return max([settings.rank, *settings.rank_pattern.values()])


def _checked_folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ModelLoadError(f"a LoRA adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, got {str(folder)!r}")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            other = (
                " (adapter_model.bin is not read: it may run code)" if (folder / "adapter_model.bin").exists() else ""
            )
            raise ModelLoadError(f"{folder} is no LoRA adapter: {name} is missing{other}")
    return folder


def _modules(config: ModelConfig) -> Mapping[str, tuple[Matrix, tuple[str, ...]]]:
    """The modules of the model's layers, each with its matrix and the parts of it."""
    return _FUSED if FAMILIES[config.family].fuses_projections else _SEPARATE


# The config


def _read_config(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{file} must be a JSON object, got {describe(raw)}")
    if raw.get("peft_type") != "LORA":
        raise ModelLoadError(f"peft_type must be LORA, got {describe(raw.get('peft_type'))}")
    for name, allowed in _REFUSED.items():
        if raw.get(name) not in allowed:
            raise ModelLoadError(
                f"{name} is not supported: expected {describe(allowed[-1])}, got {describe(raw[name])}"
            )
    others = [name for name, value in raw.items() if name.startswith("use_") and value and name != "use_rslora"]
    if others:
        raise ModelLoadError(f"{others[0]} is not supported: expected false, got {describe(raw[others[0]])}")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):
        raise ModelLoadError(
            f"init_lora_weights {start!r} is not supported: it changes the weights of the model, too; convert the "
            "adapter with peft's `path_initial_model_for_weight_conversion`"
        )
    return raw


def _settings(raw: Mapping[str, Any], max_rank: int) -> _Settings:
    ranks, alphas = _pattern(raw, "rank_pattern"), _pattern(raw, "alpha_pattern")
    for name, rank in (("r", raw.get("r")), *((f"rank_pattern[{key!r}]", value) for key, value in ranks.items())):
        if type(rank) is not int or rank < 1:
            raise ModelLoadError(f"{name} must be a whole number of at least 1, got {describe(rank)}")
        if rank > max_rank:
            raise ModelLoadError(f"{name} must be at most {max_rank} here (max_lora_rank), got {rank}")
    named = (("lora_alpha", raw.get("lora_alpha")), *((f"alpha_pattern[{key!r}]", alphas[key]) for key in alphas))
    for name, alpha in named:
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise ModelLoadError(f"{name} must be a number, got {describe(alpha)}")
    return _Settings(raw["r"], raw["lora_alpha"], bool(raw.get("use_rslora")), ranks, alphas)


def _pattern(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    pattern = raw.get(name) or {}
    if not isinstance(pattern, dict):
        raise ModelLoadError(f"{name} must be an object of numbers by module, got {describe(pattern)}")
    for key in pattern:
        _compiled(key, name)
    return pattern


def _compiled(text: str, name: str) -> re.Pattern[str]:
    try:
        if len(text) <= _MAX_PATTERN:
            return re.compile(text)
    except re.error:
        pass
    raise ModelLoadError(f"{name} has {describe(text)}, which is not a regular expression of a module's name")


def _targets(raw: Mapping[str, Any], config: ModelConfig) -> set[tuple[int, str]]:
    """All modules of layers that the config names. Raises ModelLoadError if it names a module that cannot have LoRA."""
    names = raw.get("target_modules")
    chosen = raw.get("layers_to_transform")
    chosen = [chosen] if isinstance(chosen, int) else chosen
    numbers = range(config.num_layers) if chosen is None else chosen
    if not isinstance(numbers, range | list) or not all(type(each) is int for each in numbers):
        raise ModelLoadError(f"layers_to_transform must be a list of layers, got {describe(chosen)}")
    modules = _modules(config)
    everywhere = [(number, module) for number in numbers for module in modules]
    if isinstance(names, str):
        wanted = _compiled(names, "target_modules")
        return {each for each in everywhere if wanted.fullmatch(_full_name(*each))}
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names) or not names:
        raise ModelLoadError(f"target_modules must be a list of names or a text, got {describe(names)}")
    for name in names:
        if not any(_ends_with(_full_name(*each), name) for each in everywhere):
            known = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise ModelLoadError(f"target_modules must be of {known}, got {describe(name)}")
    return {each for each in everywhere if any(_ends_with(_full_name(*each), name) for name in names)}


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _full_name(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{module}"


def _check_saved_modules(raw: Mapping[str, Any], config: ModelConfig) -> None:
    saved = raw.get("modules_to_save") or []
    if not isinstance(saved, list):
        raise ModelLoadError(f"modules_to_save must be a list of names, got {describe(saved)}")
    allowed = ("score", "classifier") if config.num_classes else ("lm_head",)
    for name in saved:
        if name not in allowed:
            kind = "a classifier" if config.num_classes else "a language model"
            raise ModelLoadError(f"modules_to_save of {kind} must be of {', '.join(allowed)}, got {describe(name)}")


# The tensors


def _sort_tensors(
    stored: Mapping[str, StoredTensor], config: ModelConfig
) -> tuple[dict[tuple[int, str], dict[str, StoredTensor]], StoredTensor | None]:
    """A and B of every module, and the head. Raises ModelLoadError for any other tensor."""
    modules: dict[tuple[int, str], dict[str, StoredTensor]] = {}
    head: StoredTensor | None = None
    for name, tensor in stored.items():
        if tensor.dtype not in NUMBER_DTYPES:
            raise ModelLoadError(f"tensor {name!r} must be float32, float16 or bfloat16, got {tensor.dtype}")
        found = _TENSOR.fullmatch(name)
        if found is not None and found[2] in _modules(config) and int(found[1]) < config.num_layers:
            modules.setdefault((int(found[1]), found[2]), {})[found[3]] = tensor
        elif _HEAD.fullmatch(name) is not None and head is None:
            head = tensor
        else:
            raise ModelLoadError(f"tensor {name!r} belongs to no linear layer of this model, and is no head of it")
    return modules, head


def _check_complete(found: set[tuple[int, str]], targets: set[tuple[int, str]]) -> None:
    others = found - targets
    if others:
        raise ModelLoadError(f"{_full_name(*min(others))} has tensors, and target_modules does not name it")
    missing = targets - found
    if missing:
        raise ModelLoadError(f"{_full_name(*min(missing))} is named by target_modules, and its tensors are missing")
    if not found:
        raise ModelLoadError("no tensor of a linear layer is in the file")


def _layer(
    number: int,
    modules: Mapping[tuple[int, str], Mapping[str, StoredTensor]],
    settings: _Settings,
    config: ModelConfig,
) -> dict[Matrix, LoraPair]:
    pairs: dict[Matrix, LoraPair] = {}
    for matrix in MATRICES:
        named = [(name, parts) for name, (of, parts) in _modules(config).items() if of == matrix]
        found = [
            (parts, _pair(number, name, modules[number, name], settings, config))
            for name, parts in named
            if (number, name) in modules
        ]
        if found:
            pairs[matrix] = _joined(found, _part_rows(config, matrix))
    return pairs


def _pair(
    layer: int, module: str, tensors: Mapping[str, StoredTensor], settings: _Settings, config: ModelConfig
) -> LoraPair:
    full = _full_name(layer, module)
    matrix, parts = _modules(config)[module]
    rank, rows = settings.rank_of(full), _part_rows(config, matrix)
    shapes = {"A": (rank, _columns(config, matrix)), "B": (sum(rows[part] for part in parts), rank)}
    for side, shape in shapes.items():
        if side not in tensors:
            raise ModelLoadError(f"the tensor lora_{side} of {full} is missing")
        if tensors[side].shape != shape:
            got = list(tensors[side].shape)
            raise ModelLoadError(f"lora_{side} of {full} must be {list(shape)} for this model, got {got}")
    a, b = (_numbers(tensors[side], f"lora_{side} of {full}") for side in "AB")
    b = b * np.float32(settings.scale_of(full))
    if matrix == "qkv" and config.rope.rotary_size is not None:
        b = b[_rotary_rows(config, parts, rows)]
    return LoraPair(a, b)


def _rotary_rows(config: ModelConfig, parts: Sequence[str], rows: Mapping[str, int]) -> NDArray[np.int64]:
    """The order of rows in which the model has its Q and K (`checkpoint.with_rotary_halves`)."""
    orders, start = [], 0
    for part in parts:
        order = rotary_order(config, rows[part]) if part in ("q", "k") else np.arange(rows[part])
        orders.append(start + order)
        start += rows[part]
    return np.concatenate(orders)


def _joined(pairs: Sequence[tuple[tuple[str, ...], LoraPair]], rows: Mapping[str, int]) -> LoraPair:
    """One pair for a whole matrix: the A's one below the other, and each B where its rows and its ranks are."""
    starts = dict(zip(rows, np.cumsum([0, *rows.values()]).tolist(), strict=False))
    a = np.concatenate([pair.a for _, pair in pairs])
    b = np.zeros((sum(rows.values()), len(a)), np.float32)
    column = 0
    for parts, pair in pairs:
        start, rank = starts[parts[0]], pair.a.shape[0]
        b[start : start + len(pair.b), column : column + rank] = pair.b
        column += rank
    return LoraPair(a, b)


def _part_rows(config: ModelConfig, matrix: Matrix) -> dict[str, int]:
    """How many rows each part of a matrix has, in their order."""
    n, k, h = config.num_heads, config.num_kv_heads, config.head_size
    sizes = {"q": n * h, "k": k * h, "v": k * h, "o": config.model_size, "down": config.model_size}
    return {part: sizes.get(part, config.mlp_size) for part in _PARTS[matrix]}


def matrix_shape(config: ModelConfig, matrix: Matrix) -> tuple[int, int]:
    """Rows out and columns in of a layer's matrix."""
    return sum(_part_rows(config, matrix).values()), _columns(config, matrix)


def num_parts(matrix: Matrix) -> int:
    """How many modules' ranks an adapter's A of this matrix has at most."""
    return len(_PARTS[matrix])


def _columns(config: ModelConfig, matrix: Matrix) -> int:
    sizes = {"o": config.num_heads * config.head_size, "down": config.mlp_size}
    return sizes.get(matrix, config.model_size)


def _head(tensor: StoredTensor, config: ModelConfig) -> Array:
    expected = (config.num_classes or config.vocab_size, config.model_size)
    if tensor.shape != expected:
        raise ModelLoadError(f"the head must be {list(expected)} for this model, got {list(tensor.shape)}")
    return _numbers(tensor, "the head")


def _numbers(tensor: StoredTensor, name: str) -> Array:
    numbers = np.array(as_float32(tensor.read_rows(0, tensor.shape[0]), tensor.dtype))
    if not np.isfinite(numbers).all():
        raise ModelLoadError(f"{name} has a number that is not finite")
    return numbers
