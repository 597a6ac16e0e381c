from __future__ import annotations

from dataclasses import replace

import pytest

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.config import layer_parameter_shapes
from prefixwise.models.families import (
    FAMILIES,
    GGUF_TENSOR_NAMES,
    HF_TENSOR_NAMES,
    family_of_gguf,
    family_of_hf,
    hf_tensor_names,
    stored_name,
)
from tests.checkpoints import FAMILY_NAMES, GGUF_FAMILY_NAMES
from tests.models.test_config import CONFIG


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("Qwen3ForCausalLM", "qwen3"),
        ("Qwen2ForCausalLM", "qwen2"),
        ("LlamaForCausalLM", "llama"),
        ("MistralForCausalLM", "mistral"),
        ("GemmaForCausalLM", "gemma"),
        ("Gemma2ForCausalLM", "gemma2"),
        ("Gemma3ForCausalLM", "gemma3"),
        ("Phi3ForCausalLM", "phi3"),
        ("Olmo2ForCausalLM", "olmo2"),
        ("GraniteForCausalLM", "granite"),
        ("LlamaBidirectionalForSequenceClassification", "llama_bidirec"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("MixtralForCausalLM", "mixtral"),
        ("Qwen3ForSequenceClassification", "qwen3"),
        ("GemmaForSequenceClassification", "gemma"),
    ],
)
def test_hf_architectures_have_their_family(architecture: str, family: str) -> None:
    assert family_of_hf([architecture]) is FAMILIES[family]


@pytest.mark.parametrize(
    "architecture", ["qwen3", "qwen2", "llama", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "granite"]
)
def test_gguf_architectures_have_their_family(architecture: str) -> None:
    assert family_of_gguf(architecture).name == architecture


def test_every_family_has_a_small_checkpoint() -> None:
    """Without one it would be in no test against transformers."""
    causal = [family for family in FAMILIES.values() if family.hf_architectures]
    missing = {family.name for family in causal} - {*FAMILY_NAMES}
    assert not missing, "give each a row in _PER_FAMILY of tests/checkpoints.py"
    missing = {family.name for family in causal if family.gguf_architectures} - {*GGUF_FAMILY_NAMES}
    assert not missing, "give each a row in _GGUF_ARCHITECTURES of tests/checkpoints.py"


def test_gguf_files_with_experts_are_of_another_family() -> None:
    assert family_of_gguf("llama", has_experts=True).name == "mixtral"
    assert family_of_gguf("qwen3moe", has_experts=True).name == "qwen3_moe"


def test_an_unsupported_hf_architecture_is_answered_with_the_supported_ones() -> None:
    with pytest.raises(ModelLoadError) as caught:
        family_of_hf(["Gemma9ForCausalLM"])
    message = str(caught.value)
    assert "Gemma9ForCausalLM" in message
    for family in FAMILIES.values():
        assert all(name in message for name in (*family.hf_architectures, *family.hf_classifiers))


def test_a_config_without_architectures_says_so() -> None:
    with pytest.raises(ModelLoadError, match="unsupported architecture none given; supported: Qwen3ForCausalLM"):
        family_of_hf([])


def test_an_unsupported_gguf_architecture_is_answered_with_the_supported_ones() -> None:
    with pytest.raises(
        ModelLoadError, match="unsupported GGUF architecture 'gemma9'; supported: qwen3, qwen2, llama, gemma, gemma2"
    ):
        family_of_gguf("gemma9")


def test_both_formats_name_every_parameter() -> None:
    every = set(layer_parameter_shapes(replace(CONFIG, qkv_bias=True, qk_norm=True, post_norms=True)))
    every |= {"embedding", "final_norm", "head"}
    assert set(HF_TENSOR_NAMES) == set(GGUF_TENSOR_NAMES) == every


def test_stored_names_put_the_layer_where_the_format_has_it() -> None:
    assert stored_name("layers.12.q", HF_TENSOR_NAMES, "model.layers") == "model.layers.12.self_attn.q_proj.weight"
    assert stored_name("layers.12.q_bias", GGUF_TENSOR_NAMES, "blk") == "blk.12.attn_q.bias"
    assert stored_name("head", GGUF_TENSOR_NAMES, "blk") == "output.weight"


def test_a_norm_behind_attention_has_the_name_that_the_mlps_norm_has_elsewhere() -> None:
    for family in FAMILIES.values():
        names = hf_tensor_names(family)
        assert len({names[part] for part in ("mlp_norm", "post_attention_norm")}) == 1 + family.post_norms
