"""The whole validation of several models, with servers of its own; then again from what that left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.client import ScoreClient
from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.evaluation import EndpointEvaluation
from prefixwise.bench.kinds.gate_report import GateReport
from prefixwise.bench.kinds.model_matrix import ModelMatrix
from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial
from prefixwise.bench.kinds.parity import Parity
from prefixwise.bench.run.model_matrix import folder_name
from tests.cli.conftest import Ran
from tests.cli.validate_program import result_of, run_validate

SMALL = [
    "--item-counts",
    "1,2",
    "--timed-runs",
    "1",
    "--warmup-runs",
    "0",
    "--query-tokens",
    "24",
    "--item-tokens",
    "5",
]
EASY = ["--speedup-items", "2", "--min-speedup", "0.01"]
KINDS: dict[str, type[Artifact]] = {
    "multi": EndpointEvaluation,
    "serial": EndpointEvaluation,
    "multi_vs_serial": MultiVsSerial,
    "parity": Parity,
    "gate": GateReport,
}


def run(folder: Path, *models: object, more: tuple[str, ...] = ()) -> Ran:
    outputs = ("--output-json", folder / "matrix.json", "--output-markdown", folder / "matrix.md")
    flags = ("--server-flag", "--dtype float32", "--server-flag=--device=cpu")
    return run_validate("models", "--models", ",".join(map(str, models)), *outputs, *flags, *SMALL, *EASY, *more)


@pytest.fixture(scope="module")
def models(checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder that is no model, and one that is."""
    return [tmp_path_factory.mktemp("no-model"), checkpoint_of("qwen3")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def first_run(folder: Path, models: list[Path]) -> Ran:
    return run(folder, *models)


def artifact_times(folder: Path) -> dict[str, int]:
    """Of what is not made anew from the rest."""
    return {
        str(path): path.stat().st_mtime_ns
        for name in ("serial", "multi", "parity")
        for path in (folder / "matrix").glob(f"*/{name}.json")
    }


def test_a_model_that_fails_is_a_row_and_the_others_go_on(first_run: Ran, folder: Path, models: list[Path]) -> None:
    matrix = read_artifact(folder / "matrix.json", ModelMatrix)
    assert matrix.models == [row.model for row in matrix.rows] == [str(model) for model in models]
    assert [row.status for row in matrix.rows] == ["error", "pass"], first_run.err
    reason = matrix.rows[0].reason or ""
    assert f"error: {models[0]} is not a model folder: expected config.json" in reason
    assert (first_run.status, matrix.all_pass) == (1, False)
    assert result_of(first_run) == {
        "output_json": str(folder / "matrix.json"),
        "rows": [{"model": row.model, "status": row.status, "reason": row.reason} for row in matrix.rows],
        "all_pass": False,
    }


def test_figures_are_those_of_float32(first_run: Ran, folder: Path) -> None:
    matrix = read_artifact(folder / "matrix.json", ModelMatrix)
    row = matrix.rows[1]
    assert (row.same_length_isolation_max, row.changed_length_isolation_max) == (0.0, 0.0)
    assert row.delimiter_aligned_equivalence_max is not None and row.delimiter_aligned_equivalence_max < 1e-5
    assert row.jax_serial_vs_torch_serial_max is not None and row.jax_serial_vs_torch_serial_max < 1e-5
    assert list(row.speedups) == ["1", "2"]


def test_every_model_has_artifacts_and_logs_of_its_own(first_run: Ran, folder: Path, models: list[Path]) -> None:
    own = folder / "matrix" / folder_name(str(models[1]))
    assert own != folder / "matrix" / folder_name(str(models[0]))
    for name, kind in KINDS.items():
        read_artifact(own / f"{name}.json", kind)
    serial, multi = (read_artifact(own / f"{mode}.json", EndpointEvaluation) for mode in ("serial", "multi"))
    assert serial.server_config["configuration"]["algorithm"] == "serial"
    assert serial.server_config["configuration"]["prefix_cache"] is False
    assert multi.server_config["configuration"]["delimiter_token_id"] == multi.delimiter == 0
    assert all(each.server_config["configuration"]["dtype"] == "float32" for each in (serial, multi))
    assert "ready on http" in (own / "multi_server.log").read_text()


def test_the_table_is_on_stderr_and_in_markdown(first_run: Ran, folder: Path, models: list[Path]) -> None:
    lines = first_run.err.splitlines()
    header = next(place for place, line in enumerate(lines) if line.startswith("Model "))
    assert lines[header + 1].split()[0] == str(models[0])
    assert [line.split()[-1] for line in lines[header + 1 : header + 3]] == ["ERROR", "pass"]
    assert lines[-1].startswith(f"{models[0]}: error: the server ended with status 1")
    page = (folder / "matrix.md").read_text()
    assert f"| {models[1]} | 0.0000 | 0.0000 |" in page
    assert "[1/6] validate models:" in lines[0]


def test_resumed_nothing_is_measured_again_and_bounds_may_be_others(
    first_run: Ran, folder: Path, models: list[Path]
) -> None:
    before = artifact_times(folder)
    ran = run(folder, models[1], more=("--resume", "--min-speedup", "1000"))
    assert artifact_times(folder) == before
    assert len(before) == 3
    kept = ["serial kept", "multi kept", "parity kept"]
    assert [line.rsplit(": ", 1)[1] for line in ran.err.splitlines()[:3]] == kept
    assert ran.status == 1
    reasons = [row["reason"] for row in result_of(ran)["rows"]]
    assert all(reason.startswith("speedup_n32_ge_3x: ") and reason.endswith("expected >= 1000") for reason in reasons)


def test_an_artifact_that_is_damaged_is_made_again(first_run: Ran, folder: Path, models: list[Path]) -> None:
    before = artifact_times(folder)
    damaged = folder / "matrix" / folder_name(str(models[1])) / "parity.json"
    damaged.write_text(damaged.read_text()[:100])
    ran = run(folder, models[1], more=("--resume",))
    assert (ran.status, result_of(ran)["all_pass"]) == (0, True)
    assert read_artifact(damaged, Parity).model == str(models[1])
    assert {path for path, time in artifact_times(folder).items() if before[path] != time} == {str(damaged)}


def test_interrupted_it_leaves_the_rows_that_are_done_and_no_server(
    first_run: Ran,
    folder: Path,
    models: list[Path],
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[str] = []

    def interrupt(client: ScoreClient) -> dict[str, Any]:
        met.append(client.server_info()["status"])
        raise KeyboardInterrupt

    monkeypatch.setattr("prefixwise.cli.validate.models.print_server_info", interrupt)
    ran = run(folder, models[1], checkpoint_of("llama"), more=("--resume",))
    assert (ran.status, ran.out) == (130, "")
    matrix = read_artifact(folder / "matrix.json", ModelMatrix)
    assert [(row.model, row.status) for row in matrix.rows] == [(str(models[1]), "pass")]
    assert (len(matrix.models), matrix.all_pass, met) == (2, False, ["ready"])
    assert not any(b"--served-model-name" in line for line in own_children())


def own_children() -> list[bytes]:
    """The command lines of processes that this one has started and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.append((entry / "cmdline").read_bytes())
        except (OSError, IndexError, ValueError):
            continue
    return found


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--models", " , "), "error: --models must name at least one model, got none"),
        (("--models", "a", "--server-flag", "'open"), "error: --server-flag cannot be split into arguments"),
        (("--models", "a", "--item-counts", "0"), "error: --item-counts must be 1 or more each, got '0'"),
    ],
)
def test_bad_arguments_are_a_usage_error(tmp_path: Path, args: tuple[str, ...], error: str) -> None:
    ran = run_validate("models", *args, "--output-json", tmp_path / "matrix.json")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(error)


def test_without_transformers_no_server_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    ran = run(tmp_path, "embedded")
    assert ran.status == 1
    assert ran.err.startswith("error: the reference needs transformers")
    assert not (tmp_path / "matrix").exists()
