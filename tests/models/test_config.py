from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.config import Llama3Scaling, ModelConfig, RopeConfig, YarnScaling, parameter_shapes
from prefixwise.models.sources import open_checkpoint
from tests.checkpoints import FAMILY_NAMES, LLAMA3_ROPE, read_hf_tensors

TWO_BITS = 2.5e-7  # torch and numpy may round a power differently in the last bits

CONFIG = ModelConfig(
    family="llama",
    vocab_size=10,
    model_size=4,
    mlp_size=6,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    norm_eps=1e-6,
    rope=RopeConfig(10_000.0),
    qkv_bias=False,
    qk_norm=False,
    tied_head=True,
    max_context_len=128,
)
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=1024)


@pytest.mark.parametrize("head_size", [16, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize(
    ("scaling", "fields"),
    [
        ({"rope_type": "default"}, {}),
        ({"rope_type": "linear", "factor": 4.0}, {"linear_factor": 4.0}),
        (LLAMA3_ROPE, {"llama3": LLAMA3}),
        (YARN_ROPE, {"yarn": YarnScaling(4.0, 1024), "attention_factor": 0.1 * math.log(4) + 1}),
        (
            {**YARN_ROPE, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.5},
            {"yarn": YarnScaling(4.0, 1024, 16.0, 2.0, is_truncated=False), "attention_factor": 1.5},
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn with everything"],
)
def test_frequencies_are_those_of_transformers(
    head_size: int, theta: float, scaling: dict[str, Any], fields: dict[str, Any]
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        max_position_embeddings=32_768,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    embedding, rope = LlamaRotaryEmbedding(config), RopeConfig(theta, **fields)
    got, magnitudes = rope.inverse_frequencies(head_size), rope.magnitudes(head_size)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, embedding.inv_freq.numpy(), rtol=TWO_BITS)
    expected = 1.0 if magnitudes is None else magnitudes
    np.testing.assert_allclose(expected, embedding.attention_scaling, rtol=TWO_BITS)


def test_numbers_that_are_not_rotated_have_a_frequency_of_zero_and_keep_their_size() -> None:
    rope = RopeConfig(10_000.0, longrope_factors=(1.0, 2.0, 4.0), attention_factor=1.25, rotary_size=6)
    plain = RopeConfig(10_000.0).inverse_frequencies(6)
    np.testing.assert_allclose(rope.inverse_frequencies(10), [*(plain / [1, 2, 4]), 0, 0], rtol=TWO_BITS)
    magnitudes = rope.magnitudes(10)
    assert magnitudes is not None and magnitudes.dtype == np.float32
    assert magnitudes.tolist() == [1.25, 1.25, 1.25, 1.0, 1.0]


def test_llama3_scaling_changes_some_frequencies_and_keeps_others() -> None:
    plain = RopeConfig(500_000.0).inverse_frequencies(64)
    ratio = RopeConfig(500_000.0, llama3=LLAMA3).inverse_frequencies(64) / plain
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 32)
    assert ((ratio > 1 / 31) & (ratio < 0.99)).any()


def test_frequency_factors_divide() -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    plain = RopeConfig(10_000.0).inverse_frequencies(8)
    got = RopeConfig(10_000.0, frequency_factors=factors).inverse_frequencies(8)
    np.testing.assert_array_equal(got, plain / np.array(factors, np.float32))


def test_a_dense_layer_has_nine_parameters() -> None:
    shapes = parameter_shapes(CONFIG)
    assert shapes["layers.1.q"] == (32, 4)
    assert shapes["layers.1.k"] == shapes["layers.1.v"] == (16, 4)
    assert shapes["layers.1.o"] == (4, 32)
    assert shapes["layers.0.gate"] == shapes["layers.0.up"] == (6, 4)
    assert shapes["layers.0.down"] == (4, 6)
    assert len(shapes) == 2 + 2 * 9
    assert "head" not in shapes


def test_optional_parameters_follow_the_config() -> None:
    shapes = parameter_shapes(replace(CONFIG, qkv_bias=True, qk_norm=True, tied_head=False))
    assert shapes["layers.0.q_bias"] == (32,)
    assert shapes["layers.0.k_bias"] == shapes["layers.0.v_bias"] == (16,)
    assert shapes["layers.0.q_norm"] == shapes["layers.0.k_norm"] == (8,)
    assert shapes["head"] == (10, 4)


def test_a_classifier_has_a_head_of_few_rows() -> None:
    config = replace(CONFIG, num_classes=2, tied_head=False)
    assert parameter_shapes(config)["head"] == (2, 4)
    assert (config.num_head_rows, CONFIG.num_head_rows) == (2, 10)


def test_norms_before_or_behind_each_part() -> None:
    after = parameter_shapes(replace(CONFIG, pre_norms=False, post_norms=True, qk_norm=True, whole_qk_norm=True))
    assert "layers.0.attention_norm" not in after and "layers.0.mlp_norm" not in after
    assert after["layers.0.post_attention_norm"] == after["layers.0.post_mlp_norm"] == (4,)
    assert (after["layers.0.q_norm"], after["layers.0.k_norm"]) == ((32,), (16,))


def test_every_layer_needs_a_window_or_none() -> None:
    assert replace(CONFIG, windows=(8, 0)).layer_windows == (8, 0)
    assert CONFIG.layer_windows == (0, 0)
    for windows in ((8,), (8, -1)):
        with pytest.raises(ModelLoadError, match="2 layers need as many sliding windows"):
            replace(CONFIG, windows=windows)


@pytest.mark.parametrize("field", ["score_scale", "score_softcap", "logit_softcap"])
def test_scales_and_caps_are_numbers(field: str) -> None:
    fields: dict[str, Any] = {field: math.nan}
    with pytest.raises(ModelLoadError, match=f"the model's {field} must be a positive number, got nan"):
        replace(CONFIG, **fields)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_num_parameters_counts_what_is_stored(family: str, hf_folders: dict[str, Path]) -> None:
    stored = sum(values.size for values in read_hf_tensors(hf_folders[family]).values())
    assert open_checkpoint(hf_folders[family]).config.num_parameters == stored


def test_query_heads_must_be_a_multiple_of_kv_heads() -> None:
    with pytest.raises(ModelLoadError, match="multiple of the KV heads, got 4 and 3"):
        replace(CONFIG, num_kv_heads=3)


@pytest.mark.parametrize("size", ["num_layers", "num_heads", "num_kv_heads", "head_size", "max_context_len"])
def test_a_size_of_nothing_is_named(size: str) -> None:
    nothing: dict[str, Any] = {size: 0}
    with pytest.raises(ModelLoadError, match=f"the model's {size} must be at least 1, got 0"):
        replace(CONFIG, **nothing)
