from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prefixwise.contract.errors import ModelLoadError, TokenizerError
from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.config import Llama3Scaling, ModelConfig, RopeConfig, YarnScaling
from prefixwise.models.families import FAMILIES, hf_tensor_names, stored_name
from prefixwise.models.hf_folder import open_hf_folder, read_tokenizer_folder
from prefixwise.models.sources import open_checkpoint
from tests.checkpoints import (
    FAMILY_NAMES,
    add_tokenizer,
    make_classifier,
    make_hf_checkpoint,
    read_hf_tensors,
    stacked_experts,
)

Q = "model.layers.0.self_attn.q_proj.weight"


def assert_holds(checkpoint: Checkpoint, folder: Path) -> None:
    stored, family = read_hf_tensors(folder), FAMILIES[checkpoint.config.family]
    if family.name == "phi3":
        stored = split_phi3(stored, checkpoint.config)
    if family.expert_names is not None:
        stored = {
            name: values.reshape(-1, values.shape[-1]) if values.ndim == 3 else values
            for name, values in stacked_experts(stored).items()
        }
    assert len(checkpoint.tensors) == len(stored)
    for key, tensor in checkpoint.tensors.items():
        rows = tensor.read_rows(0, tensor.shape[0])
        expected = stored[stored_name(key, hf_tensor_names(family), "model.layers")]
        if family.name.startswith("gemma") and key.endswith("norm"):
            expected = np.float32(1) + expected
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(tensor.read_rows(3, 9), expected[3:9])
        assert tensor.read_rows(2, 2).shape == (0, *expected.shape[1:])


