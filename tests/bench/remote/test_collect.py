"""Runs that are fetched: whole, never mixed with another, and never over what would be lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from prefixwise.bench.remote.agent_client import RemoteAgent, parse_row
from prefixwise.bench.remote.collect import collect, list_runs
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.contract.errors import ArtifactError

LOCAL = RemoteAgent.on(LocalTarget())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "there" / "one"
    folder.mkdir(parents=True)
    (folder / "run_metadata.json").write_text(json.dumps({"started_at_utc": "2026-01-01T00:00:00Z", "spec": {"a": 1}}))
    (folder / "chunk_2.json").write_text("{}")
    return folder


def fetch(run: Path, here: Path, **how: bool) -> Path:
    (fetched,) = collect(LOCAL, str(run.parent), [run.name], here, lambda name: None, **how)
    assert [path.name for path in here.iterdir()] == [run.name], "nothing is left beside it"
    return fetched


def test_the_same_run_with_more_in_it_replaces_what_is_here(run: Path, tmp_path: Path) -> None:
    fetched = fetch(run, tmp_path / "here")
    (run / "chunk_2.json").write_text('{"again": 1}')
    (run / "chunk_4.json").write_text("{}")
    fetch(run, tmp_path / "here")
    assert sorted(path.name for path in fetched.iterdir()) == ["chunk_2.json", "chunk_4.json", "run_metadata.json"]
    assert (fetched / "chunk_2.json").read_text() == '{"again": 1}'


def test_another_run_of_the_same_name_is_replaced_only_where_asked(run: Path, tmp_path: Path) -> None:
    here = fetch(run, tmp_path / "here")
    (run / "run_metadata.json").write_text(json.dumps({"started_at_utc": "2026-02-02T00:00:00Z", "spec": {"a": 1}}))
    with pytest.raises(
        ArtifactError, match=r"is of another run than the one there: run_metadata\.json differs: --overwrite"
    ):
        fetch(run, tmp_path / "here")
    assert "2026-01-01" in (here / "run_metadata.json").read_text()
    fetch(run, tmp_path / "here", overwrite=True)
    assert "2026-02-02" in (here / "run_metadata.json").read_text()


def test_what_is_only_here_is_not_lost(run: Path, tmp_path: Path) -> None:
    (fetch(run, tmp_path / "here") / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"has notes\.txt, which the run there does not: --overwrite"):
        fetch(run, tmp_path / "here")
    assert (tmp_path / "here" / "one" / "notes.txt").read_text() == "mine"


def test_a_copy_that_is_cut_short_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree

    def cut(source: Path, destination: Path, **how: Any) -> None:
        copy(source, destination, **how)
        raise SystemExit(143)

    monkeypatch.setattr("shutil.copytree", cut)
    with pytest.raises(SystemExit):
        collect(LOCAL, str(run.parent), [run.name], tmp_path / "here", lambda name: None)
    assert not list((tmp_path / "here").iterdir())


def test_a_link_to_nothing_is_left_out(run: Path, tmp_path: Path) -> None:
    (run / "dangling").symlink_to("nowhere")
    assert not (fetch(run, tmp_path / "here") / "dangling").exists()


def test_where_it_is_already_it_stays(run: Path) -> None:
    before = (run / "chunk_2.json").stat().st_ino
    fetch(run, run.parent)
    assert (run / "chunk_2.json").stat().st_ino == before


def test_answers_of_another_version_are_told_as_such() -> None:
    class Old:
        target = LocalTarget()

        def call(self, verb: str, *arguments: str) -> dict[str, Any]:
            return {"folders": []}

    with pytest.raises(
        TargetError,
        match=r"local: expected runs in the agent's answer, got folders \(if the target has another version",
    ):
        list_runs(cast(RemoteAgent, Old()), "runs")
    with pytest.raises(TargetError, match="local: expected a row, got another answer: chunk_size"):
        parse_row({}, "local")
