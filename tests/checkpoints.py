"""Small random checkpoints of every family, in every format that we read, for tests to load.

The Hugging Face folders come from transformers' own classes, so that what we read is what others write; the
GGUF files come from gguf's writer, with the names, the permutation and the metadata of llama.cpp's converter.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefixwise.models.families import FAMILIES, family_of_hf, gguf_tensor_names, hf_tensor_names

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
# A row for each family: the fields of its config beside _COMMON. A family with a row is in all tests of families.
_PER_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    "llama": {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "llama3": {"head_dim": 32, "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None},
    # Wide enough that GELU and its approximation give scores that differ by more than the bounds.
    "gemma": {"head_dim": 32, "num_key_value_heads": 1, "initializer_range": 0.2},
    # Windows shorter than the tests' sequences, caps that scores and logits reach, and another scale than the heads'.
    "gemma2": {
        "head_dim": 32,
        "initializer_range": 0.2,
        "sliding_window": 100,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 5.0,
    },
    # The sixth layer has no window, and another RoPE.
    "gemma3": {
        "head_dim": 32,
        "initializer_range": 0.15,
        "num_hidden_layers": 7,
        "sliding_window": 90,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    # As Phi-4-mini: a quarter of each head is not rotated.
    "phi3": {
        "pad_token_id": 0,
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.05, 1.2, 1.5, 1.9, 2.4],
            "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            "original_max_position_embeddings": 2048,
        },
    },
    "olmo2": {"tie_word_embeddings": False, "pad_token_id": 0},
    # None of the four is what another family has: 1 / sqrt(H) is 0.25, and others are 1.
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.75,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "initializer_range": 0.15,
    },
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "initializer_range": 0.15,
    },
}
_VARIANTS = {"llama3": "llama"}  # rows that are the same family with another config
# By family, as llama.cpp calls them. A family that llama.cpp lacks has no row, and no tests of GGUF files.
_GGUF_ARCHITECTURES = {
    **{name: name for name in ("qwen3", "qwen2", "llama", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "granite")},
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
}
FAMILY_NAMES = tuple(_PER_FAMILY)
GGUF_FAMILY_NAMES = tuple(name for name in FAMILY_NAMES if _VARIANTS.get(name, name) in _GGUF_ARCHITECTURES)

_GGUF_FUSED = {"self_attn.qkv_proj.weight": "attn_qkv.weight", "mlp.gate_up_proj.weight": "ffn_up.weight"}  # Phi-3

TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. Is this document relevant to the query? yes no Yes No\n"
    "def score(query, items):\n    return [model(query + item) for item in items]\n"
    "In 2024, 1,234 people bought 56 pears for 7.89 euros; naïve café, Straße, привет мир, 你好世界 🙂.\n"
)


def make_hf_checkpoint(folder: Path, family: str, *, sharded: bool = False, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 model of the family to the folder; `overrides` are fields of its config."""
    pytest.importorskip("torch")  # transformers makes them with it
    import torch
    import transformers

    model_class = getattr(transformers, FAMILIES[_VARIANTS.get(family, family)].hf_architectures[0])
    config = model_class.config_class(**(_COMMON | _PER_FAMILY[family] | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
        _randomise_vectors(model)
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    return folder


def make_classifier(folder: Path, causal: Path, rows: NDArray[np.float32], **overrides: Any) -> Path:
    """Turn a causal model into a classifier with these rows [classes, D] for its head, as rerankers are converted;
    `overrides` are fields of its config."""
    import torch
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        model = AutoModelForSequenceClassification.from_pretrained(causal, num_labels=len(rows), **overrides)
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(rows))
    model.save_pretrained(folder)
    return folder


def make_bidirectional(folder: Path, **fields: Any) -> Path:
    """A reranker as NVIDIA's llama-nemotron-rerank: Llama's tensors and one score, with the fields of its config."""
    small = {"num_hidden_layers": 3, "max_position_embeddings": 511} | fields
    sizes = {name: small.pop(name) for name in list(small) if name in _COMMON}
    rows = np.random.default_rng(0).standard_normal((1, sizes.get("hidden_size", 64)), np.float32)
    causal = make_hf_checkpoint(folder / "causal", "llama", **sizes)
    make_classifier(folder, causal, rows)
    shutil.rmtree(causal)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaBidirectionalForSequenceClassification"], "model_type": "llama_bidirec", **small}
    (folder / "config.json").write_text(json.dumps(config))
    return add_tokenizer(folder, bos=True)


def _randomise_vectors(model: Any) -> None:
    """Norms start at 1 (Gemma's at 0) and biases at 0: left there, one read from the wrong place would pass every
    test."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            centre = 1.0 if "norm" in name and not model.config.model_type.startswith("gemma") else 0.0
            torch.nn.init.normal_(parameter, mean=centre, std=0.2)


def add_tokenizer(folder: Path, *, bos: bool = False) -> Path:
    """Put a byte-level BPE tokenizer.json of 400 tokens in the folder; `bos` puts `<s>` before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_gguf(
    hf_folder: Path,
    path: Path,
    quant: str = "F32",
    *,
    extra: Mapping[str, str | int | float] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write the folder's model to a GGUF file; vectors stay F32, as llama.cpp keeps them. For types that gguf
    cannot write (K-quants), random blocks take the weights' place. `extra` metadata is added or written over,
    the tensors named in `without` are left out."""
    import gguf

    config = json.loads((hf_folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, _gguf_architecture(config))
    _add_model_metadata(writer, config)
    if (hf_folder / "tokenizer.json").is_file():
        _add_tokenizer_metadata(writer, hf_folder, config["vocab_size"])
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, values in stacked_experts(read_hf_tensors(hf_folder)).items():
        if _gguf_name(name, config) not in without:
            values = _permuted_for_gguf(name, values, config)
            if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
                values = values + 1  # as llama.cpp's converter does
            _add_tensor(writer, _gguf_name(name, config), values, quant)
    if _rope(config).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_frequency_factors(config))
    if _rope(config).get("rope_type") == "longrope":
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(_rope(config)[f"{kind}_factor"], np.float32))
    finish_gguf(writer)
    return path


def finish_gguf(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def quick_gguf_reader() -> Iterator[None]:
    """transformers reads a file's header and builds gguf's table of tensor names again and again, for a minute; here
    once. And gguf cuts the header's hundred thousand strings out of a `memmap`, whose slices take far longer than those
    of the array that it is."""
    import gguf

    class QuickReader(gguf.GGUFReader):  # type: ignore[misc]
        data: NDArray[np.uint8]

        def _get(self, *arguments: Any, **options: Any) -> NDArray[Any]:
            self.data = np.asarray(self.data)
            found: NDArray[Any] = super()._get(*arguments, **options)
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(QuickReader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield


def read_hf_tensors(folder: Path) -> dict[str, NDArray[Any]]:
    """Every tensor of the folder's safetensors files, read by the safetensors package."""
    from safetensors.numpy import load_file

    tensors: dict[str, NDArray[Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def stacked_experts(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The matrices of all experts of a layer as one tensor [E, rows, columns], whose name has no number."""
    found: dict[str, Any] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        block, experts, rest = name.partition(".experts.")
        if not experts:
            found[name] = tensors[name]
            continue
        found.setdefault(f"{block}.experts.{rest.partition('.')[2]}", []).append(tensors[name])
    return {name: np.stack(values) if isinstance(values, list) else values for name, values in found.items()}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = config["rope_parameters"]
    whole: dict[str, Any] = parameters.get("full_attention", parameters)  # by the kind of the layer in Gemma 3
    return whole


def _head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_model_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name(f"tiny {config['model_type']}")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if writer.arch != "gemma":  # whose files leave it out
        writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if writer.arch == "llama":
        writer.add_rope_dimension_count(_head_size(config))
    if config.get("sliding_window") and writer.arch != "llama":
        writer.add_sliding_window(config["sliding_window"])
    if writer.arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if writer.arch == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    _add_rope_scaling(writer, _rope(config), config)


def _add_rope_scaling(writer: Any, rope: dict[str, Any], config: dict[str, Any]) -> None:
    import gguf

    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        longest, original = config["max_position_embeddings"], rope["original_max_position_embeddings"]
        writer.add_rope_dimension_count(int(_head_size(config) * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longest / original) / math.log(original)))


def _add_tokenizer_metadata(writer: Any, hf_folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    raw = json.loads(tokenizer.to_str())
    special = {token["id"] for token in raw["added_tokens"] if token["special"]}
    tokens = [tokenizer.id_to_token(index) or f"[PAD{index}]" for index in range(vocab_size)]
    known = tokenizer.get_vocab_size()
    types = [3 if index in special else 1 if index < known else 5 for index in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in raw["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(raw["post_processor"] is not None)


def _gguf_architecture(config: dict[str, Any]) -> str:
    return _GGUF_ARCHITECTURES[family_of_hf(config["architectures"]).name]


def _gguf_name(hf_name: str, config: dict[str, Any]) -> str:
    parts = hf_name.split(".")
    key = ".".join(parts[3:]) if parts[1] == "layers" else hf_name
    if key in _GGUF_FUSED:
        return f"blk.{parts[2]}.{_GGUF_FUSED[key]}"
    names = hf_tensor_names(family_of_hf(config["architectures"]))
    canonical = next(name for name, stored in names.items() if stored == key)
    prefix = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    return prefix + gguf_tensor_names(family_of_hf(config["architectures"]))[canonical]


def _permuted_for_gguf(name: str, values: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    """llama.cpp's `LlamaModel.permute`: the two rotary halves of each head, interleaved."""
    heads_of = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    heads = heads_of.get(name.split(".")[-2])
    if heads is None or _gguf_architecture(config) not in ("llama", "granite"):
        return values
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def _add_tensor(writer: Any, name: str, values: NDArray[Any], quant: str) -> None:
    import gguf

    quant_type = gguf.GGMLQuantizationType[quant if values.ndim > 1 else "F32"]
    try:
        data = gguf.quants.quantize(values, quant_type)
    except NotImplementedError:
        data = _random_blocks(values.shape, quant_type)
    writer.add_tensor(name, data, raw_dtype=quant_type)


def _random_blocks(shape: tuple[int, ...], quant_type: Any) -> NDArray[np.uint8]:
    """Any bytes are blocks, but two of them may be a float16 that is no number: those bytes stay out."""
    import gguf

    harmless = np.array([byte for byte in range(256) if byte & 0x7C != 0x7C], np.uint8)
    byte_shape = gguf.quants.quant_shape_to_byte_shape(shape, quant_type)
    blocks: NDArray[np.uint8] = np.random.default_rng(0).choice(harmless, byte_shape)
    return blocks


def _llama3_frequency_factors(config: dict[str, Any]) -> NDArray[np.float32]:
    """llama.cpp's converter stores Llama 3's scaling as one divisor per frequency, in this very way."""
    rope, head_size = _rope(config), _head_size(config)
    old_len, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    factors = []
    for exponent in np.arange(0, head_size, 2) / head_size:
        wavelength = 2 * math.pi * rope["rope_theta"] ** exponent
        smooth = min(1.0, max(0.0, (old_len / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