def split_phi3(stored: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Q, K, V, gate and up by themselves, with the rotated pairs of a head (12 of its 16 numbers) half a head apart."""
    found: dict[str, Any] = {}
    order = [0, 1, 2, 3, 4, 5, 12, 13, 6, 7, 8, 9, 10, 11, 14, 15]
    for name, values in stored.items():
        if name.endswith("qkv_proj.weight"):
            q, k, v = np.split(values, [64, 96])
            q, k = (each.reshape(-1, config.head_size, 64)[:, order].reshape(-1, 64) for each in (q, k))
            parts = {"q_proj": q, "k_proj": k, "v_proj": v}
            found |= {name.replace("qkv_proj", each): part for each, part in parts.items()}
        elif name.endswith("gate_up_proj.weight"):
            gate, up = np.split(values, 2)
            found |= {name.replace("gate_up_proj", "gate_proj"): gate, name.replace("gate_up_proj", "up_proj"): up}
        else:
            found[name] = values
    return found


def edit_config(folder: Path, **changes: Any) -> Path:
    """Set fields of config.json; a change to `...` removes the field."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_hf_checkpoint(tmp_path / "llama", "llama")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_is_read_tensor_by_tensor(family: str, hf_folders: dict[str, Path]) -> None:
    assert_holds(open_hf_folder(hf_folders[family], family), hf_folders[family])


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_sharded_folders_hold_the_same(family: str, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    sharded = make_hf_checkpoint(tmp_path / family, family, sharded=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_holds(open_hf_folder(sharded, family), hf_folders[family])


def test_the_config_of_qwen3_says_what_sets_it_apart(hf_folders: dict[str, Path]) -> None:
    config = open_checkpoint(hf_folders["qwen3"]).config
    assert (config.family, config.qk_norm, config.qkv_bias, config.tied_head) == ("qwen3", True, False, True)
    assert (config.num_heads, config.num_kv_heads, config.head_size, config.model_size) == (4, 2, 32, 64)
    assert config.rope == RopeConfig(1_000_000.0)


def test_the_config_of_qwen2_has_biases(hf_folders: dict[str, Path]) -> None:
    config = open_checkpoint(hf_folders["qwen2"]).config
    assert (config.family, config.qk_norm, config.qkv_bias) == ("qwen2", False, True)


def test_the_config_of_gemma_says_what_sets_it_apart(hf_folders: dict[str, Path]) -> None:
    config = open_checkpoint(hf_folders["gemma"]).config
    assert (config.family, config.activation, config.embedding_scale) == ("gemma", "gelu_tanh", 8.0)
    assert (config.float32_norms, config.tied_head, config.num_classes) == (True, True, 0)
    assert (config.num_heads, config.num_kv_heads, config.head_size, config.model_size) == (4, 1, 32, 64)
    others = [open_checkpoint(hf_folders[family]).config for family in FAMILY_NAMES if "gemma" not in family]
    assert {(other.activation, other.float32_norms) for other in others} == {("silu", False)}
    assert {other.family for other in others if other.embedding_scale != 1.0} == {"granite"}


def test_the_config_of_granite_has_four_factors(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    config = open_checkpoint(hf_folders["granite"]).config
    assert (config.embedding_scale, config.score_scale) == (6.0, 0.2)
    assert (config.residual_scale, config.logit_divisor) == (0.6, 0.75)
    folder = edit_config(make_hf_checkpoint(tmp_path, "granite"), logits_scaling=0)
    with pytest.raises(ModelLoadError, match="logit_divisor must be above 0, got 0"):
        open_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gemmas_norms_are_one_more_than_is_stored(dtype: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    file = make_hf_checkpoint(tmp_path, "gemma") / "model.safetensors"
    stored = {name: values.to(getattr(torch, dtype)) for name, values in load_torch(file).items()}
    save_torch(stored, file)
    tensor = open_checkpoint(tmp_path).tensors["layers.1.mlp_norm"]
    expected = (1 + stored["model.layers.1.post_attention_layernorm.weight"].float()).numpy()
    assert (tensor.dtype, tensor.shape) == ("float32", (64,))
    np.testing.assert_array_equal(tensor.read_rows(5, 23), expected[5:23])


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "gelu"},  # as the first releases have it, and mean the approximation
        {"hidden_act": "gelu", "hidden_activation": None},
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_act": ..., "hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_act": ...},
    ],
)
def test_gemmas_activation_has_several_spellings(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = edit_config(make_hf_checkpoint(tmp_path, "gemma"), **fields)
    assert open_checkpoint(folder).config.activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "silu"}, "unsupported activation 'silu'; supported: gelu_pytorch_tanh"),
        ({"hidden_activation": "gelu"}, "unsupported activation 'gelu'; supported: gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "'use_bidirectional_attention' is set; expected a causal model"),
        (
            {"architectures": ["LlamaBidirectionalForSequenceClassification"], "model_type": "llama_bidirec"},
            "the checkpoint lacks the tensor 'score.weight', the head of a classifier",
        ),
        (
            {"architectures": ["LlamaBidirectionalForSequenceClassification"], "is_causal": True},
            "unsupported: LlamaBidirectionalForSequenceClassification with 'is_causal'",
        ),
        (
            {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"},
            "unsupported: LlamaBidirectionalModel; expected a causal model, or a reranker: LlamaBidirectionalForSeq",
        ),
        ({"model_type": "llama_bidirec"}, "model_type 'llama_bidirec' with bidirectional attention; expected a causal"),
        ({"is_causal": False}, "with bidirectional attention; expected a causal model"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},  # reads images, too
            r"architecture \['Gemma3ForConditionalGeneration'\]; supported: .*Gemma3ForCausal",
        ),
    ],
)
def test_other_gemmas_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = edit_config(make_hf_checkpoint(tmp_path, "gemma"), **fields)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(folder)


