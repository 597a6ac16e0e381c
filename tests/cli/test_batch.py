"""`prefixwise batch` as people call it, on the fake model."""

from __future__ import annotations

import csv
import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixwise.backends.load import FAKE_STEP_VARIABLE
from prefixwise.contract.errors import ModelLoadError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.host import install_command
from prefixwise.launch.loading import OnProgram
from prefixwise.launch.options import EngineOptions
from tests.batch.inputs import read_jsonl, rows, write_jsonl
from tests.cli.conftest import REAL_PROGRAM, RunMain, plain_environment, run_on_terminal, run_process
from tests.cli.fake_program import fake_engine

LABELS = ("--label", "y", "--label", "z")
FAKE = ("--label", " y", "--label", " n", "--backend", "fake")  # its scores are arithmetic, and all else is real
BAD = {"id": "bad", "query": 5, "items": ["a"]}


@pytest.fixture(autouse=True)
def _fake_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.cls is TestProcesses:  # whose runs in this process go on where another process has stopped
        return

    def open_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
        return fake_engine(options)

    monkeypatch.setattr("prefixwise.batch.worker.open_engine", open_engine)


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[str, ...]:
    write_jsonl(tmp_path / "in.jsonl", [*rows(10), BAD])
    return ("batch", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), *LABELS)


def test_it_scores_and_says_how_much(run_main: RunMain, arguments: tuple[str, ...], tmp_path: Path) -> None:
    ran = run_main(*arguments)
    assert (ran.status, ran.out) == (0, "")
    failed = f"1 row failed: see {tmp_path}/out.jsonl.errors.jsonl"
    assert ran.err == f"{tmp_path}/out.jsonl is written: 11 rows, 20 items scored, {failed}\n"
    assert [row["id"] for row in read_jsonl(tmp_path / "out.jsonl")] == [f"row-{number}" for number in range(10)]
    assert [row["id"] for row in read_jsonl(tmp_path / "out.jsonl.errors.jsonl")] == ["bad"]


