"""From the metadata of a GGUF file to a `ModelConfig`, by the keys that llama.cpp's converter writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import StoredTensor
from prefixwise.models.config import ExpertsConfig, ModelConfig, RopeConfig, YarnScaling
from prefixwise.models.families import GGUF_TENSOR_NAMES, Family, stored_name

# Tensors that are no parameters: Llama 3's rope scaling, and LongRoPE's for short contexts.
_ROPE_FACTORS, _LONGROPE_FACTORS = "rope_freqs.weight", "rope_factors_short.weight"


def read_gguf_config(metadata: Mapping[str, Any], family: Family, stored: Mapping[str, StoredTensor]) -> ModelConfig:
    """Describe the model of a file with these tensors. Raises ModelLoadError."""
    values = _Metadata(metadata)
    values.refuse_unsupported(family)
    rope, max_context_len = _rope_config(values, family, stored)
    return ModelConfig(
        family=family.name,
        vocab_size=_vocab_size(stored),
        model_size=values.integer("embedding_length"),
        mlp_size=values.integer(_mlp_size_key(family)),
        num_layers=values.integer("block_count"),
        num_heads=values.integer("attention.head_count"),
        num_kv_heads=values.integer("attention.head_count_kv", values.integer("attention.head_count")),
        head_size=values.head_size(),
        norm_eps=float(values.number("attention.layer_norm_rms_epsilon")),
        rope=rope,
        qkv_bias=family.qkv_bias or stored_name("layers.0.q_bias", GGUF_TENSOR_NAMES, "blk") in stored,
        qk_norm=family.qk_norm,
        tied_head=GGUF_TENSOR_NAMES["head"] not in stored,
        max_context_len=max_context_len,
        activation=family.activation,
        embedding_scale=_multiplier(values, family, "embedding_scale")
        or family.embedding_scale(values.integer("embedding_length")),
        float32_norms=family.one_plus_norms,
        windows=_windows(values, family),
        local_rope=None if family.local_theta is None else _local_rope(values, family.local_theta),
        score_scale=_score_scale(values, family),
        score_softcap=_softcap(values, "attn_logit_softcapping", family.score_softcap),
        logit_softcap=_softcap(values, "final_logit_softcapping", family.logit_softcap),
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        whole_qk_norm=family.whole_qk_norm,
        experts=None if family.expert_names is None else _experts(values),
        residual_scale=_multiplier(values, family, "residual_scale") or 1.0,
        logit_divisor=_multiplier(values, family, "logit_scale") or 1.0,
    )


def _mlp_size_key(family: Family) -> str:
    has_own_size = family.expert_names is not None and family.expert_names.has_own_size
    return "expert_feed_forward_length" if has_own_size else "feed_forward_length"


def _experts(values: _Metadata) -> ExpertsConfig:
    """llama.cpp always divides the weights of a token's experts by their sum in the families that we read."""
    if values.get("expert_weights_norm", True) is not True:
        raise ModelLoadError("unsupported: 'expert_weights_norm' is false; expected experts whose weights are normed")
    return ExpertsConfig(values.integer("expert_count"), values.integer("expert_used_count"), norms_weights=True)


def _windows(values: _Metadata, family: Family) -> tuple[int, ...]:
    """Per layer; files do not say which layers have the window."""
    window = values.integer("attention.sliding_window", 0)
    if family.global_every is None or window < 1:
        if family.local_theta is not None:
            raise ModelLoadError(f"a {family.title} model needs a sliding window, got {window}")
        return ()
    if window >= values.integer("context_length") and family.local_theta is None:
        return ()
    every, layers = family.global_every, range(values.integer("block_count"))
    return tuple(window if not every or (layer + 1) % every else 0 for layer in layers)


def _local_rope(values: _Metadata, theta: float) -> RopeConfig:
    return RopeConfig(float(values.number("rope.freq_base_swa", theta)))


def _multiplier(values: _Metadata, family: Family, key: str) -> float | None:
    """Granite's; None where the family has none, or the file does not say it (as llama.cpp, which takes 0 for that)."""
    return float(values.number(key, 0.0)) or None if family.has_multipliers else None


def _score_scale(values: _Metadata, family: Family) -> float | None:
    if family.has_multipliers:
        return _multiplier(values, family, "attention.scale")
    if family.gguf_layers_with_query_scalar != values.integer("block_count"):
        return None
    scalar = values.integer("embedding_length") // max(1, values.integer("attention.head_count"))
    return None if scalar == values.head_size() else float(scalar**-0.5)


def _softcap(values: _Metadata, key: str, default: float | None) -> float:
    """0 where the family has no such cap."""
    return 0.0 if default is None else float(values.number(key, default))


