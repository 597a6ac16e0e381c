"""A model folder in Hugging Face's layout: config.json, one or several safetensors files, tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError, TokenizerError, describe
from prefixwise.contract.scores import ClassActivation
from prefixwise.models.checkpoint import (
    Checkpoint,
    LogitScore,
    StoredTensor,
    TokenizerFiles,
    as_float32,
    check_layer_count,
    check_no_unused_tensors,
    check_tensors,
    names_of,
    naming_file,
    split_rows,
    with_rotary_halves,
)
from prefixwise.models.config import Activation, ModelConfig, parameter_shapes
from prefixwise.models.experts import read_hf_experts, stack_hf_experts
from prefixwise.models.families import (
    HF_CLASSIFIER_BIAS,
    HF_CLASSIFIER_HEAD,
    HF_FUSED_GATE_UP,
    HF_FUSED_QKV,
    HF_TENSOR_NAMES,
    Family,
    family_of_hf,
    hf_tensor_names,
    stored_name,
)
from prefixwise.models.hf_attention import (
    check_attention,
    integer,
    number,
    read_embedding_scale,
    read_logit_divisor,
    read_pooling,
    read_rope,
    read_score_scale,
    read_softcap,
    read_windows,
)
from prefixwise.models.quantization.config import dequantised_tensors, read_quantization
from prefixwise.models.safetensors import open_safetensors

_Q_BIAS = stored_name("layers.0.q_bias", HF_TENSOR_NAMES, "model.layers")
_ACTIVATIONS: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # by their names there
# What a classifier's `problem_type` means, and the functions that configs of sentence-transformers name.
_PROBLEM_TYPES: dict[str, ClassActivation | None] = {
    "single_label_classification": None,  # softmax, and sigmoid of one class
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}
_CLASS_ACTIVATIONS: dict[str, ClassActivation | None] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": None,
    "torch.nn.modules.linear.Identity": "identity",
}
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class OnePlusTensor(StoredTensor):
    """The factors of Gemma's norms: 1 + the stored weights, added in float32 as Gemma does."""

    stored: StoredTensor

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        return np.float32(1.0) + as_float32(self.stored.read_rows(start, stop), self.stored.dtype)


def open_hf_folder(path: Path, name: str) -> Checkpoint:
    """Open the folder; tensors are mapped, not read. Raises ModelLoadError, which names the folder or its file."""
    with naming_file(path):
        return _open(path, name)


def _open(path: Path, name: str) -> Checkpoint:
    raw = _read_json(path / "config.json")
    architectures = raw.get("architectures") or []
    check_attention(raw, architectures)
    family = family_of_hf(architectures)
    scheme = read_quantization(raw, _read_modelopt(path))
    stored = dequantised_tensors(scheme, _open_weight_files(path))
    is_classifier = not any(each in family.hf_architectures for each in architectures)
    config = _model_config(raw, family, stored, _num_classes(stored) if is_classifier else 0)
    check_layer_count(config, stored, "model.layers")
    if family.fuses_projections:
        stored = _split_projections(stored, config)
    if family.expert_names is not None:
        stored = stack_hf_experts(stored, config, family.expert_names)
    names = hf_tensor_names(family, is_classifier=is_classifier)
    file_names = {key: stored_name(key, names, "model.layers") for key in parameter_shapes(config)}
    tensors = {key: stored[file_name] for key, file_name in file_names.items() if file_name in stored}
    check_tensors(config, tensors, file_names)
    check_no_unused_tensors(config, stored, file_names, "model.layers")
    if family.one_plus_norms:
        tensors = {key: _one_plus(tensor) if key.endswith("_norm") else tensor for key, tensor in tensors.items()}
    tensors = with_rotary_halves(tensors, config)
    known_names = names_of(name, path, raw.get("_name_or_path"))
    return Checkpoint(
        *(name, path, config, tensors, lambda: read_tokenizer_folder(path)),
        known_names,
        quantization=None if scheme is None else scheme.quantization,
        logit_score=None if is_classifier else _read_logit_score(path, config.vocab_size),
    )


def _read_modelopt(path: Path) -> dict[str, Any] | None:
    """The quantisation that ModelOpt writes into a file of its own; older versions write it nowhere else."""
    file = path / "hf_quant_config.json"
    return _read_json(file) if file.exists() else None


