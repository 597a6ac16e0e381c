"""One server and the client's sweep against it, as the agent runs them: for real, but for the scores."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact, write_artifact
from prefixwise.bench.kinds.score_matrix import ScoreMatrix
from prefixwise.bench.processes import ServerStartError
from prefixwise.bench.remote.folders import CANONICAL_WORKLOAD
from prefixwise.bench.remote.on_target.client_matrix import is_done, run_client_matrix
from prefixwise.bench.remote.on_target.server_records import left_over, records_folder
from prefixwise.bench.remote.spec import ClientMatrixSpec
from prefixwise.bench.run.workload import WorkloadOptions, make_workload
from prefixwise.bench.tokens import token_facts
from prefixwise.contract.errors import ArtifactError
from tests.bench.remote.compare_samples import small_plan, write_matrices


@pytest.fixture
def spec(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> ClientMatrixSpec:
    model = str(checkpoint_of("qwen3"))
    write_artifact(tmp_path / CANONICAL_WORKLOAD, make_workload(WorkloadOptions(12, 4, 3), token_facts(model)))
    return ClientMatrixSpec(
        str(tmp_path),
        "pytorch_portable",
        ("--backend=fake", "--device=cpu", "--dtype=float32", f"--model-path={model}"),
        (
            *("--backend-name", "pytorch", "--client-chunk-sizes", "4,1", "--warmup-runs", "0"),
            *("--timed-runs", "20", "--timed-runs-confirm", "0"),
        ),
    )


def test_a_server_that_dies_is_started_again_and_what_is_done_is_kept(spec: ClientMatrixSpec, tmp_path: Path) -> None:
    lines: list[str] = []

    def kill_once(line: str) -> None:
        if line.endswith("sweep: chunk size 1") and not any("SIGKILL" in each for each in lines):
            ((_, record),) = left_over()
            os.kill(record.server.process_id, signal.SIGKILL)
        lines.append(line)

    answer = run_client_matrix(spec, kill_once)
    assert answer["sizes_ok"] == [4, 1]
    assert [line for line in lines if "SIGKILL" in line and "starting it again" in line]
    assert any("measured again, as runs of it failed: chunk size 1" in line for line in lines)
    assert not list(records_folder().glob("*.json"))
    path = tmp_path / "pytorch_portable_matrix.json"
    assert is_done(read_artifact(path, ScoreMatrix))
    assert path.with_suffix(".md").exists()

    before = path.stat().st_mtime_ns
    assert run_client_matrix(spec, lines.append) == answer
    assert lines[-1] == "pytorch_portable: already measured"
    assert path.stat().st_mtime_ns == before

    with pytest.raises(ArtifactError, match=r"is of another run: .*--timed-runs 20.*; expected .*--timed-runs 21"):
        run_client_matrix(replace(spec, matrix_flags=(*spec.matrix_flags[:7], "21", *spec.matrix_flags[8:])), print)
    assert path.stat().st_mtime_ns == before


def test_a_server_that_does_not_start_says_why(spec: ClientMatrixSpec) -> None:
    with pytest.raises(ServerStartError, match="no-such-flag"):
        run_client_matrix(replace(spec, server_flags=("--no-such-flag",)), print)
    assert not list(records_folder().glob("*.json"))


def test_a_matrix_of_other_requests_is_not_gone_on_with(spec: ClientMatrixSpec, tmp_path: Path) -> None:
    model = spec.server_flags[-1].removeprefix("--model-path=")
    write_matrices(tmp_path / "other", small_plan(model))
    taken = tmp_path / "other" / "pytorch_portable_matrix.json"
    taken.rename(tmp_path / taken.name)
    with pytest.raises(ArtifactError, match="is of another workload"):
        run_client_matrix(spec, print)


def test_one_in_which_nothing_worked_is_not_done(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    write_matrices(tmp_path / "run", small_plan(checkpoint_of("qwen3")), failed="jax_portable")
    done = {
        path.name: is_done(ScoreMatrix.model_validate(json.loads(path.read_text())))
        for path in (tmp_path / "run").glob("*_matrix.json")
    }
    assert [name for name, is_good in done.items() if not is_good] == ["jax_portable_matrix.json"]
