"""`prefixwise bench compare`, from real servers to the verdict.

One `prefixwise serve` on a small model is both backends: what stands between it and JAX's client is right, or wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.comparison.model import Comparison
from prefixwise.bench.kinds.score_matrix import ScoreMatrix
from prefixwise.bench.rules import Bounds
from prefixwise.cli.bench.compare import compare
from tests.bench.matrix_samples import write_workload
from tests.bench.wrong_server import Fault, wrong_server
from tests.cli.conftest import Ran
from tests.cli.prefixwise_program import exit_status
from tests.server.server_process import real_server

SIZES = [1, 2, 6]


@pytest.fixture(scope="module")
def server(checkpoint_of: Callable[[str], Path]) -> Iterator[str]:
    with real_server(f"--model-path={checkpoint_of('qwen3')}", "--dtype=float32") as running:
        yield running.url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("compare")
    write_workload(made / "workload.json")
    return made


@pytest.fixture(scope="module")
def pytorch(folder: Path, server: str) -> Path:
    return measure(folder, server, "pytorch")


@pytest.fixture(scope="module")
def jax(folder: Path, server: str) -> Path:
    return measure(folder, server, "jax")


@pytest.fixture(scope="module")
def drifting(folder: Path, server: str) -> Path:
    return measure_wrong(folder, server, "drift")


@pytest.fixture(scope="module")
def leaking(folder: Path, server: str) -> Path:
    return measure_wrong(folder, server, "leak")


def measure(folder: Path, url: str, backend: str, name: str = "good", timeout_sec: float = 60.0) -> Path:
    output = folder / f"{backend}_{name}.json"
    args = [
        *("--url", url, "--workload-json", str(folder / "workload.json"), "--output-json", str(output)),
        *("--backend-name", backend, "--client-chunk-sizes", ",".join(map(str, SIZES))),
        *("--warmup-runs", "0", "--timed-runs", "1", "--timed-runs-confirm", "1", "--timeout-sec", str(timeout_sec)),
    ]
    assert exit_status("bench", "matrix", *args) == 0
    return output


def measure_wrong(folder: Path, url: str, fault: Fault, only_items: int | None = None) -> Path:
    """JAX's matrix, of a server that is wrong."""
    with wrong_server(url, fault, only_items=only_items) as wrong_url:
        return measure(folder, wrong_url, "jax", fault, timeout_sec=2.0 if fault == "late" else 60.0)


def run(capsys: pytest.CaptureFixture[str], jax: Path, pytorch: Path, *more: str) -> Ran:
    capsys.readouterr()
    args = ["--jax-portable-json", str(jax), "--pytorch-portable-json", str(pytorch)]
    output = jax.with_name(f"comparison_{jax.stem}.json")
    return Ran(exit_status("bench", "compare", *args, "--output-json", str(output), *more), *capsys.readouterr())


def result(jax: Path) -> Comparison:
    return read_artifact(jax.with_name(f"comparison_{jax.stem}.json"), Comparison)


def last(ran: Ran) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.out.splitlines()[-1])
    return found


