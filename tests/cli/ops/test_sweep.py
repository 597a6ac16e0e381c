"""`prefixwise ops smoke` and `prefixwise ops matrix` as programs: what they print, leave, and their status."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixwise.cli.ops.sweep import _collect_command, _resume_hint_on_failure, matrix, smoke
from prefixwise.cli.ops.verbs import collect
from tests.bench.remote.gcloud_stand_in import REFUSED, stand_in
from tests.bench.remote.ssh_server import MISSING, SshServer, ssh_server
from tests.cli.conftest import REAL_PROGRAM, Ran
from tests.cli.prefixwise_program import exit_status
from tests.cli.verb_runner import run_verb

WORKLOAD = ("--query-tokens=8", "--num-items=4", "--item-tokens=2", "--warmup-runs=0", "--timed-runs=1")
SERVER = ("--backend=fake", "--dtype=float32", "--server-flag=--device=cpu")  # tests/bench/remote sweeps PyTorch
VARIABLES = ("PREFIXWISE_TARGET", "PROJECT", "TPU_NAME", "TPU_ZONE", "GPU_NAME", "GPU_ZONE", "ARTIFACT_SUBDIR")


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFIXWISE_HOME", str(tmp_path / "prefixwise_home"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    if MISSING is not None:
        pytest.skip(f"{MISSING} is not installed: apt-get install openssh-server openssh-client")
    with ssh_server(tmp_path_factory.mktemp("ssh") / "server") as running:
        yield running


@dataclass(frozen=True)
class Sweep:
    """One that was run, and where its folders are."""

    ran: Ran
    root: Path


def run(environment: dict[str, str], home: Path, *args: str) -> Ran:
    """As people do."""
    own = {
        **{name: value for name, value in environment.items() if name not in VARIABLES},
        "PREFIXWISE_HOME": str(home),
    }
    ran = subprocess.run([*REAL_PROGRAM, *args], capture_output=True, text=True, env=own, check=False)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture(scope="module")
def swept(server: SshServer, checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Two sizes over ssh, under a root that a shell could read as more than a name."""
    folder = tmp_path_factory.mktemp("swept")
    root = folder / "it's a:b $(x)"
    where = ("--target", server.address, "--python", sys.executable, "--artifact-root", str(root))
    flags = ("--model", str(checkpoint_of("qwen3")), "--chunk-sizes", "2,4", *WORKLOAD, *SERVER)
    ran = run(server.environment, folder / "home", "ops", "matrix", *where, *flags, "--artifact-subdir", "two")
    return Sweep(ran, root)


def table_of(err: str) -> list[list[str]]:
    lines = err.splitlines()
    header = next(index for index, line in enumerate(lines) if line.split()[:2] == ["chunk", "size"])
    return [line.split() for line in lines[header + 1 :] if line.split()[-1] in ("ok", "failed")]


def test_a_matrix_ends_with_a_line_of_json_and_a_table_for_people(swept: Sweep, server: SshServer) -> None:
    assert swept.ran.status == 0, swept.ran.err
    (line,) = swept.ran.out.splitlines()
    answer = json.loads(line)
    assert (answer["target"], answer["name"]) == (server.address, "two")
    assert answer["folder"] == str(swept.root / "two")
    assert [(row["chunk_size"], row["status"]) for row in answer["rows"]] == [(2, "ok"), (4, "ok")]
    best = max(answer["rows"], key=lambda row: row["throughput_items_per_sec"])
    assert answer["best_chunk_size"] == best["chunk_size"]
    assert answer["best_throughput"] == best["throughput_items_per_sec"]
    assert [(row[0], row[-1]) for row in table_of(swept.ran.err)] == [("2", "ok"), ("4", "ok")]


