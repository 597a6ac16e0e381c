"""The description of a decoder: sizes, rotary embedding, which optional parts it has.

The checkpoint readers write it and every backend reads it: nothing below `backends/` looks at a config file.
Dimension letters, here and everywhere: T tokens, S prefix tokens, I items, N query heads, K KV heads, G query
heads per KV head, H head size, D model size, F MLP size, E experts, V vocabulary, L labels.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError
from prefixwise.contract.scores import ClassActivation

Activation = Literal["silu", "gelu_tanh"]
Pooling = Literal["last", "first", "mean"]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretch of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's stretch: low frequencies are divided by the factor, high ones stay, those between are blended."""

    factor: float
    original_context_len: int
    beta_fast: float = 32.0  # rotations within the original context from which on a frequency stays
    beta_slow: float = 1.0  # rotations up to which it is divided
    is_truncated: bool = True  # are the first and the last blended dimension whole numbers?


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. At most one of the ways to scale it is set."""

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    frequency_factors: tuple[float, ...] | None = None  # GGUF stores Llama 3's scaling as divisors, [H / 2]
    yarn: YarnScaling | None = None
    longrope_factors: tuple[float, ...] | None = None  # LongRoPE's divisors, one for each frequency
    attention_factor: float = 1.0  # YaRN and LongRoPE multiply rotated queries and keys by it
    # How many numbers of a head are rotated; None: all. See `checkpoint.with_rotary_halves`.
    rotary_size: int | None = None

    def __post_init__(self) -> None:
        scaling = () if self.llama3 is None else astuple(self.llama3)
        if self.yarn is not None:
            scaling += astuple(self.yarn)[:4]
        factors = (*(self.frequency_factors or ()), *(self.longrope_factors or ()))
        for number in (self.theta, self.linear_factor, self.attention_factor, *scaling, *factors):
            if not 0 < number < math.inf:
                raise ModelLoadError(f"the numbers of the rotary embedding must be positive, got {number}")
        if self.llama3 is not None and self.llama3.low_freq_factor == self.llama3.high_freq_factor:
            raise ModelLoadError("the rotary embedding's low_freq_factor and high_freq_factor must differ")

    def inverse_frequencies(self, head_size: int) -> NDArray[np.float32]:
        """Radians per position, [H / 2], rounded to float32 where Hugging Face transformers rounds: a bit of
        difference here is a visible angle after some thousand positions. The power itself is of float64,
        because numpy's float32 power is off by a bit in one case of six, torch's almost never."""
        rotary_size = self.rotary_size or head_size
        found = np.zeros(head_size // 2, np.float32)
        found[: rotary_size // 2] = self._rotated_frequencies(rotary_size)
        return found

    def magnitudes(self, head_size: int) -> NDArray[np.float32] | None:
        """[H / 2]: what cosines and sines are multiplied by; None: by nothing."""
        if self.attention_factor == 1.0:
            return None
        is_rotated = np.arange(head_size // 2) < (self.rotary_size or head_size) // 2
        return np.where(is_rotated, np.float32(self.attention_factor), np.float32(1.0))

    def _rotated_frequencies(self, size: int) -> NDArray[np.float32]:
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        powers = np.power(np.float64(self.theta), exponents.astype(np.float64)).astype(np.float32)
        frequencies: NDArray[np.float32] = np.float32(1.0) / powers
        if self.llama3 is not None:
            return _scale_llama3(frequencies, self.llama3)
        if self.yarn is not None:
            return _scale_yarn(powers, self.yarn, self.theta)
        if self.longrope_factors is not None:
            return np.asarray(np.float32(1.0) / (np.asarray(self.longrope_factors, np.float32) * powers), np.float32)
        if self.frequency_factors is not None:
            return np.asarray(frequencies / np.asarray(self.frequency_factors, np.float32), np.float32)
        return np.asarray(frequencies / np.float32(self.linear_factor), np.float32)


def _scale_llama3(frequencies: NDArray[np.float32], scaling: Llama3Scaling) -> NDArray[np.float32]:
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_context_len / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    is_long = wavelengths > scaling.original_context_len / low
    is_short = wavelengths < scaling.original_context_len / high
    scaled = np.where(is_long, frequencies / scaling.factor, np.where(is_short, frequencies, blended))
    return scaled.astype(np.float32)


def _scale_yarn(powers: NDArray[np.float32], scaling: YarnScaling, theta: float) -> NDArray[np.float32]:
    """`powers`: radians per position are their reciprocals."""
    size = 2 * len(powers)

    def dimension_of(rotations: float) -> float:
        """The dimension whose frequency gives so many rotations within the original context."""
        return size * math.log(scaling.original_context_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (np.arange(len(powers), dtype=np.float32) - np.float32(low)) / np.float32(high - low or 0.001)
    kept = np.float32(1.0) - np.clip(ramp, 0, 1)
    stretched, plain = np.float32(1.0) / (np.float32(scaling.factor) * powers), np.float32(1.0) / powers
    return np.asarray(stretched * (1 - kept) + plain * kept, np.float32)


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of each layer's MLP: a router sends every token to a few of them."""

    num_experts: int  # E
    experts_per_token: int
    norms_weights: bool  # are the weights of a token's experts divided by their sum?

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelLoadError(
                f"a token must have 1 to {self.num_experts} of {self.num_experts} experts, got {self.experts_per_token}"
            )