def test_a_finished_job_is_reported_and_not_repeated(
    run_main: RunMain, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    run_main(*arguments)
    before = (tmp_path / "out.jsonl").stat().st_mtime_ns
    assert run_main(*arguments).status == 1
    ran = run_main(*arguments, "--resume")
    assert (ran.status, "out.jsonl is already finished: 11 rows" in ran.err) == (0, True)
    assert (tmp_path / "out.jsonl").stat().st_mtime_ns == before


def test_options_hold_for_rows_without_the_field(run_main: RunMain, tmp_path: Path) -> None:
    own = {**rows(1)[0], "score_mode": "logit"}
    path = write_jsonl(tmp_path / "in.jsonl", [*rows(1), own])
    run_main("batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), *LABELS, "--softmax")
    softmax, logit = (row["scores"][0] for row in read_jsonl(tmp_path / "out.jsonl"))
    assert sum(softmax) == pytest.approx(1)
    assert sum(logit) != pytest.approx(1)


def test_csv_in_and_csv_out(run_main: RunMain, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("key,query,item\n7,q,one\n8,q,two\n", encoding="utf-8")
    files = ("--input", str(tmp_path / "in.csv"), "--output", str(tmp_path / "out.csv"), "--id-field", "key")
    assert run_main("batch", *files, *LABELS).status == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(row["line"], row["id"]) for row in written] == [("2", "7"), ("3", "8")]
    assert [len(json.loads(row["scores"])[0]) for row in written] == [2, 2]


def test_rows_with_documents_are_reranked_and_warnings_told_once(run_main: RunMain, tmp_path: Path) -> None:
    bodies = [{"query": "q", "documents": ["a", "b"]}] * 3
    path = write_jsonl(tmp_path / "in.jsonl", bodies)
    ran = run_main("batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), "--top", "1")
    assert ran.status == 0
    assert ran.err.count("warning: no reranker profile is known") == 1
    assert [len(row["results"]) for row in read_jsonl(tmp_path / "out.jsonl")] == [1, 1, 1]


@pytest.mark.parametrize("rows_too", [[], [{"query": "q", "documents": ["a", "b"]}]])
def test_options_of_documents_without_documents_are_named(
    run_main: RunMain, tmp_path: Path, rows_too: list[dict[str, object]]
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [*rows(2), *rows_too])
    files = ("batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), *LABELS)
    ran = run_main(*files, "--top", "1", "--instruction", "Is it?")
    assert ran.status == 0
    assert ("warning: no row has documents: --instruction, --top had no effect\n" in ran.err) == (not rows_too)


def test_few_warnings_are_shown_of_many(run_main: RunMain, tmp_path: Path) -> None:
    bodies = [{**row, f"field_{number}": 1} for number, row in enumerate(rows(9))]
    path = write_jsonl(tmp_path / "in.jsonl", bodies)
    ran = run_main("batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), *LABELS, "--quiet")
    first, *_, last = lines = ran.err.splitlines()
    assert (len(lines), first) == (6, 'warning: the field "field_0" is unknown and was ignored')
    assert last == "warning: there are more warnings, which are not shown"


def test_parquet_in_and_parquet_out(run_main: RunMain, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows(50)), tmp_path / "in.parquet")
    write_jsonl(tmp_path / "in.jsonl", rows(50))
    for name in ("parquet", "jsonl"):
        files = ("--input", str(tmp_path / f"in.{name}"), "--output", str(tmp_path / f"out.{name}"))
        assert run_main("batch", *files, *LABELS, "--part-rows", "7").status == 0
    read = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    kept = [{name: value for name, value in row.items() if value is not None} for row in read]
    assert kept == read_jsonl(tmp_path / "out.jsonl")


def test_a_job_of_failures_alone_has_failed(run_main: RunMain, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [BAD, BAD])
    ran = run_main("batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), *LABELS)
    assert ran.status == 1
    assert f"error: none of the 2 rows could be scored: see {tmp_path}/out.jsonl.errors.jsonl" in ran.err
    files = ("batch", "--input", str(path), "--output", str(tmp_path / "stopped.jsonl"), *LABELS)
    assert "expected at most 1 row to fail (--max-failures), got 2" in run_main(*files, "--max-failures", "1").err


def test_too_many_failures_stop_the_job_which_can_be_resumed(
    run_main: RunMain, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    ran = run_main(*arguments, "--max-failures", "0")
    assert ran.status == 1
    assert "expected at most 0 rows to fail (--max-failures), got 1" in ran.err
    assert "run the same command with --resume to continue" in ran.err
    assert run_main(*arguments, "--max-failures", "0", "--resume").status == 1
    assert not (tmp_path / "out.jsonl").exists()
    assert run_main(*arguments, "--max-failures", "1", "--resume").status == 0
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 10


@pytest.mark.parametrize(
    ("extra", "status", "words"),
    [
        (("--resume", "--overwrite"), 2, "--resume and --overwrite exclude each other"),
        (("--workers", "2"), 2, "expected --cluster, too"),
        (("--softmax", "--score-mode", "logit"), 1, "hint: --softmax is short for --score-mode softmax"),
        (("--label-token-id", "3"), 1, "labels and label_token_ids exclude each other"),
        (("--cluster", "auto", "--workers", "0"), 1, "workers must be a number like 4, or a range like 1:8, got '0'"),
        (("--cluster", "auto", "--worker-resource", "TPU"), 1, "a worker's resource must be like TPU=4, got 'TPU'"),
        (("--output-format", "xml"), 2, "xml"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_done(
    run_main: RunMain, arguments: tuple[str, ...], extra: tuple[str, ...], status: int, words: str, tmp_path: Path
) -> None:
    ran = run_main(*arguments, *extra)
    assert (ran.status, words in ran.err) == (status, True), ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_without_ray_a_cluster_is_one_clear_line(
    run_main: RunMain, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = run_main(*arguments, "--cluster", "auto")
    assert ran.status == 1
    assert ran.err == f"error: ray is not installed; install it with: {install_command('cluster')}\n"
    assert run_main(*arguments).status == 0


@pytest.mark.parametrize("name", ["in.parquet", "out.parquet"])
def test_without_pyarrow_parquet_is_one_clear_line(
    run_main: RunMain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    source = tmp_path / "in.parquet" if name == "in.parquet" else write_jsonl(tmp_path / "in.jsonl", rows(1))
    target = tmp_path / ("out.parquet" if name == "out.parquet" else "out.jsonl")
    ran = run_main("batch", "--input", str(source), "--output", str(target), *LABELS)
    assert ran.status == 1
    assert f"error: pyarrow is not installed; install it with: {install_command('batch')}\n" in ran.err
    assert not list(tmp_path.glob("out*"))  # told before anything is scored


@pytest.mark.parametrize(
    ("stage", "words", "again"),
    [
        ("split_files", "stopped before this run scored a row; run the same command to start again\n", ()),
        ("merge", "run the same command with --resume to continue\n", ("--resume",)),
    ],
)
def test_an_interrupt_at_any_stage_says_how_to_resume(
    run_main: RunMain,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    words: str,
    again: tuple[str, ...],
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"prefixwise.batch.job.{stage}", interrupt)
        ran = run_main(*arguments)
    assert (ran.status, words in ran.err) == (130, True), ran.err
    assert run_main(*arguments, *again).status == 0


@pytest.mark.parametrize("how", [(), ("--overwrite",), ("--resume",)])
@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [
        (ModelLoadError("no model"), 1, "error: no model\n"),
        (KeyboardInterrupt(), 130, "stopped before a part was complete; run the same command to start again\n"),
    ],
)
def test_a_job_that_ends_before_a_part_is_complete_leaves_nothing(
    run_main: RunMain,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    how: tuple[str, ...],
    failure: BaseException,
    status: int,
    said: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("prefixwise.batch.worker.open_engine", raising(failure))
        ran = run_main(*arguments, *how)
    assert (ran.status, ran.err.startswith(said)) == (status, True), ran.err
    assert "--resume" not in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert run_main(*arguments, "--softmax", *how).status == 0


def test_a_job_of_an_earlier_run_stays(
    run_main: RunMain, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("prefixwise.batch.worker.open_engine", raising(ModelLoadError("no model")))
    with monkeypatch.context() as patch:
        patch.setattr("prefixwise.batch.job.BatchJob.discard_if_new", lambda job: False)  # as after `kill -9`
        run_main(*arguments)
    assert "with --resume to continue" in run_main(*arguments, "--resume").err
    assert (tmp_path / "out.jsonl.parts/manifest.json").exists()


def raising(failure: BaseException) -> Callable[..., ScoringEngine]:
    def open_engine(options: EngineOptions, on_program: OnProgram | None = None) -> ScoringEngine:
        raise failure

    return open_engine


def test_gzip_that_ends_too_early_is_an_error_and_no_interrupt(run_main: RunMain, tmp_path: Path) -> None:
    content = gzip.compress(write_jsonl(tmp_path / "in.jsonl", rows(500)).read_bytes())
    (tmp_path / "in.jsonl.gz").write_bytes(content[: len(content) // 2])
    files = ("--input", str(tmp_path / "in.jsonl.gz"), "--output", str(tmp_path / "out.jsonl"))
    ran = run_main("batch", *files, *LABELS)
    assert ran.status == 1
    assert ran.err.startswith(f"error: {tmp_path}/in.jsonl.gz: Compressed file ended before")


class TestProcesses:
    def test_progress_is_shown_on_a_terminal(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "in.jsonl", rows(300))
        files = ("--input", str(path), "--output", str(tmp_path / "out.jsonl"))
        ran = run_on_terminal([*REAL_PROGRAM, "batch", *files, *FAKE], **{FAKE_STEP_VARIABLE: "0.02"})
        assert ran.status == 0
        assert "items/s" in ran.err
        assert "left" in ran.err
        assert "0 failed" in ran.err

    def test_quiet_says_nothing(self, arguments: tuple[str, ...]) -> None:
        ran = run_process([*REAL_PROGRAM, *arguments[: -len(LABELS)], *FAKE, "--quiet"])
        assert (ran.status, ran.out, ran.err) == (0, "", "")

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_stops_it_and_it_can_be_resumed(
        self, run_main: RunMain, tmp_path: Path, number: signal.Signals, status: int
    ) -> None:
        """Of 80 parts, each of which takes two forwards, that is in 16 seconds."""
        path = write_jsonl(tmp_path / "in.jsonl", rows(160))
        files = ("--input", str(path), "--output", str(tmp_path / "out.jsonl"), "--part-rows", "2")
        process = start_slow("batch", *files, *FAKE)
        wait_for_parts(tmp_path / "out.jsonl.parts", 2)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == status
        assert b"run the same command with --resume to continue" in said
        num_kept = len(list((tmp_path / "out.jsonl.parts").glob("part-*.jsonl")))
        assert 2 <= num_kept < 80
        ran = run_main("batch", *files, *FAKE, "--resume")
        assert f"resuming: {2 * num_kept} of 160 rows are done" in ran.err
        whole = tmp_path / "whole.jsonl"
        assert run_main("batch", "--input", str(path), "--output", str(whole), *FAKE).status == 0
        assert (tmp_path / "out.jsonl").read_bytes() == whole.read_bytes()


def start_slow(*arguments: str) -> subprocess.Popen[bytes]:
    environment = plain_environment(**{FAKE_STEP_VARIABLE: "0.1"})
    return subprocess.Popen(
        [*REAL_PROGRAM, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )


def wait_for_parts(folder: Path, count: int) -> None:
    """Until so many are complete. There is no event to wait for between processes but the files themselves."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("part-*.jsonl"))) < count:
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)
