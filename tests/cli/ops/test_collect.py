"""`prefixwise ops collect` on this machine: what there is, one run, all of them. Over ssh: test_sweep.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixwise.cli.ops.verbs import collect
from tests.bench.remote.gcloud_stand_in import REFUSED, stand_in
from tests.cli.conftest import Ran
from tests.cli.verb_runner import run_verb

VARIABLES = ("PREFIXWISE_TARGET", "PROJECT", "TPU_NAME", "TPU_ZONE", "GPU_NAME", "GPU_ZONE", "ARTIFACT_SUBDIR")


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFIXWISE_HOME", str(tmp_path / "prefixwise_home"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One run that has a result, and one that has none yet."""
    folder = tmp_path / "there"
    for name, file in (("run-1", "matrix_results.json"), ("run-2", "server.log")):
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text("{}\n")
    return folder


def run(capsys: pytest.CaptureFixture[str], root: Path, *args: str) -> Ran:
    here = root.parent / "here"
    return run_verb(collect, capsys, "--artifact-root", str(root), "--destination", str(here), *args)


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_list_fetches_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(capsys, root, "--list")
    assert ran.status == 0, ran.err
    expected = [
        {"name": "run-1", "files": 1, "bytes": 3, "finished": True},
        {"name": "run-2", "files": 1, "bytes": 3, "finished": False},
    ]
    answer = json.loads(ran.out)
    assert answer["target"] == "local"
    assert [{key: each[key] for key in expected[0]} for each in answer["runs"]] == expected
    header, *rows = ran.err.splitlines()
    assert header.split() == ["run", "files", "KB", "result"]
    assert [row.split()[0] for row in rows] == ["run-1", "run-2"]
    assert not (root.parent / "here").exists()


def test_where_there_are_no_runs_the_list_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(capsys, tmp_path / "nothing", "--list")
    assert (ran.status, ran.err) == (0, "there are no runs\n")
    assert json.loads(ran.out) == {"target": "local", "runs": []}


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_one_run_is_fetched_by_its_name(
    how: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if how == "environment":
        monkeypatch.setenv("ARTIFACT_SUBDIR", "run-1")
    ran = run(capsys, root, *(["run-1"] if how == "argument" else []))
    here = root.parent / "here"
    assert ran.status == 0, ran.err
    assert json.loads(ran.out) == {"target": "local", "fetched": [str(here / "run-1")]}
    assert ran.err.splitlines()[-1] == str(here / "run-1")
    assert names_in(here) == ["run-1/matrix_results.json"]


def test_all_runs_are_fetched(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(capsys, root, "--all")
    here = root.parent / "here"
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)["fetched"] == [str(here / "run-1"), str(here / "run-2")]
    assert names_in(here) == names_in(root)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "expected a run's NAME, --all, or --list"),
        (("run-3",), 1, "local has no run 'run-3' in {root}; existing runs: run-1, run-2"),
        (("../there",), 1, "the name of a run must consist of letters"),
        (("run-1", "--zone", "z"), 2, "--zone is for gcloud-tpu://"),
        (("run-1", "--target", "ftp://host"), 1, "a target must be local, ssh://"),
    ],
)
def test_what_cannot_be_fetched_is_an_error_line(
    arguments: tuple[str, ...], status: int, words: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(capsys, root, *arguments)
    assert (ran.status, ran.out) == (status, "")
    assert words.format(root=root) in ran.err and ran.err.splitlines()[-1].startswith("error: ")
    assert not (root.parent / "here").exists()


def test_a_destination_that_is_a_file_is_an_error_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root.parent / "here").write_text("mine")
    ran = run(capsys, root, "run-1")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.splitlines()[-1].startswith("error: ")
    assert (root.parent / "here").read_text() == "mine"


def test_the_environment_of_the_handoff_leads_to_its_tpu(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gcloud = stand_in(tmp_path / "gcloud", monkeypatch, "my-tpu")
    gcloud.answer("ssh", {"status": 255, "stderr": REFUSED})
    for name, value in {"PROJECT": "p", "TPU_NAME": "my-tpu", "TPU_ZONE": "z"}.items():
        monkeypatch.setenv(name, value)
    ran = run(capsys, root, "--list", "--project", "q")
    assert (ran.status, ran.out) == (1, "")
    assert "the target is gcloud-tpu://my-tpu" in ran.err
    assert gcloud.calls[0][:7] == ["compute", "tpus", "tpu-vm", "ssh", "my-tpu", "--zone=z", "--project=q"]