def test_its_artifacts_are_valid(swept: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("bench", "check", "--all", str(swept.root)) == 0, capsys.readouterr()
    assert {"chunk_2.json", "chunk_4.json", "matrix_results.json"} <= {
        each.name for each in (swept.root / "two").iterdir()
    }


def test_the_line_that_fetches_it_does(
    swept: Sweep,
    server: SshServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = [line for line in swept.ran.err.splitlines() if line.startswith("fetch them with: ")]
    words = shlex.split(line.removeprefix("fetch them with: "))
    assert words[:3] == ["prefixwise", "ops", "collect"]
    here = tmp_path / "here"
    monkeypatch.setenv("PATH", server.environment["PATH"])
    ran = run_verb(collect, capsys, *words[3:], "--destination", str(here))
    assert ran.status == 0, ran.err
    assert json.loads(ran.out) == {"target": server.address, "fetched": [str(here / "two")]}
    for path in (swept.root / "two").iterdir():
        assert (here / "two" / path.name).read_bytes() == path.read_bytes()


def test_a_smoke_on_this_machine_has_one_row(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", str(checkpoint_of("qwen3")), "--chunk-size", "3", *WORKLOAD, *SERVER)
    root = tmp_path / "artifacts"
    ran = run_verb(smoke, capsys, *flags, "--artifact-root", str(root))
    assert ran.status == 0, ran.err
    (line,) = ran.out.splitlines()
    answer = json.loads(line)
    assert (answer["target"], answer["best_chunk_size"]) == ("local", 3)
    assert answer["name"].startswith("dense-smoke-")
    assert [(row[0], row[-1]) for row in table_of(ran.err)] == [("3", "ok")]
    assert f"artifacts on local: {root / answer['name']}" in ran.err.splitlines()
    assert exit_status("bench", "check", "--all", str(root)) == 0


def test_no_successful_row_is_status_1(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", str(checkpoint_of("qwen3")), "--artifact-root", str(tmp_path), "--artifact-subdir", "bad")
    ran = run_verb(smoke, capsys, *flags, *WORKLOAD, "--server-flag=--no-such-flag")
    assert ran.status == 1
    answer = json.loads(ran.out)
    assert (answer["best_chunk_size"], [row["status"] for row in answer["rows"]]) == (None, ["failed"])
    assert "chunk size 32: " in ran.err and "the server ended with status 2" in ran.err


@pytest.mark.parametrize("sizes", ["", "0,2", "2,2", "2,x", "-1"])
def test_wrong_chunk_sizes_are_status_2(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_verb(matrix, capsys, f"--chunk-sizes={sizes}")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and "--chunk-sizes" in ran.err


def test_a_chunk_size_of_nothing_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_verb(smoke, capsys, "--chunk-size", "0")
    assert ran.status == 2 and "--chunk-size" in ran.err


@pytest.mark.parametrize("verb", [smoke, matrix])
def test_the_environment_of_the_handoff_leads_to_its_tpu(
    verb: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gcloud = stand_in(tmp_path / "gcloud", monkeypatch, "my-tpu")
    gcloud.answer("ssh", {"status": 255, "stderr": REFUSED})
    for name, value in {"PROJECT": "p", "TPU_NAME": "my-tpu", "TPU_ZONE": "z"}.items():
        monkeypatch.setenv(name, value)
    ran = run_verb(verb, capsys, "--zone", "y")
    assert (ran.status, ran.out) == (1, "")
    assert "the target is gcloud-tpu://my-tpu" in ran.err and "Connection refused" in ran.err
    assert gcloud.calls[0][:7] == ["compute", "tpus", "tpu-vm", "ssh", "my-tpu", "--zone=y", "--project=p"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "the port must be 0 to 65535, got 70000"),
        (["--artifact-root", ""], "--artifact-root must be a folder, got nothing"),
        (["--multi-item-mask-impl", "../esc"], "'../esc' is not one of"),
        (["--backend", "tpu"], "'tpu' is not one of"),
        (["--dtype", "float8"], "'float8' is not one of"),
        (["--algorithm", "fast"], "'fast' is not one of"),
        (["--server-flag", "--api-key secret"], "--api-key cannot be a server flag"),
        (["--server-flag=--api-key=secret"], "--api-key cannot be a server flag"),
    ],
)
@pytest.mark.parametrize("verb", [smoke, matrix])
def test_what_would_fail_on_the_target_is_status_2_here(
    verb: object, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_verb(verb, capsys, "--target", "local", *flags)  # type: ignore[arg-type]
    assert (ran.status, words in ran.err) == (2, True), ran.err
    assert "secret" not in ran.err


@pytest.mark.parametrize("flags", [["one", "--list"], ["one", "--all"], ["--list", "--all"]])
def test_one_run_and_all_of_them_exclude_each_other(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_verb(collect, capsys, "--target", "local", *flags)
    assert (ran.status, "exclude each other" in ran.err) == (2, True), ran.err


def test_a_name_from_the_environment_gives_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("ARTIFACT_SUBDIR", "one")
    ran = run_verb(collect, capsys, "--target", "local", "--list", "--artifact-root", str(tmp_path))
    assert (ran.status, ran.out) == (0, '{"target": "local", "runs": []}\n')


def test_the_way_to_fetch_a_run_has_all_that_was_given() -> None:
    plain = "prefixwise ops collect one --target ssh://host"
    assert _collect_command("one", "ssh://host", None, "reports/artifacts") == plain
    assert (
        _collect_command("one", "ssh://host", "my python", "/r") == f"{plain} --python 'my python' --artifact-root /r"
    )


def test_a_sweep_that_is_ended_says_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), _resume_hint_on_failure(["/runs/dense-matrix-1"]):
        raise KeyboardInterrupt
    said = capsys.readouterr().err
    assert "completed rows are in /runs/dense-matrix-1" in said
    assert "--artifact-subdir dense-matrix-1" in said
