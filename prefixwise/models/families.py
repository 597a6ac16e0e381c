"""The model families: which checkpoints we can read, and how the families differ.

A family is data. Adding one means adding a row here and, if it has a part that no other has, a field in
`ModelConfig` that both backends honour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.config import Activation


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    name: str
    title: str  # shown by `prefixwise models`
    hf_architectures: tuple[str, ...]  # `architectures` in config.json
    hf_classifiers: tuple[str, ...]  # `architectures` of a model with a few classes in place of the vocabulary
    gguf_architectures: tuple[str, ...]  # `general.architecture` in a GGUF file
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_permutes_qk: bool = False  # llama.cpp interleaves the rotary halves of the rows of Q and K
    activation: Activation = "silu"
    scales_embeddings: bool = False  # by the square root of the model size
    # A norm multiplies by 1 + w: Hugging Face stores w, a GGUF file has the sum. The weights stay in float32.
    one_plus_norms: bool = False

    def embedding_scale(self, model_size: int) -> float:
        return math.sqrt(model_size) if self.scales_embeddings else 1.0


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3", "Qwen3", ("Qwen3ForCausalLM",), ("Qwen3ForSequenceClassification",), ("qwen3",), qk_norm=True),
        Family(
            "qwen2",
            "Qwen2, Qwen2.5",
            ("Qwen2ForCausalLM",),
            ("Qwen2ForSequenceClassification",),
            ("qwen2",),
            qkv_bias=True,
        ),
        Family(
            "llama",
            "Llama 2 and 3, SmolLM2",
            ("LlamaForCausalLM",),
            ("LlamaForSequenceClassification",),
            ("llama",),
            gguf_permutes_qk=True,
        ),
        # GGUF calls it llama, so no GGUF file is of this family.
        Family(
            "mistral",
            "Mistral",
            ("MistralForCausalLM",),
            ("MistralForSequenceClassification",),
            (),
            gguf_permutes_qk=True,
        ),
        Family(
            "gemma",
            "Gemma",  # the first: its successors have more norms, and cap their logits
            ("GemmaForCausalLM",),
            ("GemmaForSequenceClassification",),
            ("gemma",),
            activation="gelu_tanh",
            scales_embeddings=True,
            one_plus_norms=True,
        ),
    )
}

# Hugging Face's tensor names, the same for every family so far.
HF_CLASSIFIER_HEAD, HF_CLASSIFIER_BIAS = "score.weight", "score.bias"
HF_TENSOR_NAMES: dict[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}

GGUF_TENSOR_NAMES: dict[str, str] = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def stored_name(canonical: str, names: dict[str, str], layer_prefix: str) -> str:
    """`layers.3.q` to the name in a file, given its table and its layer prefix (`model.layers` or `blk`)."""
    head, _, rest = canonical.partition(".")
    if head != "layers":
        return names[canonical]
    layer, _, part = rest.partition(".")
    return f"{layer_prefix}.{layer}.{names[part]}"


def family_of_hf(architectures: list[str]) -> Family:
    """The family of a Hugging Face config's `architectures`."""
    for family in FAMILIES.values():
        if any(name in family.hf_architectures + family.hf_classifiers for name in architectures):
            return family
    names = [family.hf_architectures for family in FAMILIES.values()]
    names += [family.hf_classifiers for family in FAMILIES.values()]
    known = ", ".join(name for each in names for name in each)
    raise ModelLoadError(f"unsupported architecture {architectures or 'none given'}; supported: {known}")


def family_of_gguf(architecture: str) -> Family:
    """The family of a GGUF file's `general.architecture`."""
    for family in FAMILIES.values():
        if architecture in family.gguf_architectures:
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.gguf_architectures)
    raise ModelLoadError(f"unsupported GGUF architecture {architecture!r}; supported: {known}")
