from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixwise.models.families import FAMILIES
from prefixwise.models.sources import LocalModel
from tests.cli.conftest import REAL_PROGRAM, RunMain, run_process

FOUND = [
    LocalModel("embedded", "llama", Path("/models/embedded.gguf"), 98_400_000, "embedded: the default"),
    LocalModel("org/model", "qwen3", Path("/cache/a folder/" + "x" * 100), 1_234_000_000, ""),
    LocalModel("org/other", None, Path("/cache/other"), 5_000_000, "unsupported architecture\n['Bert']"),
    LocalModel("absent", None, None, 0, "not installed"),
]


@pytest.fixture(autouse=True)
def found_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixwise.models.sources.find_local_models", lambda: FOUND)


def test_families_are_listed_with_their_formats(run_main: RunMain) -> None:
    ran = run_main("models")
    lines = ran.out.splitlines()
    rows = {line.split()[0]: line for line in lines[2 : lines.index("")]}
    assert (ran.status, ran.err) == (0, "")
    assert rows.keys() == FAMILIES.keys()
    assert rows["qwen3"].split() == ["qwen3", "Qwen3", "Qwen3ForCausalLM", "safetensors,", "GGUF"]
    assert rows["mistral"].split() == ["mistral", "Mistral", "MistralForCausalLM", "safetensors"]
    assert rows["llama_bidirec"].split()[-2:] == ["LlamaBidirectionalForSequenceClassification", "safetensors"]


def test_local_models_are_listed_with_what_is_wrong_with_them(run_main: RunMain) -> None:
    lines = run_main("models").out.splitlines()
    assert lines[lines.index("Models on this machine") + 1 :] == [
        "model      family     size  path",
        "embedded   llama   98.4 MB  /models/embedded.gguf",
        "  embedded: the default",
        "org/model  qwen3    1.2 GB  /cache/a folder/" + "x" * 100,
        "org/other  -        5.0 MB  /cache/other",
        r"  cannot be used: unsupported architecture\n['Bert']",
        "absent     -             -  -",
        "  cannot be used: not installed",
    ]


def test_json_has_it_all_on_one_line(run_main: RunMain) -> None:
    ran = run_main("models", "--json")
    body = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    assert [family["name"] for family in body["families"]] == list(FAMILIES)
    assert body["families"][0] == {
        "name": "qwen3",
        "title": "Qwen3",
        "hf_architectures": ["Qwen3ForCausalLM"],
        "hf_classifiers": ["Qwen3ForSequenceClassification"],
        "gguf_architectures": ["qwen3"],
        "formats": ["safetensors", "GGUF"],
    }
    assert body["models"][0] == {
        "name": "embedded",
        "family": "llama",
        "path": "/models/embedded.gguf",
        "size_bytes": 98_400_000,
        "note": "embedded: the default",
    }
    assert body["models"][3]["path"] is None


def test_the_local_cache_is_looked_through(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--bert" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["BertModel"]}')
    (tmp_path / "models--org--bert" / "refs").mkdir()
    (tmp_path / "models--org--bert" / "refs" / "main").write_text("abc")
    ran = run_process([*REAL_PROGRAM, "models", "--json"], HF_HUB_CACHE=str(tmp_path))
    embedded, bert = json.loads(ran.out)["models"]
    assert embedded["family"] == "llama"
    assert (bert["name"], bert["family"], bert["path"]) == ("org/bert", None, str(snapshot))
    assert "BertModel" in bert["note"]