class TestClassifiers:
    """Rerankers that were converted for sequence classification, as transformers stores them."""

    @pytest.fixture
    def causal(self, hf_folders: dict[str, Path]) -> Path:
        return hf_folders["qwen3"]

    @staticmethod
    def rows(count: int) -> Any:
        return np.random.default_rng(count).standard_normal((count, 64), np.float32)

    @pytest.mark.parametrize("family", [name for name in FAMILY_NAMES if name != "granite"])  # transformers has none
    def test_every_family_has_them(self, family: str, hf_folders: dict[str, Path], tmp_path: Path) -> None:
        folder = make_classifier(tmp_path, hf_folders[family], self.rows(1))
        checkpoint, causal = open_checkpoint(folder), open_checkpoint(hf_folders[family])
        assert checkpoint.config == replace(
            causal.config,
            tied_head=False,
            num_classes=1,
            id2label=("LABEL_0",),
            class_activation="sigmoid",
            logit_softcap=0.0,  # which classes have none of
        )
        assert checkpoint.config.num_head_rows == 1
        assert causal.config.num_head_rows == causal.config.vocab_size == 512
        for key, tensor in checkpoint.tensors.items():
            expected = self.rows(1) if key == "head" else causal.tensors[key].read_rows(0, tensor.shape[0])
            np.testing.assert_array_equal(tensor.read_rows(0, tensor.shape[0]), expected)

    def test_the_stored_rows_say_how_many_classes_there_are(self, causal: Path, tmp_path: Path) -> None:
        folder = make_classifier(tmp_path, causal, self.rows(2))
        edit_config(folder, id2label=..., label2id=..., num_labels=...)
        config = open_checkpoint(folder).config
        assert (config.num_classes, config.num_parameters) == (2, open_checkpoint(causal).config.num_parameters + 128)
        with pytest.raises(ModelLoadError, match=r"lacks the tensor 'score.weight', the head of a classifier"):
            open_checkpoint(edit_tensors(folder, lambda tensors: tensors.pop("score.weight")))

    def test_any_number_of_classes_has_names(self, causal: Path, tmp_path: Path) -> None:
        names = [f"class {row}" for row in range(12)]  # by their ids, not in the order of the file: "10" before "2"
        folder = make_classifier(
            tmp_path,
            causal,
            self.rows(12),
            id2label=dict(sorted(enumerate(names), key=lambda pair: str(pair[0]))),
            label2id={name: row for row, name in enumerate(names)},
        )
        config = open_checkpoint(folder).config
        assert (config.num_classes, config.class_labels) == (12, tuple(names))
        edit_config(folder, id2label=...)
        assert open_checkpoint(folder).config.class_labels == tuple(f"LABEL_{row}" for row in range(12))

    @pytest.mark.parametrize(
        ("id2label", "message"),
        [
            ({"0": "a", "1": "b"}, "the classifier's head has 3 rows, but the config names 2 labels"),
            ({"0": "a", "1": "b", "3": "c"}, "config.json: id2label must name the classes 0, 1, ... by their ids, got"),
            (["a", "b", "c"], "config.json: id2label must name the classes 0, 1, ... by their ids, got"),
        ],
    )
    def test_names_that_do_not_fit_the_head_are_refused(
        self, causal: Path, tmp_path: Path, id2label: Any, message: str
    ) -> None:
        folder = edit_config(make_classifier(tmp_path, causal, self.rows(3)), id2label=id2label)
        with pytest.raises(ModelLoadError, match=re.escape(message)):
            open_checkpoint(folder)

    @pytest.mark.parametrize(
        ("fields", "of_one", "of_many"),
        [
            ({}, "sigmoid", "softmax"),
            ({"problem_type": None}, "sigmoid", "softmax"),
            ({"problem_type": "single_label_classification"}, "sigmoid", "softmax"),
            ({"problem_type": "multi_label_classification"}, "sigmoid", "sigmoid"),
            ({"problem_type": "regression"}, "identity", "identity"),
            ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity", "identity"),
            ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid", "sigmoid"),
        ],
    )
    def test_the_problem_type_says_what_becomes_of_logits(
        self, causal: Path, tmp_path: Path, fields: dict[str, Any], of_one: str, of_many: str
    ) -> None:
        for count, expected in ((1, of_one), (3, of_many)):
            folder = edit_config(make_classifier(tmp_path / str(count), causal, self.rows(count)), **fields)
            assert open_checkpoint(folder).config.class_activation == expected

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"problem_type": "ranking"}, "unsupported problem_type 'ranking'; supported: single_label"),
            ({"sentence_transformers": {"activation_fn": "evil.Module"}}, "unsupported activation_fn 'evil.Module'"),
        ],
    )
    def test_another_activation_is_refused(
        self, causal: Path, tmp_path: Path, fields: dict[str, Any], message: str
    ) -> None:
        folder = edit_config(make_classifier(tmp_path, causal, self.rows(1)), **fields)
        with pytest.raises(ModelLoadError, match=message):
            open_checkpoint(folder)

    @pytest.mark.parametrize("shape", [(0, 64), (64,), ()])
    def test_other_heads_are_refused(self, causal: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
        folder = make_classifier(tmp_path, causal, self.rows(1))
        edit_tensors(folder, lambda tensors: tensors.update({"score.weight": np.ones(shape, np.float32)}))
        with pytest.raises(ModelLoadError) as caught:
            open_checkpoint(folder)
        assert str(caught.value).endswith(
            f"the tensor 'score.weight', the head of a classifier, has shape {list(shape)}; "
            "expected one row for each class"
        )

    def test_rows_of_another_size_are_named_with_both_shapes(self, causal: Path, tmp_path: Path) -> None:
        folder = make_classifier(tmp_path, causal, self.rows(1))
        edit_tensors(folder, lambda tensors: tensors.update({"score.weight": np.ones((1, 32), np.float32)}))
        with pytest.raises(
            ModelLoadError, match=r"'score.weight' has shape \[1, 32\], but the config asks for \[1, 64\]"
        ):
            open_checkpoint(folder)

    def test_a_bias_is_refused(self, causal: Path, tmp_path: Path) -> None:
        folder = make_classifier(tmp_path, causal, self.rows(1))
        edit_tensors(folder, lambda tensors: tensors.update({"score.bias": np.ones(1, np.float32)}))
        with pytest.raises(ModelLoadError, match=r"unsupported: the classifier has a bias, 'score.bias'; expected one"):
            open_checkpoint(folder)


def test_an_untied_head_is_a_tensor_of_its_own(hf_folders: dict[str, Path]) -> None:
    assert "head" in open_checkpoint(hf_folders["llama3"]).tensors
    assert "head" not in open_checkpoint(hf_folders["llama"]).tensors


def test_a_tied_head_that_is_stored_all_the_same_is_not_read(llama: Path) -> None:
    edit_tensors(llama, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    checkpoint = open_checkpoint(llama)
    assert checkpoint.config.tied_head
    assert "head" not in checkpoint.tensors


def test_without_a_word_on_tying_the_stored_head_decides(llama: Path) -> None:
    assert open_checkpoint(edit_config(llama, tie_word_embeddings=...)).config.tied_head


LLAMA3_FIELDS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_the_older_spelling_of_rope_scaling_is_read(llama: Path, type_key: str) -> None:
    scaling = LLAMA3_FIELDS | {type_key: "llama3"}
    edit_config(llama, rope_parameters=..., rope_theta=500_000.0, rope_scaling=scaling)
    rope = open_checkpoint(llama).config.rope
    assert rope == RopeConfig(500_000.0, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192))


def test_linear_rope_scaling_is_read(llama: Path) -> None:
    edit_config(llama, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})
    assert open_checkpoint(llama).config.rope == RopeConfig(10_000.0, linear_factor=2.0)


