"""Mixtures of experts in Hugging Face folders: a tensor for each expert or fused ones, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.config import ExpertsConfig
from prefixwise.models.sources import open_checkpoint
from tests.models.test_hf_folder import edit_config, edit_tensors

UP_3 = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight",
}


@pytest.fixture(params=["qwen3_moe", "mixtral"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def copied(family: str, hf_folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_folders[family], tmp_path / family))


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    assert found.config == expected.config and found.tensors.keys() == expected.tensors.keys()
    for key, tensor in found.tensors.items():
        num_rows = tensor.shape[0]
        rows = expected.tensors[key].read_rows(0, num_rows)
        np.testing.assert_array_equal(tensor.read_rows(0, num_rows), rows)
        np.testing.assert_array_equal(tensor.read_rows(num_rows // 3, num_rows - 1), rows[num_rows // 3 : -1])


def test_the_configs_say_how_many_there_are(hf_folders: dict[str, Path]) -> None:
    qwen, mixtral = (open_checkpoint(hf_folders[name]).config for name in ("qwen3_moe", "mixtral"))
    assert (qwen.experts, qwen.mlp_size) == (ExpertsConfig(8, 3, norms_weights=True), 40)
    assert (mixtral.experts, mixtral.mlp_size) == (ExpertsConfig(4, 2, norms_weights=True), 96)


def test_older_configs_say_num_experts_and_may_not_norm(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_folders["qwen3_moe"], tmp_path / "older"))
    edit_config(folder, num_local_experts=..., num_experts=8, norm_topk_prob=...)
    assert open_checkpoint(folder).config.experts == ExpertsConfig(8, 3, norms_weights=False)


def test_fused_tensors_are_those_of_the_experts(family: str, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_folders[family])
    model.save_pretrained(tmp_path, save_original_format=False)
    assert_same(open_checkpoint(tmp_path), open_checkpoint(hf_folders[family]))


def test_experts_may_have_dtypes_of_their_own(family: str, hf_folders: dict[str, Path], copied: Path) -> None:
    """As where some are quantised: they are read as float32."""

    def narrow(tensors: dict[str, Any]) -> None:
        tensors[UP_3[family]] = tensors[UP_3[family]].astype(np.float16)

    found = open_checkpoint(edit_tensors(copied, narrow)).tensors["layers.1.up"]
    expected = open_checkpoint(hf_folders[family]).tensors["layers.1.up"]
    assert found.dtype == "float32"
    np.testing.assert_allclose(found.read_rows(0, found.shape[0]), expected.read_rows(0, found.shape[0]), atol=1e-3)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors, name: tensors.pop(name), "the checkpoint lacks the tensor '{}'"),
        (lambda tensors, name: tensors.update({name: tensors[name][:-1].copy()}), "the tensor '{}' has shape"),
        (
            lambda tensors, name: tensors.update({name.replace(".3.", ".9."): tensors[name].copy()}),
            "the config asks for [48] experts, but the checkpoint has",
        ),
    ],
)
def test_a_damaged_expert_is_named(
    family: str, copied: Path, edit: Callable[[dict[str, Any], str], object], message: str
) -> None:
    edit_tensors(copied, lambda tensors: edit(tensors, UP_3[family]))
    with pytest.raises(ModelLoadError, match=message.format(UP_3[family])):
        open_checkpoint(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "unsupported: layers without experts beside layers with them"),
        ({"mlp_only_layers": [0]}, "unsupported: layers without experts beside layers with them"),
        ({"use_sliding_window": True}, "unsupported: use_sliding_window of a"),
        ({"num_experts_per_tok": 9}, "a token must have 1 to [48] of [48] experts, got 9"),
        ({"num_experts_per_tok": ...}, "config.json lacks 'num_experts_per_tok'"),
        ({"num_local_experts": ...}, "config.json lacks 'num_(local_)?experts'"),
    ],
)
def test_what_cannot_be_run_is_refused(copied: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(copied, **changes)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(copied)
