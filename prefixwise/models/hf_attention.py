"""What a config.json says about attention (direction, sliding windows, scores, rotary embeddings), and its scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from prefixwise.contract.errors import ModelLoadError, describe
from prefixwise.models.config import Llama3Scaling, Pooling, RopeConfig, YarnScaling
from prefixwise.models.families import FAMILIES, Family

_LOCAL, _GLOBAL = _LAYER_KINDS = "sliding_attention", "full_attention"  # of `layer_types`
_MAX_WINDOW_LAYERS = 28  # Qwen's default
_LEGACY_LONGROPE = ("su", "yarn")  # as Phi-3's first configs call it


def integer(value: object, default: int | None = None) -> int:
    """The number; the default for null. Raises ValueError for text and for numbers that are not whole."""
    found = number(value, default)
    if found != int(found):
        raise ValueError(f"expected a whole number, got {describe(value)}")
    return int(found)


def number(value: object, default: float | None = None) -> float:
    """The number; the default for null. Raises ValueError for text, true and false."""
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {describe(value)}")
    return value


def check_attention(raw: Mapping[str, Any], architectures: Sequence[object]) -> None:
    """Raise ModelLoadError for a model whose tokens see those after them, unless its family is made for that."""
    known = [name for family in FAMILIES.values() if family.is_bidirectional for name in family.hf_classifiers]
    named = next((str(each) for each in architectures if "Bidirectional" in str(each)), None)
    if named in known and raw.get("is_causal"):
        raise ModelLoadError(f"unsupported: {named} with 'is_causal'; expected bidirectional attention")
    if raw.get("use_bidirectional_attention"):
        named = "'use_bidirectional_attention' is set"
    elif named is None and (raw.get("model_type") == "llama_bidirec" or raw.get("is_causal") is False):
        named = f"model_type {raw.get('model_type')!r} with bidirectional attention"
    if named is not None and named not in known:
        raise ModelLoadError(f"unsupported: {named}; expected a causal model, or a reranker: {', '.join(known)}")


def read_windows(raw: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Per layer its sliding window, 0 for none; () where no layer has one that is shorter than the context.

    `layer_types` says which layers have one. Configs without it mean every layer (Mistral), all but every n-th
    (Gemma 2 and 3), or those behind `max_window_layers` if `use_sliding_window` is on (Qwen).
    """
    window, longest = integer(raw.get("sliding_window"), 0), integer(raw["max_position_embeddings"])
    is_used = bool(raw.get("use_sliding_window")) if family.has_window_switch else family.global_every is not None
    if family.local_theta is not None and window < 1:
        raise ModelLoadError(f"config.json: a {family.title} model needs a sliding_window of at least 1, got {window}")
    # Layers with a rotary embedding of their own are told by their window, however long it is.
    if not is_used or window < 1 or (window >= longest and family.local_theta is None):
        return ()
    is_local = _local_layers(raw, family, integer(raw["num_hidden_layers"]))
    return tuple(window if local else 0 for local in is_local) if any(is_local) else ()