_SIZES = (
    "vocab_size", "model_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "max_context_len",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Everything that a backend must know to run the model."""

    family: str  # a key of `families.FAMILIES`
    vocab_size: int  # V: rows of the embedding, so tokens added later count
    model_size: int  # D
    mlp_size: int  # F: of the MLP, or of one expert
    num_layers: int
    num_heads: int  # N
    num_kv_heads: int  # K
    head_size: int  # H
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3: RMS norm of each query and key head
    tied_head: bool  # the head is the embedding
    max_context_len: int
    activation: Activation = "silu"  # of the MLP's gate
    embedding_scale: float = 1.0  # embeddings are multiplied by this, rounded to their dtype: Gemma
    float32_norms: bool = False  # norms' weights stay in float32 whatever the dtype: Gemma's are 1 + a small number
    num_classes: int = 0  # rows of a classifier's head; 0: the head gives the logits of the vocabulary
    id2label: tuple[str, ...] = ()  # the names of the classes; (): LABEL_0, LABEL_1, ...
    class_activation: ClassActivation = "softmax"  # from the logits of the classes to what `/classify` returns
    # Per layer: how many tokens a token sees, itself included; 0: all before it. (): every layer sees all.
    windows: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None  # of layers with a window; None: `rope`
    score_scale: float | None = None  # of attention scores; None: 1 / sqrt(H)
    score_softcap: float = 0.0  # an attention score s becomes softcap * tanh(s / softcap): Gemma 2; 0: it stays s
    logit_softcap: float = 0.0  # the same of the head's logits: Gemma 2
    pre_norms: bool = True  # norms of the inputs of attention and MLP; OLMo 2 has none
    post_norms: bool = False  # norms of the outputs of attention and MLP, before they are added: Gemma 2 and 3, OLMo 2
    whole_qk_norm: bool = False  # the QK norm is one of all query heads and one of all key heads: OLMo 2
    experts: ExpertsConfig | None = None  # of every layer: Qwen3-MoE, Mixtral; None: a dense model
    residual_scale: float = 1.0  # outputs of attention and MLP are multiplied by this before they are added: Granite
    logit_divisor: float = 1.0  # logits are divided by this: Granite, and the temperature of bidirectional rerankers
    # False: a token sees its whole sequence, also the tokens after it, so sequences share no prefix: llama_bidirec.
    is_causal: bool = True
    pooling: Pooling = "last"  # the hidden state that the head reads: of one token, or the mean of the sequence's

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ModelLoadError(f"the model's {name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.norm_eps < math.inf:
            raise ModelLoadError(f"the model's norm_eps must be a positive number, got {self.norm_eps}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                "the number of query heads must be a multiple of the KV heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.id2label and len(self.id2label) != self.num_classes:
            raise ModelLoadError(
                f"the classifier's head has {self.num_classes} rows, but the config names {len(self.id2label)} labels"
            )
        for name in ("score_scale", "score_softcap", "logit_softcap"):
            number = getattr(self, name)
            if number is not None and not 0 <= number < math.inf:
                raise ModelLoadError(f"the model's {name} must be a positive number, got {number}")
        for name in ("embedding_scale", "residual_scale", "logit_divisor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelLoadError(f"the model's {name} must be above 0, got {getattr(self, name)}")
        if self.is_causal and self.pooling != "last":
            raise ModelLoadError(f"a causal model reads the last token of a sequence, got pooling {self.pooling!r}")
        for rope in (self.rope, self.local_rope):
            _check_rotary_size(rope, self.head_size)
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise ModelLoadError(f"{self.num_layers} layers need as many sliding windows, got {list(self.windows)}")

    @property
    def num_head_rows(self) -> int:
        """The number of logits, and so the bound of label ids."""
        return self.num_classes or self.vocab_size

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of each layer, 0 for none."""
        return self.windows or (0,) * self.num_layers

    @property
    def has_plain_attention(self) -> bool:
        """Has no layer a window, and are scores plain? Many kernels compute nothing else."""
        return not any(self.windows) and self.score_scale is None and not self.score_softcap

    @property
    def class_labels(self) -> tuple[str, ...]:
        """The names of a classifier's classes, in the order of its head's rows."""
        return self.id2label or tuple(f"LABEL_{row}" for row in range(self.num_classes))

    @property
    def num_parameters(self) -> int:
        per_layer = sum(math.prod(shape) for shape in layer_parameter_shapes(self).values())
        one_layer = replace(self, num_layers=1, windows=())
        with_one_layer = sum(math.prod(shape) for shape in parameter_shapes(one_layer).values())
        return with_one_layer + (self.num_layers - 1) * per_layer


def _check_rotary_size(rope: RopeConfig | None, head_size: int) -> None:
    if rope is None:
        return
    size, factors = rope.rotary_size or head_size, rope.frequency_factors or rope.longrope_factors
    if size % 2 or not 0 < size <= head_size:
        raise ModelLoadError(f"{size} numbers of each head are rotated, expected an even number up to {head_size}")
    if factors is not None and len(factors) != size // 2:
        raise ModelLoadError(f"the rotary embedding has {size // 2} frequencies, but {len(factors)} factors")


def layer_parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer by their canonical names; matrices are [rows out, columns in]."""
    d, f, h = config.model_size, config.mlp_size, config.head_size
    q_rows, kv_rows = config.num_heads * h, config.num_kv_heads * h
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (d,),
        "q": (q_rows, d),
        "k": (kv_rows, d),
        "v": (kv_rows, d),
        "o": (d, q_rows),
        "mlp_norm": (d,),
        "gate": (f, d),
        "up": (f, d),
        "down": (d, f),
    }
    if config.experts is not None:  # their matrices lie one above the other
        num_experts = config.experts.num_experts
        shapes |= {"router": (num_experts, d), "gate": (num_experts * f, d)}
        shapes |= {"up": (num_experts * f, d), "down": (num_experts * d, f)}
    if not config.pre_norms:
        del shapes["attention_norm"], shapes["mlp_norm"]
    if config.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if config.qk_norm:
        shapes |= (
            {"q_norm": (q_rows,), "k_norm": (kv_rows,)} if config.whole_qk_norm else {"q_norm": (h,), "k_norm": (h,)}
        )
    if config.post_norms:
        shapes |= {"post_attention_norm": (d,), "post_mlp_norm": (d,)}
    return shapes


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter by its canonical name: `embedding`, `final_norm`, `head`, `layers.0.q`, ..."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, config.model_size),
        "final_norm": (config.model_size,),
    }
    if not config.tied_head:
        shapes["head"] = (config.num_head_rows, config.model_size)
    per_layer = layer_parameter_shapes(config)
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    return shapes
