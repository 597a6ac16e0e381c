from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import Checkpoint, StoredTensor
from prefixwise.models.config import RopeConfig
from prefixwise.models.families import GGUF_TENSOR_NAMES, stored_name
from prefixwise.models.gguf import open_gguf
from prefixwise.models.sources import open_checkpoint
from tests.checkpoints import GGUF_FAMILY_NAMES, finish_gguf, make_gguf, make_hf_checkpoint

QUANTISED = [
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
]
WIDE: dict[str, Any] = {  # K-quants come in blocks of 256
    "hidden_size": 256,
    "intermediate_size": 256,
    "vocab_size": 40,
    "num_hidden_layers": 1,
    "head_dim": 64,
}


def read_all(tensor: StoredTensor) -> NDArray[Any]:
    return tensor.read_rows(0, tensor.shape[0])


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_checkpoint(tmp_path_factory.mktemp("wide") / "qwen3", "qwen3", **WIDE)


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_checkpoint(tmp_path_factory.mktemp("wide") / "llama", "llama", **WIDE)


@pytest.mark.parametrize("family", GGUF_FAMILY_NAMES)
def test_float32_tensors_are_those_of_the_folder(
    family: str, hf_folders: dict[str, Path], gguf_files: dict[str, Path]
) -> None:
    folder, file = open_checkpoint(hf_folders[family]), open_gguf(gguf_files[family])
    assert set(file.tensors) == set(folder.tensors)
    for key, tensor in file.tensors.items():
        assert tensor.dtype == "float32"
        np.testing.assert_array_equal(read_all(tensor), read_all(folder.tensors[key]), err_msg=key)


@pytest.mark.parametrize("family", GGUF_FAMILY_NAMES)
def test_the_config_is_that_of_the_folder(
    family: str, hf_folders: dict[str, Path], gguf_files: dict[str, Path]
) -> None:
    expected, got = open_checkpoint(hf_folders[family]).config, open_gguf(gguf_files[family]).config
    assert got.family == ("llama" if family == "mistral" else expected.family)
    for field in ("vocab_size", "model_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads"):
        assert getattr(got, field) == getattr(expected, field), field
    for field in ("head_size", "qkv_bias", "qk_norm", "tied_head", "max_context_len", "activation"):
        assert getattr(got, field) == getattr(expected, field), field
    for field in ("embedding_scale", "float32_norms", "num_classes", "windows", "local_rope", "score_softcap"):
        assert getattr(got, field) == getattr(expected, field), field
    for field in ("logit_softcap", "pre_norms", "post_norms", "whole_qk_norm", "experts"):
        assert getattr(got, field) == getattr(expected, field), field
    assert np.float32(got.norm_eps) == np.float32(expected.norm_eps)
    frequencies = got.rope.inverse_frequencies(got.head_size)
    np.testing.assert_allclose(frequencies, expected.rope.inverse_frequencies(got.head_size), rtol=2.5e-7)
    assert got.rope.attention_factor == pytest.approx(expected.rope.attention_factor)


