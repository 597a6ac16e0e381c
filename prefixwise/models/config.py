"""The description of a decoder: sizes, rotary embedding, which optional parts it has.

The checkpoint readers write it and every backend reads it: nothing below `backends/` looks at a config file.
Dimension letters, here and everywhere: T tokens, S prefix tokens, I items, N query heads, K KV heads, G query
heads per KV head, H head size, D model size, F MLP size, V vocabulary, L labels.
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


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretch of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. At most one of the three ways to scale it is set."""

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    frequency_factors: tuple[float, ...] | None = None  # GGUF stores Llama 3's scaling as divisors, [H / 2]

    def __post_init__(self) -> None:
        scaling = () if self.llama3 is None else astuple(self.llama3)
        for number in (self.theta, self.linear_factor, *scaling, *(self.frequency_factors or ())):
            if not 0 < number < math.inf:
                raise ModelLoadError(f"the numbers of the rotary embedding must be positive, got {number}")
        if self.llama3 is not None and self.llama3.low_freq_factor == self.llama3.high_freq_factor:
            raise ModelLoadError("the rotary embedding's low_freq_factor and high_freq_factor must differ")

    def inverse_frequencies(self, head_size: int) -> NDArray[np.float32]:
        """Radians per position, [H / 2], rounded to float32 where Hugging Face transformers rounds: a bit of
        difference here is a visible angle after some thousand positions. The power itself is of float64,
        because numpy's float32 power is off by a bit in one case of six, torch's almost never."""
        exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
        powers = np.power(np.float64(self.theta), exponents.astype(np.float64)).astype(np.float32)
        frequencies: NDArray[np.float32] = np.float32(1.0) / powers
        if self.llama3 is not None:
            return _scale_llama3(frequencies, self.llama3)
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


_SIZES = (
    "vocab_size", "model_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "max_context_len",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Everything that a backend must know to run the model."""

    family: str  # a key of `families.FAMILIES`
    vocab_size: int  # V: rows of the embedding, so tokens added later count
    model_size: int  # D
    mlp_size: int  # F
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

    @property
    def num_head_rows(self) -> int:
        """The number of logits, and so the bound of label ids."""
        return self.num_classes or self.vocab_size

    @property
    def class_labels(self) -> tuple[str, ...]:
        """The names of a classifier's classes, in the order of its head's rows."""
        return self.id2label or tuple(f"LABEL_{row}" for row in range(self.num_classes))

    @property
    def num_parameters(self) -> int:
        per_layer = sum(math.prod(shape) for shape in layer_parameter_shapes(self).values())
        with_one_layer = sum(math.prod(shape) for shape in parameter_shapes(replace(self, num_layers=1)).values())
        return with_one_layer + (self.num_layers - 1) * per_layer


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
    if config.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if config.qk_norm:
        shapes |= {"q_norm": (h,), "k_norm": (h,)}
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
