"""`prefixwise bench matrix` against real servers on a formula: options, files, streams, status, Ctrl-C and --resume."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.score_matrix import ScoreMatrix
from tests.bench.matrix_samples import write_workload
from tests.bench.wrong_server import wrong_server
from tests.cli.conftest import REAL_PROGRAM, Ran
from tests.cli.prefixwise_program import exit_status
from tests.server.server_process import server_process

KEY = "hush"
Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def good() -> Iterator[str]:
    with server_process(f"--api-key={KEY}") as running:
        yield running.url


@pytest.fixture
def run(tmp_path: Path, good: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """A quick sweep, and more options after its own."""
    workload = write_workload(tmp_path / "workload.json")

    def start(*more: str, url: str = good, sizes: str = "1,6", backend: str = "jax") -> Ran:
        args = quick_args(url, workload, tmp_path / "matrix.json", sizes, backend)
        return Ran(exit_status(*args, *more), *capsys.readouterr())

    return start


def quick_args(url: str, workload: Path, output: Path, sizes: str = "1,6", backend: str = "jax") -> list[str]:
    return [
        *("bench", "matrix"),
        *("--url", url, "--workload-json", str(workload), "--output-json", str(output), "--api-key", KEY),
        *("--backend-name", backend, "--client-chunk-sizes", sizes),
        *("--warmup-runs", "0", "--timed-runs", "2", "--timed-runs-confirm", "0"),
    ]


def result(folder: Path) -> ScoreMatrix:
    return read_artifact(folder / "matrix.json", ScoreMatrix)


def last(ran: Ran) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.out.splitlines()[-1])
    return found


def test_a_sweep_from_start_to_end(run: Run, tmp_path: Path, good: str) -> None:
    ran = run("--timed-runs-confirm", "1", "--output-markdown", str(tmp_path / "matrix.md"), backend="pytorch")
    assert ran.status == 0
    made = result(tmp_path)
    assert (made.backend, made.evaluation_view, made.complete) == ("pytorch", "portable", True)
    assert [row.client_chunk_size for row in made.results] == [1, 6]
    assert made.summary.confirm_chunk_sizes == [1, 6]
    assert made.server_config["base_url"] == good
    assert made.server_config["model"] == "fake-model"
    assert (made.hardware["backend"], made.hardware["memory"]["peak_host_bytes"] > 0) == ("fake", True)
    assert made.notes == []
    assert KEY not in (tmp_path / "matrix.json").read_text()
    assert (tmp_path / "matrix.md").read_text().startswith("# Score matrix: PyTorch, portable view (")


def test_the_server_is_told_first_then_progress_then_the_table(run: Run, good: str) -> None:
    ran = run()
    lines = ran.err.splitlines()
    assert lines[0] == f"server {good}: fake-model, fake, cpu, float32"
    assert lines[1:3] == ["[1/2] sweep: chunk size 1", "[2/2] sweep: chunk size 6"]
    assert lines[3] == "sweep:"
    assert lines[4].split("  ")[:3] == ["chunk size", "chunks", "runs ok"]
    assert [line.split()[:3] for line in lines[5:]] == [["1", "6", "2/2"], ["6", "1", "2/2"]]


def test_stdout_is_one_json_object(run: Run, tmp_path: Path) -> None:
    ran = run()
    assert ran.out.count("\n") == 1
    reported = last(ran)
    assert reported["output_json"] == str(tmp_path / "matrix.json")
    assert (reported["backend"], reported["rows"], reported["rows_not_ok"]) == ("jax", 2, [])
    final = result(tmp_path).summary.final_recommendation.selected
    assert final is not None
    assert reported["final_recommendation"] == final.model_dump(exclude={"success_rate"})


def test_the_bounds_and_the_price_are_the_callers(run: Run, tmp_path: Path) -> None:
    ran = run(
        *(
            "--guardrail-ratio",
            "3",
            "--correctness-threshold-max-abs",
            "0.5",
            "--correctness-threshold-mean-abs",
            "0.25",
        ),
        *("--cost-per-hour", "36", "--delimiter-token-id", "7"),
    )
    assert ran.status == 0, ran.err
    made = result(tmp_path)
    summary = made.summary
    assert summary.correctness_thresholds.model_dump() == {"max_abs_diff": 0.5, "mean_abs_diff": 0.25}
    assert summary.guardrail_ratio == summary.sweep_recommendation.guardrail_ratio == 3.0
    best = min(row.p95_total_e2e_ms or 0.0 for row in made.results)
    assert summary.sweep_recommendation.guardrail_p95_ms == pytest.approx(3 * best)
    (row, *_) = made.results
    assert row.mean_total_e2e_ms is not None
    assert row.usd_per_run == pytest.approx(row.mean_total_e2e_ms / 100_000)  # 36 USD an hour: a cent a second
    assert made.server_config["multi_item_scoring_delimiter"] == 7
    assert "the server's delimiter is declared as 7, and the workload was made for 1" in made.notes


def test_a_guardrail_below_1_is_a_usage_error(run: Run) -> None:
    ran = run("--guardrail-ratio", "0.9")
    assert ran.status == 2
    assert "--guardrail-ratio" in ran.err


def test_the_runbooks_options_are_taken(run: Run, tmp_path: Path) -> None:
    ran = run(
        *("--evaluation-view", "best_native", "--timeout-sec", "180", "--request-id", "canonical_score_request_000"),
        *("--server-config-note", "first", "--server-config-note", "second"),
        *("--jax-server-chunk-size", "500", "--jax-mask-impl", "auto", "--jax-segment-fallback-threshold", "32768"),
        *("--hardware", "v6e", "--usd-per-hour", "2.7"),
    )
    assert ran.status == 0
    made = result(tmp_path)
    assert made.evaluation_view == "best_native"
    assert made.notes == ["first", "second"]
    declared = {
        "multi_item_scoring_chunk_size": 500,
        "multi_item_mask_impl": "auto",
        "multi_item_segment_fallback_threshold": 32768,
    }
    assert made.server_config["declared"] == declared
    assert made.server_config.items() >= declared.items()
    assert (made.hardware["name"], made.hardware["usd_per_hour"]) == ("v6e", 2.7)
    row = made.results[0]
    assert row.mean_total_e2e_ms is not None
    assert row.usd_per_run == pytest.approx(row.mean_total_e2e_ms / 3_600_000 * 2.7)


def test_a_failing_size_is_recorded_and_the_status_is_good(run: Run, tmp_path: Path, good: str) -> None:
    with wrong_server(good, "oom", only_items=6) as url:
        ran = run(url=url)
    assert (ran.status, last(ran)["rows_not_ok"]) == (0, [6])
    assert [row.status for row in result(tmp_path).results] == ["ok", "failed"]
    assert "warning: chunk size 6: 2 x oom; chunk 1 of 1: HTTP 500: " in ran.err


def test_where_nothing_works_the_status_is_1_and_the_rows_are_there(run: Run, tmp_path: Path, good: str) -> None:
    with wrong_server(good, "short") as url:
        ran = run(url=url)
    assert (ran.status, last(ran)["final_recommendation"]) == (1, None)
    assert [row.failure_reason_counts for row in result(tmp_path).results] == [{"bad_response": 2}] * 2


def test_the_wrong_key_is_what_the_rows_say(run: Run, tmp_path: Path) -> None:
    ran = run("--api-key", "other")
    assert ran.status == 1
    assert "HTTP 401" in (result(tmp_path).results[0].run_records[0].failure_detail or "")


@pytest.mark.parametrize(
    ("args", "phrase"),
    [
        (("--client-chunk-sizes", "1,0"), "error: --client-chunk-sizes must be 1 or more, got 0"),
        (("--client-chunk-sizes", "one"), "error: --client-chunk-sizes must be integers like 1,2,4, got 'one'"),
        (
            ("--backend-name", "pytorch", "--jax-mask-impl", "auto"),
            "error: --jax-mask-impl is for --backend-name jax, got pytorch",
        ),
        (("--timed-runs", "0"), "error: Invalid value for '--timed-runs'"),
        (("--backend-name", "tpu"), "error: Invalid value for '--backend-name'"),
        (("--timeout-sec", "inf"), "error: expected a time limit above 0 and up to 1,000,000 seconds, got inf"),
        (("--timeout-sec", "nan"), "error: Invalid value for '--timeout-sec'"),
        (
            ("--usd-per-hour", "inf"),
            "error: Invalid value for '--usd-per-hour' / '--cost-per-hour': expected a finite number, got inf",
        ),
        (("--url", "http://127.0.0.1:notaport"), "error: expected an address like http://127.0.0.1:30000"),
        (("--url", "127.0.0.1:31910"), "error: expected an address like http://127.0.0.1:30000"),
        (("--api-key", "\u00e9"), "error: expected an API key of printable ASCII characters"),
        (("--resume", "--overwrite"), "error: --resume and --overwrite do not go together"),
    ],
)
def test_a_wrong_command_line_has_status_2_and_writes_nothing(
    run: Run, tmp_path: Path, args: tuple[str, ...], phrase: str
) -> None:
    ran = run(*args)
    assert (ran.status, ran.out) == (2, "")
    assert phrase in ran.err
    assert not (tmp_path / "matrix.json").exists()


def test_sizes_that_are_given_twice_are_measured_once_in_the_order_given(run: Run, tmp_path: Path) -> None:
    run(sizes="6,1,6")
    assert [row.client_chunk_size for row in result(tmp_path).results] == [6, 1]


def test_a_workload_that_is_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "workload.json").write_text("{}")
    ran = run()
    assert ran.status == 1
    assert ran.err.startswith(f"error: {tmp_path / 'workload.json'} is no Workload: schema_version: Field required")


def test_an_output_that_cannot_be_written_is_known_before_anything_is_measured(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run("--output-json", str(tmp_path / "file" / "matrix.json"))
    assert ran.status == 1
    assert "cannot be written" in ran.err
    assert "sweep:" not in ran.err


class TestResume:
    def test_ctrl_c_leaves_the_finished_rows_and_resume_goes_on(self, run: Run, tmp_path: Path, good: str) -> None:
        with wrong_server(good, "late", only_items=2, seconds=60) as url:
            args = quick_args(url, tmp_path / "workload.json", tmp_path / "matrix.json", "1,2,6")
            process = subprocess.Popen(
                [*REAL_PROGRAM, *args], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            )
            assert process.stderr is not None
            with process.stderr as lines:
                next(line for line in lines if line.startswith("[2/3] sweep: chunk size 2"))
                process.send_signal(signal.SIGINT)
                rest = lines.read()
            assert process.wait(30) == 130
        assert "Traceback" not in rest
        stopped = result(tmp_path)
        assert ([row.client_chunk_size for row in stopped.results], stopped.complete) == ([1], False)

        ran = run("--resume", sizes="1,2,6")
        assert ran.status == 0
        assert "[1/2] sweep: chunk size 2" in ran.err
        resumed = result(tmp_path)
        assert ([row.client_chunk_size for row in resumed.results], resumed.complete) == ([1, 2, 6], True)
        assert resumed.results[0] == stopped.results[0]

    def test_other_arguments_are_refused_and_the_file_stays(self, run: Run, tmp_path: Path) -> None:
        run()
        before = (tmp_path / "matrix.json").read_bytes()
        ran = run("--resume", "--timed-runs", "3")
        assert ran.status == 1
        assert "cannot be resumed: argument timed_runs was 2 and is 3" in ran.err
        assert (tmp_path / "matrix.json").read_bytes() == before

    def test_a_finished_one_is_not_measured_again(self, run: Run, tmp_path: Path) -> None:
        run()
        before = result(tmp_path).results
        ran = run("--resume")
        assert (ran.status, result(tmp_path).results) == (0, before)
        assert "sweep: chunk size" not in ran.err

    def test_what_failed_is_measured_again_and_nothing_else(self, run: Run, tmp_path: Path, good: str) -> None:
        with wrong_server(good, "error", only_items=2) as url:
            ran = run(url=url, sizes="1,2,6")
        assert (ran.status, last(ran)["rows_not_ok"]) == (0, [2])
        assert "hint: the same command with --resume measures the rows that failed again" in ran.err
        before = result(tmp_path)
        assert before.complete

        ran = run("--resume", sizes="1,2,6")
        assert (ran.status, last(ran)["rows_not_ok"]) == (0, [])
        assert "measured again, as runs of it failed: chunk size 2" in ran.err.splitlines()
        assert [line for line in ran.err.splitlines() if line.startswith("[")] == ["[1/1] sweep: chunk size 2"]
        after = result(tmp_path)
        assert [(row.client_chunk_size, row.status) for row in after.results] == [(1, "ok"), (2, "ok"), (6, "ok")]
        assert (after.results[0], after.results[2]) == (before.results[0], before.results[2])

    def test_a_file_with_rows_is_refused_without_it(self, run: Run, tmp_path: Path) -> None:
        run()
        before = (tmp_path / "matrix.json").read_bytes()
        ran = run()
        assert (ran.status, ran.out) == (2, "")
        error, hint = ran.err.splitlines()
        assert error.startswith(f"error: {tmp_path / 'matrix.json'} is there already and holds 2 rows of jax, measured")
        assert hint == "hint: --resume goes on with it, --overwrite begins anew"
        assert (tmp_path / "matrix.json").read_bytes() == before

    def test_a_file_of_another_kind_is_refused(self, run: Run, tmp_path: Path) -> None:
        ran = run("--output-json", str(tmp_path / "workload.json"))
        assert ran.status == 2
        assert "workload.json is there already and holds something that is no score matrix" in ran.err

    def test_with_overwrite_all_is_measured_again(self, run: Run, tmp_path: Path) -> None:
        run()
        before = result(tmp_path).results
        assert run("--overwrite").status == 0
        assert result(tmp_path).results != before

    @pytest.mark.parametrize("option", ["--resume", "--overwrite"])
    def test_where_nobody_is_there_the_file_stays(self, run: Run, tmp_path: Path, option: str) -> None:
        run()
        before = (tmp_path / "matrix.json").read_bytes()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))  # and does not listen
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
            ran = run(option, url=url)
        assert (ran.status, ran.out) == (1, "")
        assert ran.err.startswith(f"error: cannot reach {url}: ")
        assert ran.err.count("\n") == 1
        assert (tmp_path / "matrix.json").read_bytes() == before
