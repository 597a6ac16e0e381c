"""Quantised checkpoints: the weights that their own tools compute, and a clear line for what cannot be read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from prefixwise import Scorer
from prefixwise.contract.errors import ModelLoadError
from prefixwise.launch.loading import load_engine, resolved_config
from prefixwise.launch.options import EngineOptions
from prefixwise.models.checkpoint import Checkpoint, Quantization, as_float32
from prefixwise.models.families import HF_TENSOR_NAMES, stored_name
from prefixwise.models.sources import open_checkpoint
from tests.checkpoints import make_gguf, make_hf_checkpoint
from tests.quantised_checkpoints import (
    compressed_scheme,
    make_awq,
    make_compressed,
    make_fp8,
    make_gptq,
    make_scaled_fp8,
    quantised_copy,
)
from tests.reference import PROBABILITY_BOUND, Reference, expected_scores

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 48, "tie_word_embeddings": True}
PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers; keys and values have 64 rows, less than a block of fp8."""
    return make_hf_checkpoint(tmp_path_factory.mktemp("dense") / "model", "qwen3", **SHAPE)


def matrices(checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """Of all layers, by the names of their modules, read in pieces that do not fit the packing."""
    found = {}
    for key, tensor in checkpoint.tensors.items():
        if key.startswith("layers.") and len(tensor.shape) == 2:
            cuts = [0, 5, 43, tensor.shape[0]]
            pieces = [tensor.read_rows(start, stop) for start, stop in pairwise(cuts)]
            name = stored_name(key, HF_TENSOR_NAMES, "model.layers").removesuffix(".weight")
            found[name] = as_float32(np.concatenate(pieces), tensor.dtype)
    return found


def assert_weights(folder: Path, expected: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    """To the bit, once rounded to the dtype."""
    found = matrices(open_checkpoint(folder))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(torch.from_numpy(found[name]).to(dtype), weight.to(dtype)), name


def transformers_weights(folder: Path, dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in model.state_dict().items()
        if name.endswith("_proj.weight")
    }


class TestFp8:
    @pytest.mark.parametrize("block", [(128, 128), (32, 64), None], ids=str)
    def test_weights_are_those_of_transformers(
        self, block: tuple[int, int] | None, dense: Path, tmp_path: Path
    ) -> None:
        folder = make_fp8(dense, tmp_path / "fp8", block)
        if block is None:  # transformers reads the other spelling
            codes = load_file(folder / "model.safetensors")
            names = [name.removesuffix(".weight") for name in codes if name.endswith("_proj.weight")]
            expected = {name: codes[f"{name}.weight"].float() * codes[f"{name}.weight_scale"] for name in names}
        else:
            expected = transformers_weights(folder, torch.float32)
        assert_weights(folder, expected)

    def test_the_title_names_the_blocks(self, dense: Path, tmp_path: Path) -> None:
        blocks = open_checkpoint(make_fp8(dense, tmp_path / "blocks"))
        whole = open_checkpoint(make_fp8(dense, tmp_path / "whole", None, activation_scheme="static"))
        assert blocks.quantization == Quantization("fp8 (e4m3, blocks of 128 x 128)", of_activations=True)
        assert whole.quantization == Quantization("fp8 (e4m3, one scale per tensor)", of_activations=True)

    def test_scales_of_the_kv_cache_are_not_used(self, dense: Path, tmp_path: Path) -> None:
        """By the names that AutoFP8 and Quark give them."""
        folder = make_fp8(dense, tmp_path / "fp8", None, activation_scheme="static", kv_cache_scheme="static")
        expected = matrices(open_checkpoint(folder))
        tensors = load_file(folder / "model.safetensors")
        names = ("self_attn.kv_scale", "self_attn.prob_output_scale", "self_attn.k_proj.output_scale")
        tensors |= {f"model.layers.0.{name}": torch.tensor(0.5) for name in names}
        save_file(tensors, folder / "model.safetensors")
        assert_weights(folder, {name: torch.from_numpy(weight) for name, weight in expected.items()})

    def test_every_code_is_its_number(self) -> None:
        from prefixwise.models.quantization.tensors import _FLOAT8

        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        np.testing.assert_array_equal(_FLOAT8, codes.float().numpy())


MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}


class TestScaledFp8:
    """`fbgemm_fp8` and ModelOpt's, whose exports by ModelOpt 0.47 are read in the same way."""

    @pytest.mark.parametrize(
        ("config", "kind", "title", "of_activations"),
        [
            ({"quant_method": "fbgemm_fp8"}, "row of 1", "fbgemm_fp8 (e4m3, per channel)", True),
            (MODELOPT | {"quant_algo": "FP8"}, "tensor", "modelopt fp8 (e4m3, one scale per tensor)", True),
            (
                MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
                "row",
                "modelopt fp8 (e4m3, per channel)",
                True,
            ),
            (MODELOPT | {"quant_algo": "fp8_pb_wo"}, "block", "modelopt fp8 (e4m3, blocks of 128 x 128)", False),
            (
                {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
                "tensor",
                "modelopt fp8 (e4m3, one scale per tensor)",
                True,
            ),
        ],
        ids=["fbgemm", "tensor", "row", "block", "nested"],
    )
    def test_a_weight_is_its_code_times_its_scale(
        self, config: dict[str, Any], kind: str, title: str, of_activations: bool, dense: Path, tmp_path: Path
    ) -> None:
        folder = make_scaled_fp8(dense, tmp_path / "fp8", config, kind)
        stored, expected = load_file(folder / "model.safetensors"), {}
        for name in [name.removesuffix(".weight") for name in stored if name.endswith("_proj.weight")]:
            codes, scales = stored[f"{name}.weight"].float(), stored[f"{name}.weight_scale"]
            if kind == "block":
                scales = scales[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
                scales = scales[: codes.shape[0], : codes.shape[1]]
            expected[name] = codes * (scales[:, None] if kind == "row" else scales)
        assert_weights(folder, expected)
        assert open_checkpoint(folder).quantization == Quantization(title, of_activations=of_activations)

    @pytest.mark.parametrize("config_says", [{}, {"quantization_config": None}])
    def test_modelopt_s_own_file_is_read_where_the_config_says_nothing(
        self, config_says: dict[str, Any], dense: Path, tmp_path: Path
    ) -> None:
        config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
        folder = make_scaled_fp8(dense, tmp_path / "fp8", config, "tensor")
        expected = matrices(open_checkpoint(folder))
        raw = json.loads((folder / "config.json").read_text())
        (folder / "hf_quant_config.json").write_text(json.dumps(raw.pop("quantization_config")))
        (folder / "config.json").write_text(json.dumps(raw | config_says))
        assert_weights(folder, {name: torch.from_numpy(weight) for name, weight in expected.items()})

    def test_the_config_goes_before_modelopt_s_own_file(self, dense: Path, tmp_path: Path) -> None:
        folder = make_fp8(dense, tmp_path / "fp8")
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
        title = "fp8 (e4m3, blocks of 128 x 128)"
        for key in ("quantization_config", "compression_config"):
            raw = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({key: raw.pop("quantization_config"), **raw}))
            assert open_checkpoint(folder).quantization == Quantization(title, of_activations=True)

    def test_a_model_whose_kv_cache_alone_is_quantised_is_dense(self, dense: Path, tmp_path: Path) -> None:
        config = MODELOPT | {"quant_algo": None, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
        folder = quantised_copy(dense, tmp_path / "kv", config, lambda layer, weight: {"weight": weight})
        assert open_checkpoint(folder).quantization is None
        assert_weights(
            folder, {name: torch.from_numpy(each) for name, each in matrices(open_checkpoint(dense)).items()}
        )

    @pytest.mark.parametrize("algorithm", ["NVFP4", "MIXED_PRECISION", None, 8])
    def test_other_algorithms_are_refused_by_name(self, algorithm: object, dense: Path, tmp_path: Path) -> None:
        folder = make_scaled_fp8(dense, tmp_path / "fp8", MODELOPT | {"quant_algo": algorithm}, "tensor")
        with pytest.raises(ModelLoadError, match=f"unsupported modelopt quant_algo {algorithm!r}; supported: FP8, FP8"):
            open_checkpoint(folder)


COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, str]] = {
    "fp8 tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "float-quantized (fp8, one scale per tensor)",
    ),
    "fp8 channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        "float-quantized (fp8, per channel)",
    ),
    "fp8 block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]},
        None,
        "float-quantized (fp8, blocks of 64 x 64)",
    ),
    "int8": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        PER_TOKEN,
        "int-quantized (int8, per channel)",
    ),
    "int8 asymmetric": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        PER_TOKEN,
        "int-quantized (int8, per channel)",
    ),
    "int4": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        None,
        "pack-quantized (int4, groups of 32)",
    ),
    "int4 asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
        None,
        "pack-quantized (int4, groups of 64)",
    ),
    "int4 tensor asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "tensor", "symmetric": False},
        None,
        "pack-quantized (int4, one scale per tensor)",
    ),
    "int8 packed": (
        "pack-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        None,
        "pack-quantized (int8, per channel)",
    ),
}