def _local_layers(raw: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    kinds = raw.get("layer_types")
    if kinds is None and family.has_window_switch:
        first = integer(raw.get("max_window_layers"), _MAX_WINDOW_LAYERS)
        return [layer >= first for layer in range(num_layers)]
    if kinds is None:
        every = integer(raw.get("sliding_window_pattern"), family.global_every)
        return [not every or (layer + 1) % every > 0 for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _LAYER_KINDS for kind in kinds):
        raise ModelLoadError(
            f"config.json: layer_types must name one of {', '.join(_LAYER_KINDS)} for each of the {num_layers} layers, "
            f"got {describe(kinds)}"
        )
    return [kind == _LOCAL for kind in kinds]


def read_score_scale(raw: Mapping[str, Any], family: Family) -> float | None:
    """None for 1 / sqrt(H), whether the config says it or not."""
    if family.has_multipliers:
        return float(number(raw.get("attention_multiplier"), 1.0))
    if not family.has_query_scalar:
        return None
    scalar = number(raw.get("query_pre_attn_scalar"), 256)
    if not 0 < scalar < math.inf:
        raise ModelLoadError(f"config.json: query_pre_attn_scalar must be a positive number, got {scalar}")
    return None if scalar == raw.get("head_dim") else float(scalar**-0.5)


def read_softcap(raw: Mapping[str, Any], name: str, default: float | None) -> float:
    """0 for null, and where the family has no such cap."""
    return 0.0 if default is None else float(number(raw.get(name, default), 0.0))


_POOLINGS: dict[str, Pooling] = {"avg": "mean", "cls": "first", "last": "last"}  # by their names in NVIDIA's configs


def read_pooling(raw: Mapping[str, Any], family: Family) -> Pooling:
    """What the head of a bidirectional model reads."""
    if not family.is_bidirectional:
        return "last"
    stated = raw.get("pooling", "avg")
    if stated not in _POOLINGS:
        raise ModelLoadError(f"unsupported pooling {describe(stated)}; supported: {', '.join(_POOLINGS)}")
    return _POOLINGS[stated]


def read_embedding_scale(raw: Mapping[str, Any], family: Family, model_size: int) -> float:
    """Granite's, or that of the family."""
    if family.has_multipliers:
        return float(number(raw.get("embedding_multiplier"), 1.0))
    return family.embedding_scale(model_size)


def read_logit_divisor(raw: Mapping[str, Any], family: Family) -> float:
    """Granite's, or the temperature of a bidirectional reranker."""
    name = "logits_scaling" if family.has_multipliers else "temperature" if family.is_bidirectional else None
    return 1.0 if name is None else float(number(raw.get(name), 1.0))


class Rope(NamedTuple):
    """The rotary embeddings of a model, and the context that they serve."""

    of_layers: RopeConfig
    of_local_layers: RopeConfig | None  # None: the same
    max_context_len: int


def read_rope(raw: Mapping[str, Any], family: Family, head_size: int) -> Rope:
    """Reads both spellings: `rope_theta` + `rope_scaling`, and `rope_parameters` of transformers 5."""
    longest = integer(raw["max_position_embeddings"])
    stated = (raw.get("rope_parameters"), raw.get("rope_scaling"))
    parameters = _object(next((each for each in stated if each is not None), {}))
    if family.local_theta is None:
        return _scaled(raw, parameters, family, head_size, longest)
    # By the kind of the layer; older configs have the scaling of the global layers alone.
    whole = _object(parameters.get(_GLOBAL) or {}) if _GLOBAL in parameters or _LOCAL in parameters else parameters
    local = {"rope_theta": raw.get("rope_local_base_freq"), **_object(parameters.get(_LOCAL) or {})}
    found = _scaled(raw, whole, family, head_size, longest)
    local_rope = _scaled({"rope_theta": family.local_theta}, local, family, head_size, longest).of_layers
    return found._replace(of_local_layers=local_rope)


def _object(parameters: object) -> Mapping[str, Any]:
    if not isinstance(parameters, Mapping):
        raise ModelLoadError(f"config.json: rope_parameters must be an object, got {describe(parameters)}")
    return parameters


def _scaled(
    raw: Mapping[str, Any], parameters: Mapping[str, Any], family: Family, head_size: int, longest: int
) -> Rope:
    theta = float(number(parameters.get("rope_theta"), number(raw.get("rope_theta"), family.theta)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    plain = RopeConfig(theta, rotary_size=_rotary_size(raw, parameters, family, head_size))
    if kind == "longrope" or (family.has_partial_rotary and kind in _LEGACY_LONGROPE):
        return _longrope(plain, raw, parameters, longest)
    if kind == "default":
        return Rope(plain, None, longest)
    if kind == "linear":
        return Rope(replace(plain, linear_factor=float(number(parameters["factor"]))), None, longest)
    if kind == "llama3":
        return Rope(replace(plain, llama3=_llama3_scaling(parameters)), None, longest)
    if kind == "yarn":
        yarn = _yarn_scaling(parameters, longest)
        rope = replace(plain, yarn=yarn, attention_factor=_yarn_attention_factor(parameters, yarn.factor))
        return Rope(rope, None, max(longest, int(yarn.factor * yarn.original_context_len)))
    raise ModelLoadError(f"unsupported rope scaling {kind!r}; supported: default, linear, llama3, yarn, longrope")


def _rotary_size(raw: Mapping[str, Any], parameters: Mapping[str, Any], family: Family, head_size: int) -> int | None:
    if not family.has_partial_rotary:
        return None
    share = number(parameters.get("partial_rotary_factor"), number(raw.get("partial_rotary_factor"), 1.0))
    size = int(head_size * share)
    return None if size == head_size else size


def _longrope(plain: RopeConfig, raw: Mapping[str, Any], parameters: Mapping[str, Any], longest: int) -> Rope:
    """A sequence takes the long factors as a whole where it exceeds the original context. Items of many lengths share
    the keys of one prefix, so the short factors serve all, and the original context is the limit."""
    stated = parameters.get("original_max_position_embeddings", raw.get("original_max_position_embeddings"))
    original = integer(stated, longest)
    factor = number(parameters.get("factor"), longest / max(1, original))
    inferred = 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = parameters["short_factor"]
    if not isinstance(factors, list) or not factors:
        raise ModelLoadError(f"config.json: short_factor must be a list of numbers, got {describe(factors)}")
    return Rope(
        replace(
            plain,
            longrope_factors=tuple(float(number(each)) for each in factors),
            attention_factor=float(number(parameters.get("attention_factor"), inferred)),
        ),
        None,
        min(longest, original),
    )


def _llama3_scaling(parameters: Mapping[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(number(parameters["factor"])),
        low_freq_factor=float(number(parameters["low_freq_factor"])),
        high_freq_factor=float(number(parameters["high_freq_factor"])),
        original_context_len=integer(parameters["original_max_position_embeddings"]),
    )


def _yarn_scaling(parameters: Mapping[str, Any], longest: int) -> YarnScaling:
    original = integer(parameters.get("original_max_position_embeddings"), longest)
    return YarnScaling(
        factor=float(number(parameters.get("factor"), longest / max(1, original))),
        original_context_len=original,
        beta_fast=float(number(parameters.get("beta_fast"), 32.0)),
        beta_slow=float(number(parameters.get("beta_slow"), 1.0)),
        is_truncated=bool(parameters.get("truncate", True)),
    )


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    stated = parameters.get("attention_factor")
    if stated is not None:
        return float(number(stated))
    scale, of_all = (number(parameters.get(name), 0.0) for name in ("mscale", "mscale_all_dim"))
    if scale and of_all:
        return _yarn_magnitude(factor, scale) / _yarn_magnitude(factor, of_all)
    return _yarn_magnitude(factor, 1.0)


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