def _vocab_size(stored: Mapping[str, StoredTensor]) -> int:
    name = GGUF_TENSOR_NAMES["embedding"]
    if name not in stored:
        raise ModelLoadError(f"the checkpoint lacks the tensor {name!r}, the embedding")
    return stored[name].shape[0]


class _Metadata:
    """The numbers that describe the model; their keys begin with the architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._prefix = metadata["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> int | float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            got = "nothing" if value is None else f"a {type(value).__name__}"
            raise ModelLoadError(f"the GGUF metadata needs one number for '{self._prefix}.{key}', got {got}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int):
            raise ModelLoadError(f"the GGUF metadata needs a whole number for '{self._prefix}.{key}', got {value!r}")
        return value

    def head_size(self) -> int:
        num_heads = max(1, self.integer("attention.head_count"))  # ModelConfig refuses less
        return self.integer("attention.key_length", self.integer("embedding_length") // num_heads)

    def refuse_unsupported(self, family: Family) -> None:
        """Raise for variants that share an architecture's name but compute something else."""
        if self.integer("expert_count", 0) and family.expert_names is None:
            raise ModelLoadError("unsupported: a mixture of experts; expected a dense model")
        if family.global_every is None and self.integer("attention.sliding_window", 0):
            raise ModelLoadError(
                f"unsupported: '{self._prefix}.attention.sliding_window'; expected a model without one"
            )
        head_size = self.head_size()
        rotated = () if family.has_partial_rotary else ("rope.dimension_count",)
        for key in (*rotated, "attention.value_length"):
            if self.integer(key, head_size) != head_size:
                raise ModelLoadError(
                    f"unsupported: '{self._prefix}.{key}' is {self.get(key)}, but a head has {head_size}"
                )


def _rope_config(values: _Metadata, family: Family, stored: Mapping[str, StoredTensor]) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the context that it serves."""
    context_len = values.integer("context_length")
    rotary_size = values.integer("rope.dimension_count", values.head_size()) if family.has_partial_rotary else None
    rotary_size = None if rotary_size == values.head_size() else rotary_size
    plain = RopeConfig(float(values.number("rope.freq_base", family.theta)), rotary_size=rotary_size)
    kind, factors = values.get("rope.scaling.type", "none"), stored.get(_ROPE_FACTORS)
    if _LONGROPE_FACTORS in stored:
        return _longrope(plain, values, stored[_LONGROPE_FACTORS], context_len)
    if kind == "yarn":
        return _yarn(plain, values, context_len)
    if kind not in ("none", "linear"):
        raise ModelLoadError(f"unsupported rope scaling {kind!r}; supported: none, linear, yarn, Llama 3's factors")
    if factors is not None:
        return replace(plain, frequency_factors=_frequency_factors(factors, values.head_size() // 2)), context_len
    linear = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    return replace(plain, linear_factor=float(linear) if kind == "linear" else 1.0), context_len


def _yarn(plain: RopeConfig, values: _Metadata, context_len: int) -> tuple[RopeConfig, int]:
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if values.number(f"rope.scaling.{key}", 1.0) != 1.0:
            raise ModelLoadError(f"unsupported: YaRN with {key!r} in the file; expected none")
    if values.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise ModelLoadError("unsupported: YaRN with 'yarn_log_multiplier' in the file; expected none")
    original = values.integer("rope.scaling.original_context_length", context_len)
    factor = float(values.number("rope.scaling.factor"))
    beta_fast, beta_slow = (values.number(f"rope.scaling.yarn_beta_{key}", d) for key, d in (("fast", 32), ("slow", 1)))
    scaling = YarnScaling(factor, original, float(beta_fast), float(beta_slow))
    magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return replace(plain, yarn=scaling, attention_factor=magnitude), max(context_len, int(factor * original))


def _longrope(plain: RopeConfig, values: _Metadata, factors: StoredTensor, context_len: int) -> tuple[RopeConfig, int]:
    """With the short factors, so within the original context (`hf_attention`)."""
    size = plain.rotary_size or values.head_size()
    original = values.integer("rope.scaling.original_context_length", context_len)
    rope = replace(
        plain,
        longrope_factors=_frequency_factors(factors, size // 2, _LONGROPE_FACTORS),
        attention_factor=float(values.number("rope.scaling.attn_factor", 1.0)),
    )
    return rope, min(context_len, original)


def _frequency_factors(factors: StoredTensor, expected_len: int, name: str = _ROPE_FACTORS) -> tuple[float, ...]:
    if factors.shape != (expected_len,):
        raise ModelLoadError(
            f"the tensor {name!r} has shape {list(factors.shape)}, but the config asks for {[expected_len]}"
        )
    return tuple(factors.read_rows(0, expected_len).tolist())
