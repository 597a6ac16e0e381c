from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.hub import download
from tests.models.hub_cache import add_to_cache, run_with_cache

OPEN = """
import sys
from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import open_checkpoint

try:
    checkpoint = open_checkpoint(sys.argv[1])
    print(checkpoint.name, checkpoint.config.family, checkpoint.path)
except ModelLoadError as error:
    print(error)
"""


def test_a_cached_model_is_opened_by_its_id_without_the_network(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    snapshot = add_to_cache(tmp_path, "someone/tiny-qwen3", hf_folders["qwen3"])
    answer = run_with_cache(tmp_path, OPEN, "someone/tiny-qwen3").stdout.split()
    assert answer == ["someone/tiny-qwen3", "qwen3", str(snapshot)]


def test_a_cached_gguf_repository_is_opened_too(gguf_files: dict[str, Path], tmp_path: Path) -> None:
    snapshot = add_to_cache(tmp_path, "someone/tiny-gguf", gguf_files["llama"])
    answer = run_with_cache(tmp_path, OPEN, "someone/tiny-gguf").stdout.split()
    assert answer == ["llama", "llama", str(snapshot / "llama.gguf")]


@pytest.mark.parametrize("model_id", ["someone/not-cached", "not an/id at all"])
def test_an_id_that_leads_nowhere_is_one_clear_line(model_id: str, tmp_path: Path) -> None:
    answer = run_with_cache(tmp_path, OPEN, model_id)
    assert answer.stdout.startswith(f"'{model_id}' is neither a local path nor a model the hub gives us: ")
    assert len(answer.stdout.splitlines()) == 1
    assert answer.stderr == ""


def test_a_download_cut_short_names_the_missing_file(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    add_to_cache(tmp_path, "someone/half", hf_folders["qwen3"] / "config.json")
    answer = run_with_cache(tmp_path, OPEN, "someone/half").stdout
    assert "lacks the weight file model.safetensors" in answer


def test_only_what_we_read_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils._paths import filter_repo_objects

    repository = ["README.md", "config.json", "model-00001-of-00002.safetensors", "consolidated.safetensors"]
    repository += [
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
    ]
    repository += ["special_tokens_map.json", "chat_template.jinja", "pytorch_model.bin", "original/model.safetensors"]
    wanted: list[str] = []

    def record(model_id: str, allow_patterns: list[str]) -> str:
        wanted.extend(filter_repo_objects(repository, allow_patterns=allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    assert download("someone/model") == tmp_path
    assert wanted == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ]


def test_a_repository_of_other_files_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nothing(*_: Any, **__: Any) -> str:
        return str(tmp_path / "never-made")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing)
    with pytest.raises(ModelLoadError, match=r"the hub's 'a/b' has none of the files that we read: config.json"):
        download("a/b")
