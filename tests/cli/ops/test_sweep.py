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

from prefixwise.cli.ops.collect import collect
from prefixwise.cli.ops.sweep import matrix, smoke
from tests.bench.remote.gcloud_stand_in import REFUSED, stand_in
from tests.bench.remote.ssh_server import MISSING, SshServer, ssh_server
from tests.cli.conftest import REAL_PROGRAM, Ran
from tests.cli.prefixwise_program import exit_status
from tests.cli.verb_runner import run_verb

WORKLOAD = ("--query-tokens=8", "--num-items=4", "--item-tokens=2", "--warmup-runs=0", "--timed-runs=1")
SERVER = ("--backend=torch", "--dtype=float32", "--server-flag=--device=cpu")
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


def test_no_row_that_worked_is_status_1(
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
    gcloud.answer("ssh", {"status": 255, "complaints": REFUSED})
    for name, value in {"PROJECT": "p", "TPU_NAME": "my-tpu", "TPU_ZONE": "z"}.items():
        monkeypatch.setenv(name, value)
    ran = run_verb(verb, capsys, "--zone", "y")
    assert (ran.status, ran.out) == (1, "")
    assert "the target is gcloud-tpu://my-tpu" in ran.err and "Connection refused" in ran.err
    assert gcloud.calls[0][:7] == ["compute", "tpus", "tpu-vm", "ssh", "my-tpu", "--zone=y", "--project=p"]