def _split_projections(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    q_rows, kv_rows = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    names = HF_TENSOR_NAMES
    stored = split_rows(stored, HF_FUSED_QKV, {names["q"]: q_rows, names["k"]: kv_rows, names["v"]: kv_rows})
    return split_rows(stored, HF_FUSED_GATE_UP, {names["gate"]: config.mlp_size, names["up"]: config.mlp_size})


def describe_hf_model(raw: Mapping[str, Any]) -> ModelConfig:
    """Describe a model by its config.json alone, without weights. Raises ModelLoadError for a classifier."""
    architectures = raw.get("architectures") or []
    check_attention(raw, architectures)
    family = family_of_hf(architectures)
    if not any(each in family.hf_architectures for each in architectures):
        raise ModelLoadError("a classifier cannot be described without its weights: they hold its number of classes")
    return _model_config(raw, family, {}, 0)


def describe_hf_folder(path: Path) -> ModelConfig:
    """Describe the model of a folder by its config.json. Raises ModelLoadError, which names it."""
    with naming_file(path / "config.json"):
        return describe_hf_model(_read_json(path / "config.json"))


def _one_plus(tensor: StoredTensor) -> StoredTensor:
    return OnePlusTensor(tensor.shape, "float32", tensor)


def _num_classes(stored: Mapping[str, StoredTensor]) -> int:
    """Rows of a classifier's head. One row is a score: of a reranker, a reward model or a regression."""
    if HF_CLASSIFIER_HEAD not in stored:
        raise ModelLoadError(f"the checkpoint lacks the tensor {HF_CLASSIFIER_HEAD!r}, the head of a classifier")
    if HF_CLASSIFIER_BIAS in stored:
        raise ModelLoadError(f"unsupported: the classifier has a bias, {HF_CLASSIFIER_BIAS!r}; expected one without")
    shape = stored[HF_CLASSIFIER_HEAD].shape
    if len(shape) != 2 or not shape[0]:
        raise ModelLoadError(
            f"the tensor {HF_CLASSIFIER_HEAD!r}, the head of a classifier, has shape {list(shape)}; "
            "expected one row for each class"
        )
    return shape[0]


def _id2label(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes in the order of their ids; () where the config has none, and LABEL_0, ... are meant."""
    names = raw.get("id2label") or {}
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        raise ModelLoadError(f"config.json: id2label must name the classes 0, 1, ... by their ids, got {names!r}")
    return tuple(str(names[str(row)]) for row in range(len(names)))


def _class_activation(raw: Mapping[str, Any], num_classes: int) -> ClassActivation:
    """By `problem_type`, else by the function that sentence-transformers stores, else as transformers' pipeline and
    vLLM do: the sigmoid of one class, the softmax of several."""
    problem = raw.get("problem_type")
    if problem is not None and problem not in _PROBLEM_TYPES:
        raise ModelLoadError(f"unsupported problem_type {problem!r}; supported: {', '.join(_PROBLEM_TYPES)}")
    stored = raw.get("sentence_transformers")
    function = stored.get("activation_fn") if isinstance(stored, dict) else None
    function = function or raw.get("sbert_ce_default_activation_function")
    if function is not None and function not in _CLASS_ACTIVATIONS:
        raise ModelLoadError(f"unsupported activation_fn {function!r}; supported: {', '.join(_CLASS_ACTIVATIONS)}")
    stated = None if problem is None else _PROBLEM_TYPES[problem]
    if problem is None and function is not None:
        stated = _CLASS_ACTIVATIONS[function]
    return stated or ("softmax" if num_classes > 1 else "sigmoid")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, got {describe(content)}")
    return content


def _open_weight_files(path: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_file_names(path):
        if not (path / file).is_file():
            raise ModelLoadError(f"{path} lacks the weight file {file}{_other_formats(path)}")
        found = open_safetensors(path / file)
        if twice := sorted(tensors.keys() & found.keys()):
            raise ModelLoadError(f"{path / file} holds the tensor {twice[0]!r}, which another weight file holds, too")
        tensors |= found
    return tensors


def _weight_file_names(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelLoadError(f"{index} lacks 'weight_map', which says which file holds which tensor")
    for file in weight_map.values():
        if not file or Path(file).name != file:
            raise ModelLoadError(f"{index}: expected the name of a file beside it, got {describe(file)}")
    return sorted(set(weight_map.values()))


def _other_formats(path: Path) -> str:
    """A hint for folders with pickled weights, which can run code when they are opened, and with GGUF files."""
    for pattern, advice in (("*.gguf", "name that file"), ("*.bin", "convert it to safetensors")):
        if found := sorted(entry.name for entry in path.glob(pattern)):
            return f" (it has {found[0]}; {advice})"
    return ""


def _model_config(
    raw: Mapping[str, Any], family: Family, stored: Mapping[str, StoredTensor], num_classes: int
) -> ModelConfig:
    _check_activation(raw, family)
    is_tied = bool(raw.get("tie_word_embeddings", HF_TENSOR_NAMES["head"] not in stored))
    try:
        num_heads = integer(raw["num_attention_heads"])
        model_size = integer(raw["hidden_size"])
        head_size = integer(raw.get("head_dim"), model_size // max(1, num_heads))
        rope = read_rope(raw, family, head_size)
        return ModelConfig(
            family=family.name,
            vocab_size=integer(raw["vocab_size"]),
            model_size=model_size,
            mlp_size=integer(raw[_mlp_size_name(family)]),
            num_layers=integer(raw["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=integer(raw.get("num_key_value_heads"), num_heads),
            head_size=head_size,
            norm_eps=float(number(raw["rms_norm_eps"])),
            rope=rope.of_layers,
            qkv_bias=family.qkv_bias or _Q_BIAS in stored,
            qk_norm=family.qk_norm,
            tied_head=is_tied and not num_classes,
            max_context_len=rope.max_context_len,
            activation=family.activation,
            embedding_scale=read_embedding_scale(raw, family, model_size),
            float32_norms=family.one_plus_norms,
            windows=read_windows(raw, family),
            local_rope=rope.of_local_layers,
            score_scale=read_score_scale(raw, family),
            score_softcap=read_softcap(raw, "attn_logit_softcapping", family.score_softcap),
            # A classifier's logits are not capped.
            logit_softcap=read_softcap(raw, "final_logit_softcapping", None if num_classes else family.logit_softcap),
            pre_norms=family.pre_norms,
            post_norms=family.post_norms,
            whole_qk_norm=family.whole_qk_norm,
            experts=read_hf_experts(raw, family),
            residual_scale=float(number(raw.get("residual_multiplier"), 1.0)) if family.has_multipliers else 1.0,
            logit_divisor=read_logit_divisor(raw, family),
            is_causal=not family.is_bidirectional,
            pooling=read_pooling(raw, family),
            num_classes=num_classes,
            id2label=_id2label(raw) if num_classes else (),
            class_activation=_class_activation(raw, num_classes) if num_classes else "softmax",
        )
    except KeyError as error:
        raise ModelLoadError(f"config.json lacks {error}, which a {family.title} model needs") from None
    except (TypeError, ValueError, OverflowError) as error:  # null or text where a number should be
        raise ModelLoadError(f"config.json has a value that is not a number: {error}") from None


def _mlp_size_name(family: Family) -> str:
    has_own_size = family.expert_names is not None and family.expert_names.has_own_size
    return "moe_intermediate_size" if has_own_size else "intermediate_size"


def _check_activation(raw: Mapping[str, Any], family: Family) -> None:
    """Raise for another activation. Gemma's first configs have `hidden_act: gelu` and mean the tanh approximation;
    later configs have `hidden_activation`."""
    expected = _ACTIVATIONS[family.activation]
    stated = raw.get("hidden_activation") or raw.get("hidden_act") or expected
    is_legacy = family.activation == "gelu_tanh" and stated == "gelu" and not raw.get("hidden_activation")
    if stated != expected and not is_legacy:
        raise ModelLoadError(f"unsupported activation {stated!r}; supported: {expected}")


def _read_logit_score(path: Path, vocab_size: int) -> LogitScore | None:
    """What sentence-transformers has saved of a reranker: modules.json, 1_LogitScore, and its defaults for prompts."""
    if not (path / "modules.json").is_file():
        return None
    with naming_file(path / "modules.json"):
        modules = json.loads((path / "modules.json").read_text(encoding="utf-8"))
        folders = [each["path"] for each in modules if str(each["type"]).rpartition(".")[2] == "LogitScore"]
    if not folders:
        return None
    if Path(folders[0]).name != folders[0]:
        raise ModelLoadError(f"modules.json: expected the name of a folder beside it, got {describe(folders[0])}")
    stated = _read_json(path / folders[0] / "config.json")
    true_id, false_id = stated.get("true_token_id"), stated.get("false_token_id")
    for each in (true_id,) if false_id is None else (true_id, false_id):
        if type(each) is not int or not 0 <= each < vocab_size:
            raise ModelLoadError(
                f"{folders[0]}/config.json: expected token ids below {vocab_size}, got {describe(each)}"
            )
    saved = _read_optional_json(path / "config_sentence_transformers.json")
    prompts, options = saved.get("prompts"), _read_optional_json(path / "sentence_bert_config.json")
    prompt = prompts.get(saved.get("default_prompt_name")) if isinstance(prompts, dict) else None
    processing = options.get("processing_kwargs")
    variables = processing.get("chat_template") if isinstance(processing, dict) else None
    assert isinstance(true_id, int), "checked above"
    return LogitScore(
        true_id,
        false_id,
        instruction=prompt if isinstance(prompt, str) and prompt else None,
        template_variables=variables if isinstance(variables, dict) else {},
    )


def read_tokenizer_folder(path: Path) -> TokenizerFiles:
    """Read tokenizer.json, the chat template and the special tokens. Raises TokenizerError where there is no
    tokenizer.json, ModelLoadError where one of the files is damaged."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{path} has no tokenizer.json, so text cannot be tokenized; send token ids instead")
    with naming_file(file):
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()  # a file may have both switched on, as in training; they hide the ids around a text
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        leading_ids, trailing_ids = _ids_around(tokenizer)
    config = _read_optional_json(path / "tokenizer_config.json")
    return TokenizerFiles(
        tokenizer,
        leading_ids,
        _chat_template(path, config),
        special_ids,
        _special_tokens(path, config),
        trailing_ids,
    )


def _ids_around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text: `<s>` before for Llama, none for most Qwen."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    full: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        with naming_file(file):
            return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = (each for each in template if isinstance(each, dict) and each.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) else None


def _special_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the tokens that have a role: from tokenizer_config.json, and the older special_tokens_map.json."""
    older = _read_optional_json(path / "special_tokens_map.json")
    found = {role: _token_text(config.get(role)) or _token_text(older.get(role)) for role in _ROLES}
    return {role: text for role, text in found.items() if text is not None}


def _token_text(token: object) -> str | None:
    """Of a token that is written as its text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _read_optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}
