"""The model families: which checkpoints we can read, and how the families differ.

A family is data. Adding one means adding a row here, a small checkpoint in `tests/checkpoints.py` and, if it has a part
that no other has, a field in `ModelConfig` that both backends honour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.config import Activation


@dataclass(frozen=True)
class ExpertNames:
    """How Hugging Face's checkpoints of a family name experts, `mlp.experts.0.gate_proj.weight`, and their config."""

    block: str  # `mlp`
    parts: tuple[str, str, str]  # gate, up, down
    has_own_size: bool = False  # `moe_intermediate_size` is the size of an expert, not `intermediate_size`
    has_norm_switch: bool = False  # `norm_topk_prob` says whether a token's weights are divided by their sum


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
    # How configs without `layer_types` say which layers have the sliding window: all but every n-th (0: all of them),
    # or Qwen's switch and number of layers before them. None and no switch: the family has no sliding windows.
    global_every: int | None = None
    has_window_switch: bool = False
    theta: float = 10_000.0  # of RoPE, where a config lacks it
    local_theta: float | None = None  # the same of layers with a sliding window; None: they have the same RoPE
    pre_norms: bool = True  # norms of the inputs of attention and MLP
    post_norms: bool = False  # norms of the outputs of attention and MLP
    whole_qk_norm: bool = False  # of all heads together
    fuses_projections: bool = False  # one matrix for Q, K and V, one for gate and up
    has_partial_rotary: bool = False  # `partial_rotary_factor` says how much of a head is rotated
    has_query_scalar: bool = False  # `query_pre_attn_scalar` scales attention scores
    # GGUF files have no such number. Models of so many layers have D / N, as llama.cpp knows; others have H.
    gguf_layers_with_query_scalar: int | None = None
    # `attn_logit_softcapping` and `final_logit_softcapping` where a config lacks them; None: no such cap.
    score_softcap: float | None = None
    logit_softcap: float | None = None
    expert_names: ExpertNames | None = None  # None: a dense family
    # `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling`
    has_multipliers: bool = False
    is_bidirectional: bool = False  # tokens see those after them, and `pooling` says what the head reads

    def embedding_scale(self, model_size: int) -> float:
        return math.sqrt(model_size) if self.scales_embeddings else 1.0


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "qwen3",
            "Qwen3",
            ("Qwen3ForCausalLM",),
            ("Qwen3ForSequenceClassification",),
            ("qwen3",),
            qk_norm=True,
            has_window_switch=True,
        ),
        Family(
            "qwen2",
            "Qwen2, Qwen2.5",
            ("Qwen2ForCausalLM",),
            ("Qwen2ForSequenceClassification",),
            ("qwen2",),
            qkv_bias=True,
            has_window_switch=True,
        ),
        Family(
            "llama",
            "Llama 2 and 3, SmolLM2",
            ("LlamaForCausalLM",),
            ("LlamaForSequenceClassification",),
            ("llama",),
            gguf_permutes_qk=True,
        ),
        # A reranker that NVIDIA's own code runs; as a model of the vocabulary it does not exist.
        Family(
            "llama_bidirec",
            "Llama with bidirectional attention",
            (),
            ("LlamaBidirectionalForSequenceClassification",),
            (),
            is_bidirectional=True,
        ),
        # GGUF calls it llama, so no GGUF file is of this family.
        Family(
            "mistral",
            "Mistral",
            ("MistralForCausalLM",),
            ("MistralForSequenceClassification",),
            (),
            gguf_permutes_qk=True,
            global_every=0,
        ),
        Family(
            "gemma",
            "Gemma",
            ("GemmaForCausalLM",),
            ("GemmaForSequenceClassification",),
            ("gemma",),
            activation="gelu_tanh",
            scales_embeddings=True,
            one_plus_norms=True,
        ),
        Family(
            "gemma2",
            "Gemma 2",
            ("Gemma2ForCausalLM",),
            ("Gemma2ForSequenceClassification",),
            ("gemma2",),
            activation="gelu_tanh",
            scales_embeddings=True,
            one_plus_norms=True,
            global_every=2,
            post_norms=True,
            has_query_scalar=True,
            gguf_layers_with_query_scalar=46,
            score_softcap=50.0,
            logit_softcap=30.0,
        ),
        Family(
            "gemma3",
            "Gemma 3, text",
            ("Gemma3ForCausalLM",),
            ("Gemma3TextForSequenceClassification",),
            ("gemma3",),
            qk_norm=True,
            activation="gelu_tanh",
            scales_embeddings=True,
            one_plus_norms=True,
            global_every=6,
            theta=1_000_000.0,
            local_theta=10_000.0,
            post_norms=True,
            has_query_scalar=True,
            gguf_layers_with_query_scalar=62,
            logit_softcap=0.0,
        ),
        Family(
            "phi3",
            "Phi-3, Phi-4",
            ("Phi3ForCausalLM",),
            ("Phi3ForSequenceClassification",),
            ("phi3",),
            global_every=0,
            fuses_projections=True,
            has_partial_rotary=True,
        ),
        Family(
            "olmo2",
            "OLMo 2",
            ("Olmo2ForCausalLM",),
            ("Olmo2ForSequenceClassification",),
            ("olmo2",),
            qk_norm=True,
            pre_norms=False,
            post_norms=True,
            whole_qk_norm=True,
        ),
        Family(
            "granite",
            "Granite 3 and 4, dense",
            ("GraniteForCausalLM",),
            (),
            ("granite",),
            gguf_permutes_qk=True,
            has_multipliers=True,
        ),
        Family(
            "qwen3_moe",
            "Qwen3-MoE",
            ("Qwen3MoeForCausalLM",),
            ("Qwen3MoeForSequenceClassification",),
            ("qwen3moe",),
            qk_norm=True,
            expert_names=ExpertNames(
                "mlp", ("gate_proj", "up_proj", "down_proj"), has_own_size=True, has_norm_switch=True
            ),
        ),
        # GGUF calls it llama, too: a llama with experts.
        Family(
            "mixtral",
            "Mixtral",
            ("MixtralForCausalLM",),
            ("MixtralForSequenceClassification",),
            ("llama",),
            gguf_permutes_qk=True,
            global_every=0,
            theta=1_000_000.0,
            expert_names=ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
        ),
    )
}