def test_a_config_without_rope_fields_has_the_usual_theta(llama: Path) -> None:
    edit_config(llama, rope_parameters=...)
    assert open_checkpoint(llama).config.rope == RopeConfig(10_000.0)


def test_an_unsupported_rope_scaling_is_named(llama: Path) -> None:
    edit_config(llama, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0})
    message = "unsupported rope scaling 'dynamic'; supported: default, linear, llama3, yarn, longrope"
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(llama)


def test_missing_head_counts_fall_back(llama: Path) -> None:
    edit_config(llama, head_dim=...)
    assert open_checkpoint(llama).config.head_size == 16


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("mistral", {"sliding_window": 4096}, (4096, 4096)),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"sliding_window": 32_768}, ()),  # the whole context
        ("llama", {"sliding_window": 4096}, ()),  # which transformers ignores, too
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, ()),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ...}, ()),  # behind layer 28
        (
            "qwen2",
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1, "layer_types": ...},
            (0, 4096),
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (64, 0),
        ),
        ("gemma2", {}, (100, 0)),
        ("gemma2", {"layer_types": ...}, (100, 0)),
        ("gemma3", {"layer_types": ...}, (90, 90, 90, 90, 90, 0, 90)),
        ("gemma3", {"layer_types": ..., "sliding_window_pattern": 2}, (90, 0, 90, 0, 90, 0, 90)),
        ("gemma3", {"sliding_window": 1 << 20}, (*[1 << 20] * 5, 0, 1 << 20)),  # whose layers have a RoPE of their own
        ("phi3", {"sliding_window": 2047}, (2047, 2047)),
    ],
)
def test_layers_have_their_sliding_windows(
    family: str, fields: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = edit_config(make_hf_checkpoint(tmp_path / family, family), **fields)
    config = open_checkpoint(folder).config
    assert config.windows == expected
    assert config.max_context_len == (2048 if family == "phi3" else 32_768)


@pytest.mark.parametrize("kinds", [["full_attention"], "sliding_attention", ["full_attention", "chunked_attention"]])
def test_layer_types_that_are_not_known_are_refused(kinds: object, tmp_path: Path) -> None:
    folder = edit_config(make_hf_checkpoint(tmp_path, "gemma2"), layer_types=kinds)
    with pytest.raises(ModelLoadError, match="layer_types must name one of sliding_attention, full_attention for each"):
        open_checkpoint(folder)


def test_gemma3_without_a_window_is_refused(tmp_path: Path) -> None:
    folder = edit_config(make_hf_checkpoint(tmp_path, "gemma3"), sliding_window=None)
    with pytest.raises(ModelLoadError, match="needs a sliding_window of at least 1, got 0"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (24**-0.5, 4.0, 5.0)),
        ({"query_pre_attn_scalar": 32}, (None, 4.0, 5.0)),  # what heads of 32 have anyway
        ({"attn_logit_softcapping": None, "final_logit_softcapping": None}, (24**-0.5, 0.0, 0.0)),
        (dict.fromkeys(["query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"], ...), None),
    ],
)
def test_gemma2_scales_and_caps(fields: dict[str, Any], expected: tuple[Any, ...] | None, tmp_path: Path) -> None:
    config = open_checkpoint(edit_config(make_hf_checkpoint(tmp_path, "gemma2"), **fields)).config
    assert (config.score_scale, config.score_softcap, config.logit_softcap) == (expected or (1 / 16, 50.0, 30.0))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {  # as before transformers 5
            "rope_parameters": ...,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"rope_parameters": ..., "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
)
def test_gemma3_has_two_rotary_embeddings(fields: dict[str, Any], tmp_path: Path) -> None:
    config = open_checkpoint(edit_config(make_hf_checkpoint(tmp_path, "gemma3"), **fields)).config
    assert config.rope == RopeConfig(1_000_000.0, linear_factor=8.0)
    assert config.local_rope == RopeConfig(10_000.0)