class TestGoodServers:
    def test_scores_agree_and_somebody_wins(
        self, folder: Path, jax: Path, pytorch: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With the command line of the runbook."""
        ran = run(
            *(capsys, jax, pytorch, "--jax-best-native-json", str(jax), "--pytorch-best-native-json", str(pytorch)),
            *("--correctness-threshold-max-abs", "0.02", "--correctness-threshold-mean-abs", "0.01"),
            *("--output-markdown", str(folder / "comparison.md")),
        )
        made = result(jax)
        assert ran.status == 0
        assert made.correctness["pass"]
        assert [row.correctness.max_abs_diff for row in made.portable_view.rows] == [0.0, 0.0, 0.0]
        assert made.portable_view.winner.backend in ("jax", "pytorch")
        assert made.best_native_view.correctness.num_compared == 12
        assert ran.out.count("\n") == 1
        assert last(ran) == {
            "output_json": str(folder / "comparison_jax_good.json"),
            "pass": True,
            "portable_winner": made.portable_view.winner.backend,
            "best_native_winner": made.best_native_view.winner.backend,
            "recommendations": made.recommendations,
        }
        caption, header = ran.err.splitlines()[:2]
        assert caption.startswith("Portable view: the same client, the same chunks.")
        assert re.split(" {2,}", header) == [
            *("chunk size (items)", "JAX items/s", "PyTorch items/s", "items/s change"),
            *("JAX p95 (ms)", "PyTorch p95 (ms)", "p95 change", "max score diff", "mean score diff", "scores"),
        ]
        page = (folder / "comparison.md").read_text()
        assert page.startswith("# JAX vs PyTorch: multi-item scoring (")
        assert f"- Recommendation, overall: {made.recommendations['overall']}" in page.splitlines()

    def test_a_server_that_is_not_what_it_is_called_was_noted(self, jax: Path, pytorch: Path) -> None:
        notes = read_artifact(jax, ScoreMatrix).notes
        assert notes[0] == "declared backend = jax, but the server says backend = torch"
        assert notes[1].startswith("the workload was made for fake-model, but the server has /")
        assert [note for note in read_artifact(pytorch, ScoreMatrix).notes if "backend" in note] == []

    def test_that_it_was_noted_is_in_the_comparison_too(
        self, jax: Path, pytorch: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        reported = "jax portable (jax_good.json): declared backend = jax, but the server says backend = torch"
        assert f"note: {reported}" in run(capsys, jax, pytorch).err.splitlines()
        assert reported in result(jax).notes

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            *(("--guardrail-ratio", value) for value in ("0.5", "inf", "nan")),
            *(("--correctness-threshold-max-abs", value) for value in ("-1", "inf", "nan")),
            ("--correctness-threshold-mean-abs", "nan"),
        ],
    )
    def test_a_bound_that_is_none(
        self, jax: Path, pytorch: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
    ) -> None:
        ran = run(capsys, jax, pytorch, option, value)
        assert (ran.status, ran.out) == (2, "")
        assert f"Invalid value for '{option}'" in ran.err


class TestWrongServers:
    @pytest.mark.parametrize(
        ("matrix_name", "verdicts"),
        [("drifting", [False, False, False]), ("leaking", [True, False, False])],
    )
    def test_wrong_scores_fail_the_gate_and_cannot_win(
        self,
        request: pytest.FixtureRequest,
        pytorch: Path,
        capsys: pytest.CaptureFixture[str],
        matrix_name: str,
        verdicts: list[bool],
    ) -> None:
        """An item alone has nobody to leak to it."""
        jax: Path = request.getfixturevalue(matrix_name)
        ran = run(capsys, jax, pytorch)
        made = result(jax)
        assert (ran.status, last(ran)["pass"]) == (1, False)
        assert "the correctness gate failed" in ran.err.splitlines()
        assert [row.correctness.passed for row in made.portable_view.rows] == verdicts
        assert {row.correctness.status for row in made.portable_view.rows} == {"ok"}
        assert made.portable_view.backend_best["jax"].place == (("jax", 1) if verdicts[0] else None)
        assert "The correctness gate failed: chunk size" in made.recommendations["overall"]

    def test_a_looser_gate_lets_a_drift_pass(
        self, drifting: Path, pytorch: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(capsys, drifting, pytorch, *loose(0.031)).status == 0
        assert run(capsys, drifting, pytorch, *loose(0.029)).status == 1
        found = result(drifting).portable_view.rows[0].correctness
        assert found.max_abs_diff == pytest.approx(0.03, abs=1e-9)
        assert found.mean_abs_diff == pytest.approx(0.03, abs=1e-9)

    @pytest.mark.parametrize(
        ("fault", "reason"), [("error", "http_error"), ("late", "timeout"), ("short", "bad_response")]
    )
    def test_a_size_that_fails_is_missing_and_the_others_are_compared(
        self,
        folder: Path,
        server: str,
        pytorch: Path,
        capsys: pytest.CaptureFixture[str],
        fault: Fault,
        reason: str,
    ) -> None:
        jax = measure_wrong(folder, server, fault, only_items=2)
        swept = read_artifact(jax, ScoreMatrix)
        assert [row.failure_reason_counts for row in swept.results] == [{}, {reason: 1}, {}]
        ran = run(capsys, jax, pytorch)
        made = result(jax)
        assert [row.correctness.status for row in made.portable_view.rows] == ["ok", "missing_scores", "ok"]
        assert (ran.status, made.correctness["rows_compared"]) == (0, 2)
        assert "note: correctness, chunk size 2: missing_scores, no scores of jax" in ran.err.splitlines()


def loose(bound: float) -> tuple[str, ...]:
    return ("--correctness-threshold-max-abs", str(bound), "--correctness-threshold-mean-abs", str(bound))


def test_files_of_two_workloads_are_refused(
    folder: Path, server: str, pytorch: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_workload(tmp_path / "workload.json", first_token=11)
    jax = measure(tmp_path, server, "jax")
    ran = run(capsys, jax, pytorch)
    assert (ran.status, ran.out) == (1, "")
    assert "are of different workloads and cannot be compared: sha256" in ran.err
    assert ran.err.count("\n") == 1


def test_the_gates_are_those_of_the_rules() -> None:
    """The command line has them as numbers, so that its help need not load the rules."""
    defaults = {name: parameter.default for name, parameter in signature(compare).parameters.items()}
    assert defaults["correctness_threshold_max_abs"] == Bounds().max_abs_diff == 0.02
    assert defaults["correctness_threshold_mean_abs"] == Bounds().mean_abs_diff == 0.01
    assert defaults["guardrail_ratio"] == Bounds().guardrail_ratio == 1.25