# Hugging Face's tensor names; `hf_tensor_names` has those of a family.
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
    "post_attention_norm": "post_attention_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
_HF_MLP_NORM_OF_POST_NORMS = "pre_feedforward_layernorm.weight"
HF_FUSED_QKV, HF_FUSED_GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
GGUF_FUSED_QKV, GGUF_FUSED_GATE_UP = "attn_qkv.weight", "ffn_up.weight"  # the latter has the name of `up`

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
    "post_attention_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}
_GGUF_EXPERTS = {
    "router": "ffn_gate_inp.weight",
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
}


def hf_tensor_names(family: Family, *, is_classifier: bool = False) -> dict[str, str]:
    """Hugging Face's names of all tensors of a family. Where a norm follows attention, it has the name that the MLP's
    norm has elsewhere. Stacked experts (`experts.py`) have names without the number."""
    names = dict(HF_TENSOR_NAMES)
    if family.expert_names is not None:
        block, parts = family.expert_names.block, family.expert_names.parts
        stacked = (f"{block}.experts.{part}.weight" for part in parts)
        names |= {"router": f"{block}.gate.weight", **dict(zip(("gate", "up", "down"), stacked, strict=True))}
    if family.post_norms:
        names["mlp_norm"] = _HF_MLP_NORM_OF_POST_NORMS
    if is_classifier:
        names["head"] = HF_CLASSIFIER_HEAD
    return names


def gguf_tensor_names(family: Family) -> dict[str, str]:
    """The names of all tensors of a family in a GGUF file."""
    return GGUF_TENSOR_NAMES if family.expert_names is None else GGUF_TENSOR_NAMES | _GGUF_EXPERTS


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


def family_of_gguf(architecture: str, *, has_experts: bool = False) -> Family:
    """The family of a GGUF file's `general.architecture`: of two, the one that has experts where the file has them."""
    found = [family for family in FAMILIES.values() if architecture in family.gguf_architectures]
    if found:
        return next((family for family in found if (family.expert_names is not None) == has_experts), found[0])
    known = ", ".join(dict.fromkeys(name for family in FAMILIES.values() for name in family.gguf_architectures))
    raise ModelLoadError(f"unsupported GGUF architecture {architecture!r}; supported: {known}")