class TestCompressedTensors:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
    @pytest.mark.parametrize("name", COMPRESSED)
    def test_weights_are_those_of_compressed_tensors(
        self, name: str, dtype: torch.dtype, dense: Path, tmp_path: Path
    ) -> None:
        from compressed_tensors.compressors import BaseCompressor

        form, weights, inputs, title = COMPRESSED[name]
        scheme = compressed_scheme(form, weights, inputs)
        folder = make_compressed(dense, tmp_path / "model", scheme, dtype)
        stored = load_file(folder / "model.safetensors")
        layers = {name.rpartition(".")[0] for name in stored if name.endswith("_proj.weight_scale")}
        expected = {}
        for layer in layers:
            parts = {each.rpartition(".")[2]: stored[each] for each in stored if each.startswith(f"{layer}.")}
            expected[layer] = BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"]
        assert_weights(folder, expected, dtype)
        found = open_checkpoint(folder).quantization
        assert found == Quantization(f"compressed-tensors {title}", of_activations=inputs is not None)

    def test_columns_that_were_sorted_have_the_scale_of_their_group(self, dense: Path, tmp_path: Path) -> None:
        """`weight_g_idx` of older files, which compressed-tensors does not read any more."""
        form, weights, inputs, _ = COMPRESSED["int4"]
        folder = make_compressed(dense, tmp_path / "model", compressed_scheme(form, weights, inputs))
        name = "model.layers.1.mlp.down_proj"
        plain = matrices(open_checkpoint(folder))[name]
        tensors = load_file(folder / "model.safetensors")
        index = torch.arange(256).flip(0) // 32
        save_file(tensors | {f"{name}.weight_g_idx": index.int()}, folder / "model.safetensors")
        scales = tensors[f"{name}.weight_scale"].numpy()
        codes = np.rint(plain / np.repeat(scales, 32, axis=1))
        np.testing.assert_array_equal(matrices(open_checkpoint(folder))[name], (codes * scales[:, index]))

    def test_zero_points_of_older_files_are_not_packed(self, dense: Path, tmp_path: Path) -> None:
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        form, weights, inputs, _ = COMPRESSED["int4 asymmetric"]
        folder = make_compressed(dense, tmp_path / "model", compressed_scheme(form, weights, inputs))
        expected = matrices(open_checkpoint(folder))
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith("weight_zero_point")]:
            shape = tensors[name.replace("zero_point", "scale")].shape
            tensors[name] = unpack_from_int32(tensors[name], 4, shape, packed_dim=0).contiguous()
            assert tensors[name].dtype == torch.int8
        save_file(tensors, folder / "model.safetensors")
        assert_weights(folder, {name: torch.from_numpy(weight) for name, weight in expected.items()})

    def test_each_layer_has_the_scheme_that_names_it_most_closely(self, dense: Path, tmp_path: Path) -> None:
        """A mixed model: the down projections in int8, one layer of them by name in int4, all others in int4."""
        form, weights, _, _ = COMPRESSED["int4"]
        int4 = make_compressed(dense, tmp_path / "int4", compressed_scheme(form, weights))
        eight = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
        int8 = make_compressed(dense, tmp_path / "int8", compressed_scheme(form, eight))
        tensors, wide = load_file(int4 / "model.safetensors"), load_file(int8 / "model.safetensors")
        tensors |= {name: each for name, each in wide.items() if "layers.1.mlp.down_proj." in name}
        save_file(tensors, int4 / "model.safetensors")
        raw = json.loads((int4 / "config.json").read_text())
        groups = raw["quantization_config"]["config_groups"]
        groups["group_1"] = {"targets": ["re:.*down_proj"], "weights": eight, "format": "pack-quantized"}
        groups["group_2"] = groups["group_0"] | {"targets": ["model.layers.0.mlp.down_proj"]}
        (int4 / "config.json").write_text(json.dumps(raw))
        found, of_int8 = matrices(open_checkpoint(int4)), matrices(open_checkpoint(int8))
        down = "model.layers.1.mlp.down_proj"
        np.testing.assert_array_equal(found.pop(down), of_int8[down])
        original = load_file(dense / "model.safetensors")
        errors = {name: np.abs(each - original[f"{name}.weight"].numpy()).max() for name, each in found.items()}
        assert all(0.005 < error < 0.05 for error in errors.values()), errors

    @pytest.mark.parametrize(
        "config",
        [
            {"config_groups": {}, "format": "dense", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}},
        ],
        ids=["KV cache", "sparse"],
    )
    def test_weights_may_be_as_they_were(self, config: dict[str, Any], dense: Path, tmp_path: Path) -> None:
        """Where only the KV cache is quantised, or weights are zeros in places."""

        def with_scale(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"weight": weight} | ({"k_scale": torch.tensor([0.5])} if layer.endswith("k_proj") else {})

        stated = {"quant_method": "compressed-tensors"} | config
        folder = quantised_copy(dense, tmp_path / "model", stated, with_scale)
        expected = matrices(open_checkpoint(dense))
        assert_weights(folder, {name: torch.from_numpy(weight) for name, weight in expected.items()})
        assert open_checkpoint(folder).quantization is None

    @pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
    def test_transformers_reads_the_same_weights(self, dense: Path, tmp_path: Path) -> None:
        from transformers import CompressedTensorsConfig

        form, weights, inputs, _ = COMPRESSED["int4 asymmetric"]
        folder = make_compressed(dense, tmp_path / "model", compressed_scheme(form, weights, inputs))
        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
        assert_weights(folder, transformers_weights(folder, torch.float32, **options))


