"""`prefixwise ops compare-backends` as a command line: what it takes, what it says, and its status.

The matrices are there already, so nothing is measured: tests/bench/remote/test_compare_backends.py does that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from prefixwise.bench.remote.compare.state import CompareState
from prefixwise.cli.ops import machines
from prefixwise.cli.ops.compare_backends import chunk_sizes, compare_backends, labels, target_of
from tests.bench.remote.compare_samples import small_plan, write_matrices
from tests.bench.remote.gcloud_stand_in import DENIED, GPU_MISSING, StandIn, stand_in
from tests.cli.conftest import Ran
from tests.cli.verb_runner import run_verb

FLAGS = (
    *("--dtype", "float32", "--query-tokens", "24", "--num-items", "6", "--item-tokens", "3"),
    *("--client-chunk-sizes", "6,1", "--warmup-runs", "0", "--timed-runs", "10", "--timed-runs-confirm", "1"),
    *("--timeout-sec", "60", "--server-flag", "--device=cpu", "--jax-server-flag", "--warmup none"),
)
GPU_TARGET = ("--pytorch-target", "gcloud-gpu://vm")
VARIABLES = ("PROJECT", "TPU_NAME", "TPU_ZONE", "GPU_NAME", "GPU_ZONE", "ARTIFACT_SUBDIR")
READY = {"output": json.dumps({"machineType": "zones/z/machineTypes/g4-standard-48", "status": "RUNNING"})}


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "CREATE_RESOURCES", "TEARDOWN_AT_END"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFIXWISE_HOME", str(tmp_path / "prefixwise_home"))


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv("PROJECT", "p")
    monkeypatch.setenv("GPU_ZONE", "z")
    return stand_in(tmp_path / "gcloud", monkeypatch)


@pytest.fixture
def measured(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> Callable[..., list[str]]:
    """The options of a run whose matrices are there."""

    def make(**how: Any) -> list[str]:
        model = checkpoint_of("qwen3")
        write_matrices(tmp_path / "artifacts" / "run", small_plan(model), **how)
        return ["--model", str(model), "--artifact-root", str(tmp_path / "artifacts"), *FLAGS]

    return make


def used(folder: Path, model: Path) -> None:
    """As an earlier call leaves it that has measured on the machine."""
    CompareState(folder, small_plan(model).arguments(), targets={"pytorch": "gcloud-gpu://vm"}).save()


def run(capsys: pytest.CaptureFixture[str], *args: str) -> Ran:
    return run_verb(compare_backends, capsys, *args)


def test_the_last_line_says_where_all_is_and_who_won(
    measured: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ARTIFACT_SUBDIR", "run")
    flags = measured()
    ran = run(capsys, *flags)
    assert ran.status == 0, ran.err
    folder = tmp_path / "artifacts" / "run"
    assert json.loads(ran.out) == {
        "folder": str(folder),
        "comparison_json": str(folder / "comparison.json"),
        "report": str(folder / "report.md"),
        "report_html": str(folder / "report.html"),
        "pass": True,
        "portable_winner": "jax",
        "best_native_winner": "jax",
        "matrices_failed": [],
        "kept": [f"{backend} {view} matrix" for backend in ("jax", "pytorch") for view in ("portable", "best-native")],
    }
    assert "run: jax on local, pytorch on local" in ran.err
    assert "[4/8] jax best-native matrix: already done" in ran.err
    assert "[8/8] report\n" in ran.err
    again = run(capsys, *flags)
    assert "[8/8] report: already done" in again.err

    other = run(capsys, *flags, "--query-tokens", "25")
    assert other.status == 1
    assert "contains another comparison: query_tokens is 24 there, 25 here" in other.err


def test_scores_that_do_not_agree_are_status_1(
    measured: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*measured(jax_drift=0.03), "--artifact-subdir", "run"]
    ran = run(capsys, *flags)
    assert ran.status == 1
    assert json.loads(ran.out)["pass"] is False
    assert "the correctness gate failed" in ran.err


def test_thresholds_are_the_callers(measured: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    gates = ("--correctness-threshold-max-abs", "0.1", "--correctness-threshold-mean-abs", "0.1")
    ran = run(capsys, *measured(jax_drift=0.03), "--artifact-subdir", "run", *gates)
    assert ran.status == 0, ran.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--create-resources"], "--create-resources is for gcloud-tpu:// and gcloud-gpu:// targets, got local"),
        (["--teardown"], "--teardown is for gcloud-tpu:// and gcloud-gpu:// targets, got local"),
        (["--client-chunk-sizes", "0,1"], "--client-chunk-sizes must be 1 or more, got 0"),
        (["--artifact-root", ""], "--artifact-root must be a folder, got nothing"),
        (["--dtype", "float8"], "--dtype must be one of auto, float32, bfloat16, float16, got 'float8'"),
        (["--jax-server-flag", "--api-key secret"], "--api-key cannot be a server flag"),
        (["--label-token-ids", "5,5"], "--label-token-ids must be different ids, got '5,5'"),
    ],
)
def test_what_cannot_be_meant_is_status_2(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(capsys, *flags)
    assert (ran.status, words in ran.err) == (2, True), ran.err


def test_half_files_are_kept_aside_and_made_again(
    measured: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, folder = [*measured(), "--artifact-subdir", "run"], tmp_path / "artifacts" / "run"
    assert run(capsys, *flags).status == 0
    (folder / "canonical_workload.json").write_text("")
    (folder / ".compare_backends.json").write_text('{"half":')
    ran = run(capsys, *flags)
    assert ran.status == 0, ran.err
    assert "renamed to canonical_workload.json.broken, and written again" in ran.err
    assert (folder / ".compare_backends.json.broken").read_text() == '{"half":'


def test_a_closed_stdin_is_nobody_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert not machines._is_interactive()


def test_a_run_that_cannot_begin_leaves_no_folder(
    gcloud: StandIn, tmp_path: Path, checkpoint_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    gcloud.answer("describe", {"status": 1, "stderr": DENIED})
    where = ("--artifact-root", str(tmp_path / "artifacts"), "--model", str(checkpoint_of("qwen3")))
    assert run(capsys, *where, "--create-resources", *GPU_TARGET).status == 1
    assert not list((tmp_path / "artifacts").iterdir())


def test_a_name_that_is_no_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(capsys, "--artifact-subdir", "../elsewhere")
    assert ran.status == 1
    assert "the name of a run must consist of" in ran.err


def test_machines_are_named_as_the_runbook_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert target_of(None, "gcloud-tpu", "TPU_NAME") == "local"
    monkeypatch.setenv("TPU_NAME", "mi-tpu-v6e1")
    assert target_of(None, "gcloud-tpu", "TPU_NAME") == "gcloud-tpu://mi-tpu-v6e1"
    assert target_of("ssh://host", "gcloud-tpu", "TPU_NAME") == "ssh://host"
    assert chunk_sizes("4,1,4") == (4, 1)
    assert chunk_sizes(None) == ()
    assert labels("9454,2753") == (9454, 2753)


def test_nothing_is_created_where_nothing_is_left_to_measure_and_teardown_deletes_what_was_used(
    measured: Callable[..., list[str]],
    gcloud: StandIn,
    tmp_path: Path,
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CREATE_RESOURCES", "1")
    monkeypatch.setenv("TEARDOWN_AT_END", "1")
    monkeypatch.setenv("GPU_NAME", "vm")
    flags = [*measured(), "--artifact-subdir", "run"]
    ran = run(capsys, *flags)
    assert ran.status == 0, ran.err
    assert gcloud.verbs() == []
    assert "gcloud-gpu://vm is left as it is, because nothing was measured on it; to delete it: gcloud" in ran.err
    used(tmp_path / "artifacts" / "run", checkpoint_of("qwen3"))
    ran = run(capsys, *flags)
    assert gcloud.verbs() == ["delete"]
    assert "gcloud compute instances delete vm --zone=z --project=p --quiet" in ran.err


def test_after_a_failure_nothing_is_deleted_but_how_to_is_said(
    measured: Callable[..., list[str]], gcloud: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(capsys, *measured(jax_drift=0.03), "--artifact-subdir", "run", "--teardown", *GPU_TARGET)
    assert ran.status == 1
    assert gcloud.calls == []
    assert "gcloud-gpu://vm is left as it is; to delete it: gcloud compute instances delete vm" in ran.err


def test_a_machine_is_made_with_its_command_shown_first_and_gets_prefixwise(
    measured: Callable[..., list[str]],
    gcloud: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed: list[tuple[str, tuple[str, ...]]] = []

    def install_on(target: Any, plan: Any, say: object) -> None:
        installed.append((target.name, plan.extras))
        raise typer.Exit(1)  # seen enough

    monkeypatch.setattr("prefixwise.bench.remote.install.install_on", install_on)
    missing = {"status": 1, "stderr": GPU_MISSING}
    gcloud.answer("describe", missing, missing, READY)
    flags = [*measured(failed="pytorch_portable"), "--artifact-subdir", "run", "--create-resources", *GPU_TARGET]
    ran = run(capsys, *flags, "--machine-type", "g4-standard-96")
    assert ran.status == 1
    assert installed == [("gcloud-gpu://vm", ("server", "harness", "torch"))]
    assert gcloud.verbs() == ["describe", "describe", "create", "describe", "ssh"]
    assert "  gcloud compute instances create vm --zone=z --project=p --quiet --machine-type=g4-standard-96" in ran.err
    assert "to delete it: gcloud compute instances delete vm" in ran.err


def test_a_machine_that_cannot_be_looked_at_ends_it_before_anything_is_measured(
    measured: Callable[..., list[str]], gcloud: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    gcloud.answer("describe", {"status": 1, "stderr": DENIED})
    flags = [*measured(failed="pytorch_portable"), "--artifact-subdir", "run", "--create-resources", *GPU_TARGET]
    ran = run(capsys, *flags)
    assert ran.status == 1
    assert gcloud.verbs() == ["describe"]
    assert "Required 'compute.instances.get' permission" in ran.err


@pytest.mark.parametrize(("answer", "verbs"), [(True, ["delete"]), (False, [])])
def test_on_a_terminal_it_is_asked_for(
    answer: bool,
    verbs: list[str],
    measured: Callable[..., list[str]],
    gcloud: StandIn,
    tmp_path: Path,
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    def confirm(question: str, **how: Any) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr("typer.confirm", confirm)
    monkeypatch.setattr("prefixwise.cli.ops.machines._is_interactive", lambda: True)
    flags = measured()
    used(tmp_path / "artifacts" / "run", checkpoint_of("qwen3"))
    ran = run(capsys, *flags, "--artifact-subdir", "run", "--teardown", *GPU_TARGET)
    assert ran.status == 0
    assert asked == ["Delete it?"]
    assert gcloud.verbs() == verbs
    assert "gcloud compute instances delete vm" in ran.err