@pytest.mark.parametrize("kind", ["longrope", "su"])  # as configs of the first Phi-3 call it
def test_phi3_takes_the_short_factors_within_the_original_context(kind: str, tmp_path: Path) -> None:
    folder = make_hf_checkpoint(tmp_path, "phi3")
    parameters = json.loads((folder / "config.json").read_text())["rope_parameters"]
    config = open_checkpoint(edit_config(folder, rope_parameters={**parameters, "rope_type": kind})).config
    assert config.rope.longrope_factors == (1.0, 1.05, 1.2, 1.5, 1.9, 2.4)
    assert (config.rope.rotary_size, config.max_context_len) == (12, 2048)
    assert config.rope.attention_factor == pytest.approx((1 + math.log(4) / math.log(2048)) ** 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_factor": [1.0, 2.0]}, "the rotary embedding has 6 frequencies, but 2 factors"),
        ({"short_factor": "short"}, "short_factor must be a list of numbers"),
        ({"partial_rotary_factor": 1.5}, "24 numbers of each head are rotated, expected an even number up to 16"),
    ],
)
def test_a_damaged_longrope_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_hf_checkpoint(tmp_path, "phi3")
    parameters = json.loads((folder / "config.json").read_text())["rope_parameters"]
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(edit_config(folder, rope_parameters={**parameters, **change}))