class TestAwq:
    def test_weights_are_those_that_were_packed_and_those_of_compressed_tensors(
        self, dense: Path, tmp_path: Path
    ) -> None:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

        folder, packed = make_awq(dense, tmp_path / "awq")
        assert_weights(folder, packed)
        assert open_checkpoint(folder).quantization == Quantization("awq (int4, groups of 32)")
        stored, layer = load_file(folder / "model.safetensors"), "model.layers.0.mlp.gate_proj"
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        converted = AutoAWQConverter.from_autoawq_config(config).process(
            {name: tensor for name, tensor in stored.items() if name.startswith(layer)}
        )
        scheme = compressed_scheme("pack-quantized", COMPRESSED["int4 asymmetric"][1] | {"group_size": 32})
        parts = {name.rpartition(".")[2]: tensor for name, tensor in converted.items()}
        weight = BaseCompressor.get_value_from_registry("pack-quantized").decompress(parts, scheme)["weight"]
        found = torch.from_numpy(matrices(open_checkpoint(folder))[layer])
        assert torch.equal(found.half(), weight.half())


class TestGptq:
    @pytest.mark.parametrize("desc_act", [False, True], ids=["in order", "desc_act"])
    @pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
    @pytest.mark.parametrize("num_bits", [4, 8])
    def test_weights_are_those_that_were_packed(
        self, num_bits: int, checkpoint_format: str, desc_act: bool, dense: Path, tmp_path: Path
    ) -> None:
        options: dict[str, Any] = {"desc_act": desc_act, "checkpoint_format": checkpoint_format}
        folder, packed = make_gptq(dense, tmp_path / "gptq", num_bits, **options)
        assert_weights(folder, packed)
        title = f"{checkpoint_format} (int{num_bits}, groups of 32{', desc_act' if desc_act else ''})"
        assert open_checkpoint(folder).quantization == Quantization(title)

    def test_one_group_for_all_columns(self, dense: Path, tmp_path: Path) -> None:
        folder, packed = make_gptq(dense, tmp_path / "gptq", group_size=-1)
        assert_weights(folder, packed)
        assert open_checkpoint(folder).quantization == Quantization("gptq (int4, per channel)")

    @pytest.mark.parametrize("num_bits", [4, 8])
    def test_a_zero_point_of_0_borrows_from_the_next(self, num_bits: int, dense: Path, tmp_path: Path) -> None:
        """Of rows whose weights are all positive. transformers adds to the words what GPTQModel subtracts from them."""

        def positive_in_places(_: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"weight": torch.cat([weight[::3].abs(), weight[1::3], weight[2::3]])}

        source = quantised_copy(dense, tmp_path / "source", {}, positive_in_places)
        folder, packed = make_gptq(source, tmp_path / "gptq", num_bits)
        assert_weights(folder, packed)

    @pytest.mark.parametrize(
        "stated",
        [{"format": "gptq_v2"}, {"format": "gptq_v2", "checkpoint_format": "GPTQ_V2"}],
        ids=["transformers", "both"],
    )
    def test_the_format_may_be_stated_by_either_name(self, stated: dict[str, Any], dense: Path, tmp_path: Path) -> None:
        folder, packed = make_gptq(dense, tmp_path / "gptq", **stated)
        assert_weights(folder, packed)
        assert open_checkpoint(folder).quantization == Quantization("gptq_v2 (int4, groups of 32)")

    @pytest.mark.parametrize("less", [0, 0x01010101, 0x11111111], ids=hex)
    @pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
    @pytest.mark.parametrize("num_bits", [4, 8])
    def test_symmetric_zero_points_are_the_middle_whatever_is_stored(
        self, num_bits: int, said: str, less: int, dense: Path, tmp_path: Path
    ) -> None:
        """Some versions of GPTQModel store them as in the other format, or one less by the bits of another layer."""
        folder, packed = make_gptq(dense, tmp_path / "gptq", num_bits, sym=True, checkpoint_format="gptq_v2")
        tensors = load_file(folder / "model.safetensors")
        tensors |= {name: each - less for name, each in tensors.items() if name.endswith("qzeros")}
        save_file(tensors, folder / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text())
        raw["quantization_config"]["checkpoint_format"] = said
        (folder / "config.json").write_text(json.dumps(raw))
        assert_weights(folder, packed)

    def test_zero_points_that_differ_are_used_whatever_is_said(self, dense: Path, tmp_path: Path) -> None:
        folder, packed = make_gptq(dense, tmp_path / "gptq")
        raw = json.loads((folder / "config.json").read_text())
        raw["quantization_config"]["sym"] = True
        (folder / "config.json").write_text(json.dumps(raw))
        assert_weights(folder, packed)

    def test_dynamic_says_what_differs_in_a_layer(self, dense: Path, tmp_path: Path) -> None:
        """As GPTQModel does: the first expression that names the layer; `-:` is of layers that are not quantised."""
        dynamic = {
            r"-:model\.layers\.0\.mlp\.up_proj": {},
            r"+:model\.layers\.1\.mlp": {"bits": 8, "group_size": 64},
            r".*\.(mlp|self_attn)\.": {"desc_act": True},
        }
        (int8, of_int8) = make_gptq(dense, tmp_path / "int8", 8, 64)
        (folder, weights) = make_gptq(dense, tmp_path / "int4", desc_act=True, dynamic=dynamic)
        tensors, wide = load_file(folder / "model.safetensors"), load_file(int8 / "model.safetensors")
        tensors |= {name: each for name, each in wide.items() if name.startswith("model.layers.1.mlp.")}
        name = "model.layers.0.mlp.up_proj"
        tensors = {each: tensor for each, tensor in tensors.items() if not each.startswith(f"{name}.")}
        tensors[f"{name}.weight"] = load_file(dense / "model.safetensors")[f"{name}.weight"]
        save_file(tensors, folder / "model.safetensors")
        expected = weights | {each: weight for each, weight in of_int8.items() if "layers.1.mlp." in each}
        assert_weights(folder, expected | {name: tensors[f"{name}.weight"]})
        title = "gptq (int4, groups of 32, desc_act) and gptq (int8, groups of 64, desc_act)"
        assert open_checkpoint(folder).quantization == Quantization(title)

    def test_a_bias_of_zeros_in_a_fused_layer_is_passed_over(self, tmp_path: Path) -> None:
        folder, _ = make_gptq(make_hf_checkpoint(tmp_path / "phi3", "phi3"), tmp_path / "gptq")
        assert "model.layers.0.self_attn.qkv_proj.bias" in load_file(folder / "model.safetensors")
        assert not open_checkpoint(folder).config.qkv_bias

    def test_a_bias_that_is_not_zero_is_refused(self, dense: Path, tmp_path: Path) -> None:
        folder, _ = make_gptq(dense, tmp_path / "gptq")
        name = "model.layers.0.self_attn.o_proj.bias"
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: tensors[name] + 1}, folder / "model.safetensors")
        with pytest.raises(ModelLoadError, match=f"unsupported: the checkpoint has the tensor '{name}'"):
            open_checkpoint(folder)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_scores_are_those_of_transformers(backend: Any, dense: Path, tmp_path: Path) -> None:
    folder, labels = make_fp8(dense, tmp_path / "fp8"), [12, 13]
    query, items = [1, 2, 3, 4, 5], [[6], [7, 8], [9, 10, 11]]
    logits = Reference.load(folder, dtype=torch.float32).label_logits([[*query, *item] for item in items])
    with Scorer(folder, backend=backend, device="cpu", dtype="float32", warmup="none") as scorer:
        scores = scorer.score(query, items, label_token_ids=labels).scores
    np.testing.assert_allclose(scores, expected_scores("prob", logits, labels), atol=PROBABILITY_BOUND)


