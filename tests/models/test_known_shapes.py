from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import open_checkpoint
from prefixwise.models.embedded import embedded_model_path
from prefixwise.models.known_shapes import describe_model, known_shapes


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("google/gemma-2b", 2_506_172_416),
    ],
)
def test_a_known_shape_has_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    assert known_shapes()[name].num_parameters == num_parameters


def test_the_shape_of_the_benchmarks_is_known() -> None:
    assert describe_model("Qwen3-0.6B") == QWEN3_06B


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "Qwen3-4B", "qwen3-4b", "QWEN/qwen3-4B"])
def test_names_come_with_or_without_their_owner(name: str) -> None:
    assert describe_model(name).model_size == 2560


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama3", "gemma"])
def test_a_folder_is_described_as_it_is_opened(checkpoint_of: Callable[[str], Path], family: str) -> None:
    folder = checkpoint_of(family)
    assert describe_model(str(folder)) == open_checkpoint(folder).config


def test_a_folder_needs_no_weights(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    text = (checkpoint_of("qwen3") / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    assert describe_model(str(tmp_path)).family == "qwen3"


def test_a_gguf_file() -> None:
    assert describe_model(str(embedded_model_path())).num_heads == 9


@pytest.mark.parametrize("name", ["", "nothing", "Qwen/", "Qwen3", "/no/such/folder"])
def test_a_model_that_nobody_knows(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"no model of the name .*: expected a folder with config.json, a .gguf"):
        describe_model(name)


def test_a_classifier_cannot_be_described_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(ModelLoadError, match="a classifier cannot be described without its weights"):
        describe_model(str(tmp_path))