def test_yarn_stretches_the_context(llama: Path) -> None:
    """Configs of Qwen state a shorter `max_position_embeddings`; vLLM multiplies, too."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16_384}
    config = open_checkpoint(edit_config(llama, rope_parameters={**scaling, "rope_theta": 1e6})).config
    assert config.max_context_len == 65_536
    assert config.rope.yarn == YarnScaling(4.0, 16_384)
    assert config.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_a_fused_projection_of_another_size_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.qkv_proj.weight"
    folder = make_hf_checkpoint(tmp_path, "phi3")
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-16]}))
    with pytest.raises(ModelLoadError, match=f"the tensor '{name}' has 112 rows, but the config asks for 128"):
        open_checkpoint(folder)


def test_an_unsupported_architecture_is_answered_with_the_supported_ones(llama: Path) -> None:
    edit_config(llama, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelLoadError, match=r"GPT2LMHeadModel.*; supported: .*LlamaForCausalLM"):
        open_checkpoint(llama)


def test_an_unsupported_activation_is_named(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match="unsupported activation 'gelu'; supported: silu"):
        open_checkpoint(edit_config(llama, hidden_act="gelu"))


def test_a_config_that_lacks_a_size_names_it(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config.json lacks 'hidden_size', which a Llama"):
        open_checkpoint(edit_config(llama, hidden_size=...))


def test_a_size_that_is_no_number_is_one_clear_error(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config.json has a value that is not a number: .*.many."):
        open_checkpoint(edit_config(llama, num_hidden_layers="many"))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "config.json is not JSON"), ("[]", r"config.json: expected a JSON object, got \[\] \(list\)")],
)
def test_a_broken_config_is_one_clear_error(llama: Path, content: str, message: str) -> None:
    (llama / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(llama)


def test_a_missing_tensor_is_named_with_its_shape(llama: Path) -> None:
    edit_tensors(llama, lambda t: t.pop(Q))
    with pytest.raises(ModelLoadError, match=rf"lacks the tensor '{Q}' of shape \[64, 64\]"):
        open_checkpoint(llama)


def test_a_missing_untied_head_is_a_missing_tensor(llama: Path) -> None:
    edit_config(llama, tie_word_embeddings=False)
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'lm_head.weight' of shape \[512, 64\]"):
        open_checkpoint(llama)


def test_a_misshapen_tensor_is_named_with_both_shapes(llama: Path) -> None:
    edit_tensors(llama, lambda t: t.update({Q: t[Q][:32].copy()}))
    expected = rf"the tensor '{Q}' has shape \[32, 64\], but the config asks for \[64, 64\]"
    with pytest.raises(ModelLoadError, match=expected):
        open_checkpoint(llama)


def test_a_tensor_that_would_be_left_out_is_an_error(tmp_path: Path) -> None:
    folder = make_hf_checkpoint(tmp_path / "biased", "llama", attention_bias=True)
    with pytest.raises(ModelLoadError, match=r"unsupported: .*'model.layers.0.self_attn.o_proj.bias'"):
        open_checkpoint(folder)


def test_rotary_tables_of_old_checkpoints_are_passed_over(llama: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(llama, lambda t: t.update({name: np.ones(8, np.float32)}))
    assert name not in open_checkpoint(llama).tensors


def test_a_missing_weight_file_is_named(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks the weight file model.safetensors$"):
        open_checkpoint(llama)


@pytest.mark.parametrize(
    ("file", "advice"), [("pytorch_model.bin", "convert it to safetensors"), ("model-Q8_0.gguf", "name that file")]
)
def test_a_folder_of_other_weights_says_what_to_do(file: str, advice: str, llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / file)
    with pytest.raises(ModelLoadError, match=rf"it has {file}; {advice}"):
        open_checkpoint(llama)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_hf_checkpoint(tmp_path / "llama", "llama", sharded=True)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"lacks the weight file {shard.name}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("num_layers", [1, 2, 4, 2**31 - 1])
def test_another_number_of_layers_than_the_file_holds_is_an_error(llama: Path, num_layers: int) -> None:
    """Fewer would give wrong scores in silence; very many must not be counted one by one."""
    with pytest.raises(ModelLoadError, match=f"asks for {num_layers} layers, but the checkpoint holds 3"):
        open_checkpoint(edit_config(llama, num_hidden_layers=num_layers))


def test_rope_parameters_that_are_no_object_are_named(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"rope_parameters must be an object, got \[1\]"):
        open_checkpoint(edit_config(llama, rope_parameters=[1]))


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {"model.norm.weight": 3}}'])
def test_an_index_without_its_map_is_one_clear_error(llama: Path, content: str) -> None:
    (llama / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match="lacks 'weight_map'"):
        open_checkpoint(llama)


def test_a_truncated_weight_file_is_named(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model.safetensors is truncated: tensor '.*' ends at byte"):
        open_checkpoint(llama)


def test_the_tokenizer_comes_with_its_leading_and_special_ids(tmp_path: Path) -> None:
    files = read_tokenizer_folder(add_tokenizer(tmp_path / "bos", bos=True))
    assert files.leading_ids == (0,)
    assert files.special_ids == {0, 1, 2, 3}
    text = "Is this relevant? <|im_end|> naïve 🙂"
    assert files.tokenizer.decode(files.tokenizer.encode(text).ids, skip_special_tokens=False) == f"<s>{text}"


def test_a_tokenizer_without_a_template_has_no_leading_ids(tmp_path: Path) -> None:
    files = read_tokenizer_folder(add_tokenizer(tmp_path))
    assert (files.leading_ids, files.trailing_ids) == ((), ())


def test_a_template_may_end_texts_with_a_token_too(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    path = add_tokenizer(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    tokenizer.save(str(path))
    files = read_tokenizer_folder(tmp_path)
    assert (files.leading_ids, files.trailing_ids) == ((0,), (1,))


def test_the_chat_template_is_found_in_both_places(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    assert read_tokenizer_folder(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert read_tokenizer_folder(tmp_path).chat_template == "old"
    several = [{"name": "tools", "template": "other"}, {"name": "default", "template": "one"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert read_tokenizer_folder(tmp_path).chat_template == "one"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several[:1]}))
    assert read_tokenizer_folder(tmp_path).chat_template is None
    (tmp_path / "chat_template.jinja").write_text("new")
    assert read_tokenizer_folder(tmp_path).chat_template == "new"


def test_special_tokens_are_found_in_both_places(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    assert read_tokenizer_folder(tmp_path).special_tokens == {}
    older = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    assert read_tokenizer_folder(tmp_path).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    newer = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}, "unk_token": "?", "mask_token": "[MASK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(newer))
    assert read_tokenizer_folder(tmp_path).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "?",
        "pad_token": "<pad>",
    }


def test_a_folder_without_a_tokenizer_still_opens(hf_folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(hf_folders["llama"])
    with pytest.raises(TokenizerError, match=r"has no tokenizer.json.*send token ids instead"):
        checkpoint.read_tokenizer_files()


def test_a_broken_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelLoadError, match=r"tokenizer.json cannot be read"):
        read_tokenizer_folder(tmp_path)