class TestWhatIsSaid:
    def test_the_log_and_the_configuration_name_the_method(
        self, dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "prefixwise")
        options = EngineOptions(make_fp8(dense, tmp_path / "fp8"), backend="torch", device="cpu", warmup="none")
        engine = load_engine(options)
        with closing(engine):
            title = "fp8 (e4m3, blocks of 128 x 128)"
            assert resolved_config(options, engine)["checkpoint_quantization"] == title
            dtype = engine.backend.info.dtype
        (line,) = (said for said in caplog.messages if "quantis" in said)
        assert line == (
            f"the checkpoint is {title}: weights were dequantised to {dtype}; "
            f"its quantisation of activations is not used, they are {dtype}"
        )

    def test_a_gguf_file_names_its_types(self, dense: Path, tmp_path: Path) -> None:
        quantised = open_checkpoint(make_gguf(dense, tmp_path / "model.gguf", "Q8_0"))
        plain = open_checkpoint(make_gguf(dense, tmp_path / "plain.gguf", "F16"))
        assert (quantised.quantization, plain.quantization) == (Quantization("gguf (Q8_0)"), None)


class TestRefusals:
    """One line each, which names what cannot be read."""

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"quant_method": "bitsandbytes"}, "unsupported quantization 'bitsandbytes'; supported: fp8, fbgemm_fp8, "),
            ({"quant_method": None}, "unsupported quantization None; supported: fp8"),
            ({"quant_method": ["fp8"]}, "unsupported quantization ['fp8']; supported: fp8"),
            ({"load_in_8bit": True}, "unsupported quantization 'bitsandbytes'; supported: fp8, fbgemm_fp8, "),
            ([1], "quantization_config must be an object, got"),
            ({"quant_method": "awq", "version": "gemv"}, "unsupported awq version 'gemv'; supported: gemm"),
            ({"quant_method": "awq", "bits": 3}, "unsupported awq bits 3; supported: 4"),
            ({"quant_method": "awq", "backend": "llm-awq"}, "unsupported awq version 'llm-awq'; supported: gemm"),
            (
                {"quant_method": "awq", "version": "gemm", "format": "gemv_fast"},
                "unsupported awq format 'gemv_fast'; supported: gemm",
            ),
            (
                {"quant_method": "awq", "checkpoint_format": "gemv"},
                "unsupported awq checkpoint_format 'gemv'; supported: gemm",
            ),
            ({"quant_method": "awq", "rotation": "random"}, 'unsupported awq rotation "random" (str); supported: none'),
            ({"quant_method": "gptq", "rotation": "hadamard"}, 'unsupported gptq rotation "hadamard" (str); supported'),
            ({"quant_method": "gptq", "bits": 3}, "unsupported gptq bits 3; supported: 4, 8"),
            ({"quant_method": "gptq", "bits": "4"}, 'bits must be a whole number, got "4"'),
            (
                {"quant_method": "gptq", "checkpoint_format": "marlin"},
                "unsupported gptq checkpoint_format 'marlin'; supported: gptq, gptq_v2",
            ),
            ({"quant_method": "gptq", "is_marlin_format": True}, "unsupported gptq checkpoint_format 'marlin'"),
            ({"quant_method": "gptq", "format": "bitblas"}, "unsupported gptq checkpoint_format 'bitblas'"),
            (
                {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "format": "gptq"},
                "checkpoint_format is 'gptq_v2', but format is 'gptq'; expected the same in both",
            ),
            ({"quant_method": "gptq", "dynamic": {".*": {"bits": 3}}}, "unsupported gptq bits 3; supported: 4, 8"),
            (
                {"quant_method": "gptq", "dynamic": {"(": {}}},
                "dynamic must have regular expressions, got '(': missing )",
            ),
            (
                {"quant_method": "gptq", "dynamic": [".*"]},
                "dynamic must be an object of regular expressions and objects, got",
            ),
            ({"quant_method": "fp8", "weight_block_size": [128]}, "a block must be [rows, columns], got"),
            (
                {"quant_method": "fp8", "weight_scale_semantics": "inverse"},
                'unsupported fp8 weight_scale_semantics "inverse" (str); supported: none',
            ),
            (
                {"quant_method": "compressed-tensors", "config_groups": None},
                "config_groups must be an object, got None",
            ),
            (
                {
                    "quant_method": "compressed-tensors",
                    "format": "float-quantized",
                    "config_groups": {"a": {"targets": ["re:("], "weights": {"type": "float"}}},
                },
                "targets must have regular expressions, got '(': missing )",
            ),
            (
                {"quant_method": "compressed-tensors"},
                "down_proj' is quantised, but no group of quantization_config names it",
            ),
            (
                {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}},
                "unsupported compressed-tensors transform_config",
            ),
            (
                {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
                "unsupported compressed-tensors sparsity_config",
            ),
            (
                {"quant_method": "compressed-tensors", "sparsity_config": ["dense"]},
                "unsupported compressed-tensors sparsity_config ['dense'] (list); supported: none",
            ),
        ],
    )
    def test_a_config(self, config: object, said: str, dense: Path, tmp_path: Path) -> None:
        folder = make_fp8(dense, tmp_path / "model")
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
        with pytest.raises(ModelLoadError) as caught:
            open_checkpoint(folder)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("weights", "form", "said"),
        [
            (
                {"num_bits": 4, "type": "float"},
                "nvfp4-pack-quantized",
                "format 'nvfp4-pack-quantized'; supported: float",
            ),
            ({"num_bits": 8}, "dense", "unsupported compressed-tensors format 'dense'"),
            ({"num_bits": 3}, "pack-quantized", "unsupported compressed-tensors num_bits 3; supported: 4, 8"),
            ({"num_bits": 4, "type": "float"}, "float-quantized", "num_bits 4; supported: 8"),
            ({"strategy": "tensor_group"}, "pack-quantized", "unsupported compressed-tensors strategy 'tensor_group'"),
            ({"strategy": "group"}, "pack-quantized", "group_size must be at least 1, got None"),
        ],
    )
    def test_a_group(self, weights: dict[str, Any], form: str, said: str, dense: Path, tmp_path: Path) -> None:
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
        self.test_a_config(config, said, dense, tmp_path)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda tensors, name: tensors.pop(f"{name}.weight_scale_inv"), "lacks the tensor '{}.weight_scale_inv'"),
            (
                lambda tensors, name: tensors.update({f"{name}.weight_scale_inv": torch.ones(3, 3)}),
                "has shape [3, 3], but its format asks for [2, 1]: one for 128 x 128 of [256, 128]",
            ),
            (
                lambda tensors, name: tensors.update({f"{name}.weight_scale_inv": torch.ones(2, 1).int()}),
                "'{}.weight_scale_inv' is int32, but its format has float32",
            ),
            (
                lambda tensors, name: tensors.update({f"{name}.weight": torch.ones(256, 128).char()}),
                "'{}.weight' is int8",
            ),
            (lambda tensors, name: tensors.update({f"{name}.lora_a": torch.ones(2)}), "the tensor '{}.lora_a', which"),
        ],
    )
    def test_tensors_that_do_not_fit(
        self, change: Callable[[dict[str, torch.Tensor], str], Any], said: str, dense: Path, tmp_path: Path
    ) -> None:
        folder, name = make_fp8(dense, tmp_path / "model"), "model.layers.1.mlp.up_proj"
        tensors = load_file(folder / "model.safetensors")
        change(tensors, name)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelLoadError) as caught:
            open_checkpoint(folder)
        assert said.format(name) in str(caught.value)

    def test_a_method_is_named_whatever_its_files_are(self, dense: Path, tmp_path: Path) -> None:
        folder = make_fp8(dense, tmp_path / "model", quant_method="torchao")
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ModelLoadError, match="unsupported quantization 'torchao'; supported: fp8"):
            open_checkpoint(folder)

    def test_models_of_mlx_are_named(self, dense: Path, tmp_path: Path) -> None:
        config = {"group_size": 64, "bits": 4}
        raw = json.loads((dense / "config.json").read_text()) | {"quantization": config, "quantization_config": config}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ModelLoadError, match="unsupported quantization 'mlx'; supported: fp8"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("part", ["qweight", "weight_packed", "q_weight", "trellis", "W_q", "weight._data"])
    def test_packed_codes_without_a_config(self, part: str, dense: Path, tmp_path: Path) -> None:
        """As of models whose quantize_config.json says what they are."""
        folder = quantised_copy(dense, tmp_path / "model", {}, lambda _, weight: {part: weight.char()})
        raw = json.loads((folder / "config.json").read_text())
        del raw["quantization_config"]
        (folder / "config.json").write_text(json.dumps(raw))
        with pytest.raises(
            ModelLoadError, match=rf"{part}' of a quantised layer; expected a .* supported: fp8, fbgemm"
        ):
            open_checkpoint(folder)

    def test_experts_in_one_tensor(self, tmp_path: Path) -> None:
        folder = make_hf_checkpoint(tmp_path / "model", "qwen3_moe")
        tensors = load_file(folder / "model.safetensors")
        block = "model.layers.0.mlp.experts"
        down = torch.stack([tensors.pop(f"{block}.{number}.down_proj.weight") for number in range(8)])
        tensors[f"{block}.down_proj"] = down.to(torch.float8_e4m3fn)
        save_file(tensors, folder / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
        with pytest.raises(ModelLoadError, match=r"quantised experts in one tensor, '.*experts.down_proj' of float8"):
            open_checkpoint(folder)

    def test_codes_without_a_config(self, dense: Path, tmp_path: Path) -> None:
        folder = make_fp8(dense, tmp_path / "model")
        raw = json.loads((folder / "config.json").read_text())
        del raw["quantization_config"]
        (folder / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ModelLoadError, match=r"is float8_e4m3fn; expected float32, .* or codes and a quantiz"):
            open_checkpoint(folder)