@pytest.mark.parametrize(("layers", "expected"), [(42, None), (46, 16**-0.5)])
def test_gemma2_of_27b_has_another_scale(layers: int, expected: float | None, tmp_path: Path) -> None:
    """64 / 4 heads, where heads have 32: as llama.cpp tells it by the number of layers."""
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 8, "vocab_size": 16}
    folder = make_hf_checkpoint(tmp_path / "gemma2", "gemma2", **sizes)
    assert open_gguf(make_gguf(folder, tmp_path / "model.gguf")).config.score_scale == expected


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("qwen3", {"qwen3.expert_count": 8}, "unsupported: a mixture of experts; expected a dense model"),
        ("mixtral", {"llama.expert_weights_norm": False}, "unsupported: 'expert_weights_norm' is false"),
        ("mixtral", {"llama.expert_used_count": 5}, "a token must have 1 to 4 of 4 experts, got 5"),
    ],
)
def test_experts_that_are_not_served_are_refused(
    family: str, extra: dict[str, str | int | float], message: str, hf_folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        open_gguf(make_gguf(hf_folders[family], tmp_path / "model.gguf", extra=extra))


def test_yarn_comes_by_its_keys(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16_384}
    folder = make_hf_checkpoint(tmp_path / "qwen3", "qwen3", rope_parameters=rope)
    expected = open_checkpoint(folder).config
    got = open_gguf(make_gguf(folder, tmp_path / "model.gguf")).config
    assert (got.rope, got.max_context_len) == (expected.rope, expected.max_context_len) and got.rope.yarn is not None
    other = make_gguf(folder, tmp_path / "other.gguf", extra={"qwen3.rope.scaling.attn_factor": 1.5})
    with pytest.raises(ModelLoadError, match="unsupported: YaRN with 'attn_factor' in the file"):
        open_gguf(other)


def test_olmo2_with_windows_is_refused(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    """OLMo 3, whose layers with a window have another RoPE."""
    path = make_gguf(hf_folders["olmo2"], tmp_path / "model.gguf", extra={"olmo2.attention.sliding_window": 64})
    with pytest.raises(ModelLoadError, match=r"unsupported: 'olmo2\.attention\.sliding_window'"):
        open_gguf(path)


def test_quantised_parts_of_fused_projections(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    folder = make_hf_checkpoint(tmp_path / "phi3", "phi3", **WIDE, rope_parameters=rope)
    path = make_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    checkpoint = open_gguf(path)
    stored = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight")
    gate, up = np.split(gguf.quants.dequantize(stored.data, stored.tensor_type), 2)
    np.testing.assert_array_equal(read_all(checkpoint.tensors["layers.0.gate"]), gate)
    np.testing.assert_array_equal(read_all(checkpoint.tensors["layers.0.up"]), up)
    assert {"layers.0.q", "layers.0.k", "layers.0.v", "layers.0.gate"} <= checkpoint.quantised


def test_llama3_scaling_comes_as_frequency_factors(gguf_files: dict[str, Path]) -> None:
    factors = open_gguf(gguf_files["llama3"]).config.rope.frequency_factors
    assert factors is not None
    assert (len(factors), factors[0], factors[-1]) == (16, 1.0, 32.0)


@pytest.mark.parametrize("quant", QUANTISED)
def test_quantised_tensors_are_those_of_gguf(quant: str, wide_folder: Path, tmp_path: Path) -> None:
    path = make_gguf(wide_folder, tmp_path / "model.gguf", quant)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for key, tensor in open_gguf(path).tensors.items():
        expected = stored[stored_name(key, GGUF_TENSOR_NAMES, "blk")]
        values = gguf.quants.dequantize(expected.data, expected.tensor_type)
        assert (tensor.dtype, values.dtype) == ("float32", np.float32)
        np.testing.assert_array_equal(read_all(tensor), values, err_msg=key)
        assert expected.tensor_type.name == (quant if values.ndim == 2 else "F32")


@pytest.mark.parametrize("quant", ["Q4_0", "Q6_K"])
def test_permuted_rows_are_put_back_whatever_the_type(quant: str, wide_llama: Path, tmp_path: Path) -> None:
    path = make_gguf(wide_llama, tmp_path / "model.gguf", quant)
    stored = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.attn_k.weight")
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    halves = values.reshape(2, 32, 2, 256)  # [head, place in the half, half, column]
    expected = np.concatenate([halves[0, :, 0], halves[0, :, 1], halves[1, :, 0], halves[1, :, 1]])
    np.testing.assert_array_equal(read_all(open_gguf(path).tensors["layers.0.k"]), expected)


def test_float16_is_not_widened(wide_llama: Path, tmp_path: Path) -> None:
    tensor = open_gguf(make_gguf(wide_llama, tmp_path / "model.gguf", "F16")).tensors["layers.0.q"]
    expected = read_all(open_checkpoint(wide_llama).tensors["layers.0.q"]).astype(np.float16)
    assert (tensor.dtype, read_all(tensor).dtype.name) == ("float16", "float16")
    np.testing.assert_array_equal(read_all(tensor), expected)


def test_bfloat16_comes_as_its_bits(wide_llama: Path, tmp_path: Path) -> None:
    import torch

    tensor = open_gguf(make_gguf(wide_llama, tmp_path / "model.gguf", "BF16")).tensors["layers.0.q"]
    values = torch.from_numpy(read_all(open_checkpoint(wide_llama).tensors["layers.0.q"]).copy())
    expected = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (tensor.dtype, read_all(tensor).dtype.name) == ("bfloat16", "uint16")
    np.testing.assert_array_equal(read_all(tensor), expected)


@pytest.mark.parametrize("quant", ["F32", "BF16", "Q4_1", "Q4_K"])
@pytest.mark.parametrize("key", ["layers.0.q", "layers.0.up", "final_norm"])
def test_only_the_asked_rows_are_read(quant: str, key: str, wide_llama: Path, tmp_path: Path) -> None:
    tensor = open_gguf(make_gguf(wide_llama, tmp_path / "model.gguf", quant)).tensors[key]
    whole = read_all(tensor)
    for start, stop in ((0, 1), (5, 23), (31, 33), (200, 256), (7, 7)):
        np.testing.assert_array_equal(tensor.read_rows(start, stop), whole[start:stop])


def test_biases_of_a_permuted_family_are_put_back_too(wide_llama: Path, tmp_path: Path) -> None:
    biases = {"q": np.arange(256), "k": np.arange(128), "v": np.arange(128)}
    path = copy_with_tensors(
        make_gguf(wide_llama, tmp_path / "plain.gguf"),
        tmp_path / "biased.gguf",
        {f"blk.0.attn_{name}.bias": bias.astype(np.float32) for name, bias in biases.items()},
    )
    checkpoint = open_gguf(path)
    assert checkpoint.config.qkv_bias
    first_head = read_all(checkpoint.tensors["layers.0.q_bias"])[:64]
    np.testing.assert_array_equal(first_head, np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)]))
    np.testing.assert_array_equal(read_all(checkpoint.tensors["layers.0.v_bias"]), biases["v"])


