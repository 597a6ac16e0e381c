from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.checkpoint import open_checkpoint
from tests.checkpoints import make_gguf, make_hf_checkpoint
from tests.models.hub_cache import add_to_cache

# Opens the checkpoint, then reads it as a backend would, a few rows at a time, and watches the memory in use.
READ_AND_MEASURE = """
import json, sys
import psutil
from prefixwise.models.checkpoint import open_checkpoint

process = psutil.Process()
checkpoint = open_checkpoint(sys.argv[1])
checkpoint.tensors["final_norm"].read_rows(0, 1)
baseline = process.memory_info().rss
peak, num_bytes = 0, 0
for tensor in checkpoint.tensors.values():
    for start in range(0, tensor.shape[0], 1024):
        rows = tensor.read_rows(start, min(start + 1024, tensor.shape[0]))
        rows.sum()
        num_bytes += rows.nbytes
        peak = max(peak, process.memory_info().rss - baseline)
print(json.dumps({"peak": peak, "num_bytes": num_bytes}))
"""


def test_a_folder_is_opened_by_its_path(hf_folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(str(hf_folders["qwen3"]))
    assert checkpoint.name == str(hf_folders["qwen3"])
    assert checkpoint.path == hf_folders["qwen3"]


def test_a_gguf_file_is_opened_by_its_path(gguf_files: dict[str, Path]) -> None:
    assert open_checkpoint(gguf_files["qwen3"]).config.family == "qwen3"


def test_a_folder_with_one_gguf_file_is_that_file(gguf_files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "only.gguf").symlink_to(gguf_files["llama"])
    assert open_checkpoint(tmp_path).name == "only"


def test_a_folder_with_several_gguf_files_asks_for_one(gguf_files: dict[str, Path]) -> None:
    folder = gguf_files["llama"].parent
    with pytest.raises(ModelLoadError, match=r"holds 6 GGUF files; name one: gemma.gguf, llama.gguf"):
        open_checkpoint(folder)


class TestNames:
    """All by which a model may be recognised, in this order and each once."""

    def test_a_folder_has_the_given_name_its_own_and_what_its_config_says(
        self, hf_folders: dict[str, Path], tmp_path: Path
    ) -> None:
        folder = tmp_path / "my-reranker"
        shutil.copytree(hf_folders["qwen3"], folder)
        assert open_checkpoint(folder).names == (str(folder), "my-reranker")
        config = json.loads((folder / "config.json").read_text())
        for said, expected in (("Qwen/Qwen3-Reranker-0.6B", ("Qwen/Qwen3-Reranker-0.6B",)), ("", ()), (3, ())):
            (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": said}))
            assert open_checkpoint(folder).names == (str(folder), "my-reranker", *expected)

    def test_a_relative_path_has_the_name_of_the_folder_that_it_leads_to(
        self, hf_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(hf_folders["qwen3"])
        assert open_checkpoint(".").names == (".", "qwen3")

    def test_a_snapshot_in_the_hubs_cache_has_its_repositorys_name(
        self, hf_folders: dict[str, Path], gguf_files: dict[str, Path], tmp_path: Path
    ) -> None:
        snapshot = add_to_cache(tmp_path, "Qwen/Qwen3-Reranker-0.6B", hf_folders["qwen3"])
        assert open_checkpoint(snapshot).names == (str(snapshot), "a" * 40, "Qwen/Qwen3-Reranker-0.6B")
        file = add_to_cache(tmp_path, "someone/gguf", gguf_files["gemma"]) / "gemma.gguf"
        assert open_checkpoint(file).names == (str(file), "gemma", "someone/gguf", "tiny gemma")

    def test_a_gguf_file_has_the_names_in_its_metadata(self, hf_folders: dict[str, Path], tmp_path: Path) -> None:
        extra = {"general.name": "Qwen3 Reranker 0.6B", "general.basename": "Qwen3-Reranker"}
        file = make_gguf(hf_folders["qwen3"], tmp_path / "reranker.Q8_0.gguf", extra=extra)
        said = ("Qwen3 Reranker 0.6B", "Qwen3-Reranker")
        assert open_checkpoint(file).names == (str(file), "reranker.Q8_0", *said)
        assert open_checkpoint(tmp_path).names == (str(tmp_path), "reranker.Q8_0", *said), "as the folder was given"


def test_without_a_name_it_is_the_embedded_model() -> None:
    checkpoint = open_checkpoint()
    assert checkpoint.config.num_parameters == 134_515_008
    assert checkpoint.config.max_context_len == 8192


def test_a_wrong_folder_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelLoadError, match=r"expected config.json or one .gguf file, found notes.txt"):
        open_checkpoint(tmp_path)


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is not a model folder: .*, found nothing"):
        open_checkpoint(tmp_path)


def test_another_kind_of_file_says_what_was_expected(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"model.bin is a file; expected a .gguf file, or the folder"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "~/no/where/at/all"])
def test_a_path_to_nothing_is_one_clear_error(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"no model at '{name}': expected a folder, a .gguf file or a hub id"):
        open_checkpoint(name)


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(ModelLoadError, match="got an empty name"):
        open_checkpoint("")


@pytest.mark.parametrize("kind", ["safetensors", "F32", "Q8_0"])
def test_reading_holds_no_second_copy(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 16_384, "hidden_size": 512, "intermediate_size": 2048}
    path = make_hf_checkpoint(tmp_path / "model", "llama", **sizes)
    if kind != "safetensors":
        path = make_gguf(path, tmp_path / "model.gguf", kind)
    command = [sys.executable, "-c", READ_AND_MEASURE, str(path)]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert measured["num_bytes"] > 50_000_000
    assert measured["peak"] < 0.3 * measured["num_bytes"]
