from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prefixwise.batch.manifest import job_options
from prefixwise.batch.requests import RowDefaults
from prefixwise.launch.options import EngineOptions


def test_what_decides_about_scores_is_there() -> None:
    base = job_options(EngineOptions(), RowDefaults())
    for other in (EngineOptions(dtype="float32"), EngineOptions(model="org/name"), EngineOptions(delimiter_token_id=3)):
        assert job_options(other, RowDefaults()) != base
    for defaults in (RowDefaults({"suffix": "!"}), RowDefaults({}, {"top_n": 1}), RowDefaults(id_field="key")):
        assert job_options(EngineOptions(), defaults) != base
    json.dumps(base)


def test_what_decides_about_speed_alone_is_not() -> None:
    base = job_options(EngineOptions(), RowDefaults())
    assert job_options(EngineOptions(prefix_cache_bytes=1 << 20, weight_cache=False), RowDefaults()) == base


def test_a_model_that_was_written_anew_is_another(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("one")
    options = EngineOptions(model=tmp_path)
    before = job_options(options, RowDefaults())
    assert job_options(options, RowDefaults()) == before
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert job_options(options, RowDefaults()) != before
    json.dumps(before)


def test_a_profile_that_was_edited_is_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("one")
    options = EngineOptions(profile=path)
    before = job_options(options, RowDefaults())
    os.utime(path, ns=(1, 1))
    assert job_options(options, RowDefaults()) == before
    path.write_text("two")
    assert job_options(options, RowDefaults()) != before
    json.dumps(before)


def test_another_embedded_model_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = job_options(EngineOptions(), RowDefaults())
    (tmp_path / "other.gguf").write_text("x")
    monkeypatch.setattr("prefixwise.batch.manifest.embedded_model_path", lambda: tmp_path / "other.gguf")
    assert job_options(EngineOptions(), RowDefaults()) != before