def copy_with_tensors(source: Path, target: Path, more: dict[str, NDArray[Any]]) -> Path:
    """Copy an F32 file, with some tensors more."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for name, values in more.items():
        writer.add_tensor(name, values)
    finish_gguf(writer)
    return target


def test_the_embedded_config_is_that_of_smollm2(embedded: Checkpoint) -> None:
    config = embedded.config
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 30, 9, 3)
    assert (config.model_size, config.head_size, config.mlp_size, config.vocab_size) == (
        576,
        64,
        1536,
        49_152,
    )
    assert (config.tied_head, config.rope, config.max_context_len) == (True, RopeConfig(100_000.0), 8192)
    assert config.norm_eps == pytest.approx(1e-5)


def test_no_weight_is_read_when_a_file_is_opened(embedded_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixwise.models.gguf.map_rows", None)
    assert len(open_gguf(embedded_path).tensors) > 200


def test_gguf_is_imported_only_for_a_gguf_file(hf_folders: dict[str, Path], gguf_files: dict[str, Path]) -> None:
    code = (
        "import sys; from prefixwise.models.sources import open_checkpoint; "
        "open_checkpoint(sys.argv[1]); print('gguf' in sys.modules); "
        "open_checkpoint(sys.argv[2]); print('gguf' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(hf_folders["llama"]), str(gguf_files["llama"])]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert answer.split() == ["False", "True"]


def test_a_file_cut_in_its_tensors_is_called_truncated(gguf_files: dict[str, Path], tmp_path: Path) -> None:
    content = gguf_files["llama"].read_bytes()
    offsets = [tensor.data_offset for tensor in gguf.GGUFReader(gguf_files["llama"]).tensors]
    cut = tmp_path / "cut.gguf"
    for num_bytes in (*offsets, max(offsets) + 100):
        cut.write_bytes(content[:num_bytes])
        expected = rf"cut.gguf is truncated: tensor '.*' ends at byte \d+, the file has {num_bytes}"
        with pytest.raises(ModelLoadError, match=expected):
            open_gguf(cut)


def test_an_unsupported_architecture_is_answered_with_the_supported_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt2")
    finish_gguf(writer)
    with pytest.raises(ModelLoadError, match="'gpt2'; supported: qwen3, qwen2, llama, gemma"):
        open_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "dynamic"}, "unsupported rope scaling 'dynamic'; supported: none, linear, yarn"),
        ({"llama.expert_count": 8}, "needs one number for 'llama.expert_used_count', got nothing"),
        (
            {"llama.rope.dimension_count": 8},
            "unsupported: 'llama.rope.dimension_count' is 8, but a head has 16",
        ),
        ({"llama.attention.value_length": 8}, "'llama.attention.value_length' is 8, but a head has 16"),
        ({"llama.block_count": "three"}, "needs one number for 'llama.block_count', got a str"),
        ({"split.count": 3}, "is one of 3 parts; merge them with llama-gguf-split --merge"),
        ({"split.count": "three"}, "is damaged: its number of parts is 'three'"),
    ],
)
def test_what_cannot_be_run_is_refused(
    extra: dict[str, str | int], message: str, hf_folders: dict[str, Path], tmp_path: Path
) -> None:
    path = make_gguf(hf_folders["llama"], tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ModelLoadError, match=message):
        open_gguf(path)


def test_metadata_that_is_missing_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish_gguf(writer)
    with pytest.raises(ModelLoadError, match=r"needs one number for 'llama\.\S+', got nothing"):
        open_gguf(tmp_path / "model.gguf")


def test_linear_rope_scaling_is_read(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    extra: dict[str, str | float] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = make_gguf(hf_folders["llama"], tmp_path / "model.gguf", extra=extra)
    assert open_gguf(path).config.rope == RopeConfig(10_000.0, linear_factor=4.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blk.1.ffn_up.weight", r"lacks the tensor 'blk.1.ffn_up.weight' of shape \[96, 64\]"),
        ("token_embd.weight", "lacks the tensor 'token_embd.weight', the embedding"),
    ],
)
def test_a_missing_tensor_is_named(name: str, message: str, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    path = make_gguf(hf_folders["llama"], tmp_path / "model.gguf", without=[name])
    with pytest.raises(ModelLoadError, match=message):
        open_gguf(path)


def test_a_misshapen_tensor_is_named_with_both_shapes(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    path = make_gguf(hf_folders["llama"], tmp_path / "model.gguf", extra={"llama.feed_forward_length": 128})
    expected = r"the tensor 'blk.0.ffn_gate.weight' has shape \[96, 64\], but the config asks for \[128, 64\]"
    with pytest.raises(ModelLoadError, match=expected):
        open_gguf(path)


def test_misshapen_frequency_factors_are_named_with_both_shapes(gguf_files: dict[str, Path], tmp_path: Path) -> None:
    more = {"rope_freqs.weight": np.ones(5, np.float32)}
    path = copy_with_tensors(gguf_files["llama"], tmp_path / "model.gguf", more)
    expected = r"the tensor 'rope_freqs.weight' has shape \[5\], but the config asks for \[8\]"
    with pytest.raises(ModelLoadError, match=expected):
        open_gguf(path)


def test_a_tensor_that_would_be_left_out_is_an_error(gguf_files: dict[str, Path], tmp_path: Path) -> None:
    more = {"blk.0.attn_output.bias": np.zeros(64, np.float32)}
    path = copy_with_tensors(gguf_files["llama"], tmp_path / "model.gguf", more)
    with pytest.raises(ModelLoadError, match=r"unsupported: .*'blk.0.attn_output.bias', which llama does not use"):
        open_gguf(path)


@pytest.mark.parametrize("type_id", [24, 99])  # I8, and a type of the future
def test_an_unsupported_type_names_tensor_and_type(type_id: int, gguf_files: dict[str, Path], tmp_path: Path) -> None:
    content = gguf_files["llama"].read_bytes()
    name = b"blk.0.attn_v.weight"
    entry = content.index(name) + len(name) + 4 + 2 * 8  # after the name: the number of dimensions, and those
    path = tmp_path / "model.gguf"
    path.write_bytes(content[:entry] + type_id.to_bytes(4, "little") + content[entry + 4 :])
    expected = rf"tensor 'blk.0.attn_v.weight' is {'I8' if type_id == 24 else 'type 99'}, .* supported: F32, F16"
    with pytest.raises(ModelLoadError, match=expected):
        open_gguf(path)


def test_a_quantised_vector_is_refused(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    content = make_gguf(hf_folders["llama"], tmp_path / "model.gguf").read_bytes()
    name = b"output_norm.weight"
    entry = content.index(name) + len(name) + 4 + 8
    q8_0 = int(gguf.GGMLQuantizationType.Q8_0)
    (tmp_path / "model.gguf").write_bytes(content[:entry] + q8_0.to_bytes(4, "little") + content[entry + 4 :])
    expected = "tensor 'output_norm.weight' has rows of 1 numbers, but Q8_0 stores them in blocks of 32"
    with pytest.raises(ModelLoadError, match=expected):
        open_gguf(tmp_path / "model.gguf")
