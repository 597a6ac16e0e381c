"""A sweep against real servers on a formula: right ones, and ones that are wrong in one way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.client import ScoreClient
from prefixwise.bench.files import sha256_of, write_artifact
from prefixwise.bench.kinds.score_matrix import MatrixRow, ScoreMatrix
from prefixwise.bench.kinds.workload import request_checksum
from prefixwise.bench.run.matrix import MatrixSweep, SweepOptions, choose_request, resume_matrix, rows_in
from prefixwise.contract.errors import ArtifactError
from tests.bench.matrix_samples import NUM_ITEMS, bad_row, begun_matrix, good_row, small_workload, write_workload
from tests.bench.wrong_server import Fault, wrong_server
from tests.server.server_process import server_process

SIZES = (1, 2, 4, 10)


@pytest.fixture(scope="module")
def good() -> Iterator[str]:
    with server_process() as running:
        yield running.url


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return write_workload(tmp_path / "workload.json")


def options(sizes: tuple[int, ...] = SIZES, **more: Any) -> SweepOptions:
    return SweepOptions("pytorch", "portable", sizes, **{"timed_runs": 2, "timed_runs_confirm": 3, **more})


def run(url: str, workload: Path, how: SweepOptions) -> tuple[ScoreMatrix, list[int]]:
    """The matrix, and how many rows it had each time it was saved."""
    saved: list[int] = []
    matrix = begun_matrix(workload, how)
    with ScoreClient(url, timeout_sec=how.timeout_sec) as client:
        sweep = MatrixSweep(
            client,
            small_workload().requests[0],
            matrix,
            how,
            lambda now: saved.append(len(now.results) + len(now.confirm_results)),
        )
        sweep.sweep(lambda title: None)
        sweep.confirm(lambda title: None)
    return matrix, saved


def all_scores(url: str) -> list[list[float]]:
    request = small_workload().requests[0]
    body = {"query": request.query_token_ids, "items": request.items_token_ids, "apply_softmax": True}
    with ScoreClient(url) as client:
        return client.score({**body, "label_token_ids": request.label_token_ids}).scores


@pytest.fixture(scope="module")
def swept(good: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[ScoreMatrix, list[int]]:
    return run(good, write_workload(tmp_path_factory.mktemp("good") / "workload.json"), options())


class TestGoodServer:
    def test_every_size_has_a_row_and_the_file_is_saved_after_each(self, swept: tuple[ScoreMatrix, list[int]]) -> None:
        matrix, saved = swept
        assert [row.client_chunk_size for row in matrix.results] == [1, 2, 4, 10]
        assert [row.num_chunks for row in matrix.results] == [6, 3, 2, 1]
        assert saved == list(range(1, 5 + len(matrix.confirm_results)))
        assert matrix.complete

    def test_runs_and_calls_are_recorded(self, swept: tuple[ScoreMatrix, list[int]]) -> None:
        for row in swept[0].results:
            assert (row.status, row.timed_runs) == ("ok", 2)
            assert [record.run_index for record in row.run_records] == [0, 1]
            for record in row.run_records:
                assert len(record.call_latencies_ms) == row.num_chunks
                assert record.total_e2e_ms is not None
                assert record.total_e2e_ms >= sum(record.call_latencies_ms)

    def test_the_scores_are_the_same_however_it_is_cut(self, swept: tuple[ScoreMatrix, list[int]], good: str) -> None:
        expected = all_scores(good)
        assert len(expected) == NUM_ITEMS
        assert [row.reference_scores for row in swept[0].results] == [expected] * 4

    def test_the_best_sizes_are_measured_again_and_more_often(self, swept: tuple[ScoreMatrix, list[int]]) -> None:
        matrix = swept[0]
        sizes = [row.client_chunk_size for row in matrix.confirm_results]
        assert sizes == matrix.summary.confirm_chunk_sizes
        assert 1 in sizes
        assert {row.timed_runs for row in matrix.confirm_results} == {3}
        assert matrix.summary.final_recommendation == matrix.summary.confirm_recommendation

    def test_that_one_chunk_holds_all_is_noted(self, swept: tuple[ScoreMatrix, list[int]]) -> None:
        assert swept[0].notes == ["chunk sizes 10 are more than the 6 items: one chunk holds them all"]


class TestWrongServer:
    def test_a_size_that_fails_is_recorded_and_the_sweep_goes_on(self, good: str, workload: Path) -> None:
        with wrong_server(good, "error", only_items=4) as url:
            matrix, _ = run(url, workload, options(warmup_runs=0))
        assert [row.status for row in matrix.results] == ["ok", "ok", "failed", "ok"]
        failed = matrix.results[2]
        assert failed.failure_reason_counts == {"http_error": 2}
        assert (failed.run_records[0].failure_detail or "").startswith("chunk 1 of 2: HTTP 500: ")
        assert failed.reference_scores is None
        assert 4 not in matrix.summary.confirm_chunk_sizes
        assert matrix.complete

    def test_the_chunks_before_the_failing_one_are_recorded(self, good: str, workload: Path) -> None:
        """Of 6 items in fours the second chunk has 2."""
        with wrong_server(good, "short", only_items=2) as url:
            matrix, _ = run(url, workload, options((4,), warmup_runs=0, timed_runs=1))
        (record,) = matrix.results[0].run_records
        assert (record.ok, record.total_e2e_ms, len(record.call_latencies_ms)) == (False, None, 1)
        assert (record.failure_reason, record.failure_detail) == (
            "bad_response",
            "chunk 2 of 2: expected 2 rows of scores, got 1 rows",
        )

    def test_a_server_that_answers_late_is_left_behind(self, good: str, workload: Path) -> None:
        with wrong_server(good, "late", only_items=6, seconds=60.0) as url:
            matrix, _ = run(url, workload, options((6, 2), warmup_runs=0, timed_runs=1, timeout_sec=3.0))
        assert [row.failure_reason_counts for row in matrix.results] == [{"timeout": 1}, {}]

    def test_a_run_that_fails_now_and_then_is_a_partial_failure(self, good: str, workload: Path) -> None:
        with wrong_server(good, "oom", times=1) as url:
            matrix, _ = run(url, workload, options((6,), warmup_runs=0, timed_runs=3, timed_runs_confirm=0))
        (row,) = matrix.results
        assert (row.status, row.successful_runs, row.failure_reason_counts) == ("partial_failure", 2, {"oom": 1})
        assert row.reference_scores == all_scores(good)
        assert row.first_run_penalty_ratio is None
        assert matrix.summary.final_recommendation.selected is None

    def test_a_warm_up_run_that_fails_is_noted_and_not_counted(self, good: str, workload: Path) -> None:
        with wrong_server(good, "error", times=1) as url:
            matrix, _ = run(url, workload, options((6,), warmup_runs=2, timed_runs=1, timed_runs_confirm=0))
        assert (matrix.results[0].status, matrix.results[0].timed_runs) == ("ok", 1)
        (note,) = matrix.notes
        assert note.startswith("warm-up run 0 of chunk size 6 failed: http_error, chunk 1 of 1: HTTP 500")

    @pytest.mark.parametrize(("fault", "reason"), [("huge", "bad_response"), ("deep", "bad_json")])
    def test_an_answer_that_python_cannot_hold_is_recorded(
        self, good: str, workload: Path, fault: Fault, reason: str
    ) -> None:
        with wrong_server(good, fault, only_items=2) as url:
            matrix, _ = run(url, workload, options((2, 6), warmup_runs=0, timed_runs=1))
        assert [row.failure_reason_counts for row in matrix.results] == [{reason: 1}, {}]

    def test_an_answer_that_trickles_is_left_behind(self, good: str, workload: Path) -> None:
        """Ten pieces 0.4 s apart: each is in time, the answer would take 3.6 s."""
        with wrong_server(good, "trickle", only_items=2, seconds=0.4) as url:
            matrix, _ = run(url, workload, options((2, 6), warmup_runs=0, timed_runs=1, timeout_sec=1.0))
        assert [row.failure_reason_counts for row in matrix.results] == [{"timeout": 1}, {}]

    def test_scores_that_differ_from_run_to_run_are_noted(self, good: str, workload: Path) -> None:
        with wrong_server(good, "drift", times=1) as url:
            matrix, _ = run(url, workload, options((6,), warmup_runs=0, timed_runs=3, timed_runs_confirm=0))
        assert matrix.notes == [
            "the scores of chunk size 6 differ from run to run: max abs diff 0.03 and mean 0.03 from those of the first"
        ]
        assert matrix.results[0].model_dump()["max_abs_diff_between_runs"] == pytest.approx(0.03)

    def test_where_nothing_works_there_is_nothing_to_confirm(self, good: str, workload: Path) -> None:
        with wrong_server(good, "nan") as url:
            matrix, _ = run(url, workload, options((1, 6), warmup_runs=0, timed_runs=1))
        assert [row.status for row in matrix.results] == ["failed", "failed"]
        assert (matrix.confirm_results, matrix.summary.final_recommendation.selected) == ([], None)
        assert matrix.complete


def test_rows_that_are_there_are_not_measured_again(good: str, workload: Path) -> None:
    how = options((1, 6), timed_runs=1, timed_runs_confirm=0)
    matrix, _ = run(good, workload, how)
    first = matrix.results[0]
    del matrix.results[1]
    reported: list[str] = []
    with ScoreClient(good) as client:
        MatrixSweep(client, small_workload().requests[0], matrix, how, lambda now: None).sweep(reported.append)
    assert reported == ["chunk size 6"]
    assert [row.client_chunk_size for row in matrix.results] == [1, 6]
    assert matrix.results[0] is first


class TestFailedRows:
    how = options((1, 2, 4, 6), timed_runs=1, timed_runs_confirm=1, warmup_runs=0)

    def begun(self, workload: Path, rows: list[MatrixRow], confirmed: list[MatrixRow]) -> ScoreMatrix:
        begun = begun_matrix(workload, self.how)
        begun.results, begun.confirm_results = rows, confirmed
        return begun

    def go_on(self, url: str, matrix: ScoreMatrix) -> tuple[list[str], list[str]]:
        """What is said to be measured again, and what is measured."""
        reported: list[str] = []
        with ScoreClient(url) as client:
            sweep = MatrixSweep(client, small_workload().requests[0], matrix, self.how, lambda now: None)
            forgotten = sweep.forget_failed()
            sweep.update()
            sweep.sweep(reported.append)
            sweep.confirm(reported.append)
        return forgotten, reported

    def test_a_row_of_the_sweep_is_measured_again_at_its_place(self, good: str, workload: Path) -> None:
        """The fastest is 6, faster than any server, so its neighbour is 4."""
        rows = [good_row(1, 600.0), good_row(2, 300.0), bad_row(4), good_row(6, 0.001)]
        matrix = self.begun(workload, list(rows), [rows[0], rows[3]])
        again = (["chunk size 4"], ["chunk size 4", "chunk size 4 again"])
        assert self.go_on(good, matrix) == again
        assert [(row.client_chunk_size, row.status) for row in matrix.results] == [(n, "ok") for n in (1, 2, 4, 6)]
        assert matrix.results[0] is rows[0]
        assert [row.client_chunk_size for row in matrix.confirm_results] == [1, 4, 6]
        assert (matrix.confirm_results[0] is rows[0], matrix.complete) == (True, True)

    def test_a_row_of_the_confirm_phase_is_measured_again(self, good: str, workload: Path) -> None:
        rows = [good_row(1, 600.0), good_row(2, 300.0), good_row(4, 150.0), good_row(6, 100.0)]
        matrix = self.begun(workload, rows, [rows[0], bad_row(4), rows[3]])
        assert self.go_on(good, matrix) == (["chunk size 4 again"], ["chunk size 4 again"])
        assert {row.status for row in matrix.confirm_results} == {"ok"}
        assert matrix.summary.final_recommendation == matrix.summary.confirm_recommendation

    def test_what_another_winner_has_no_use_for_is_not_kept(self, good: str, workload: Path) -> None:
        """While 4 failed 2 was the winner's neighbour."""
        rows = [good_row(1, 600.0), good_row(2, 300.0), bad_row(4), good_row(6, 0.001)]
        matrix = self.begun(workload, list(rows), [rows[0], rows[1], rows[3]])
        self.go_on(good, matrix)
        assert [row.client_chunk_size for row in matrix.confirm_results] == [1, 4, 6]
        assert matrix.summary.confirm_chunk_sizes == [1, 4, 6]

    def test_until_the_sweep_is_done_what_was_confirmed_stays(self, good: str, workload: Path) -> None:
        rows = [good_row(1, 600.0), good_row(2, 300.0), bad_row(4), good_row(6, 0.001)]
        matrix = self.begun(workload, list(rows), [rows[0], rows[1], rows[3]])
        with ScoreClient(good) as client:
            sweep = MatrixSweep(client, small_workload().requests[0], matrix, self.how, lambda now: None)
            sweep.forget_failed()
            sweep.update()
        assert (matrix.summary.confirm_chunk_sizes, matrix.complete) == ([1, 2, 6], False)


def test_an_interrupted_sweep_has_saved_what_was_finished(good: str, workload: Path) -> None:
    how = options((1, 2, 6), timed_runs=1)
    saved: list[tuple[list[int], bool]] = []
    matrix = begun_matrix(workload, how)

    def interrupt(title: str) -> None:
        if title == "chunk size 6":
            raise KeyboardInterrupt

    def save(now: ScoreMatrix) -> None:
        saved.append(([row.client_chunk_size for row in now.results], now.complete))

    with ScoreClient(good) as client, pytest.raises(KeyboardInterrupt):
        MatrixSweep(client, small_workload().requests[0], matrix, how, save).sweep(interrupt)
    assert saved == [([1], False), ([1, 2], False)]
    assert matrix.summary.confirm_chunk_sizes == []  # not before the sweep is done


OPTIONS = SweepOptions("jax", "portable", (1, 2), declared={"multi_item_mask_impl": "auto"})


CONFIG = {"dtype": "float32", "port": 1}


@pytest.fixture
def old(tmp_path: Path, workload: Path) -> Path:
    """An artifact with one row of two."""
    matrix = begun_matrix(workload, OPTIONS)
    matrix.results.append(good_row(1, 100.0))
    matrix.notes.append("a note")
    matrix.server_config = CONFIG
    write_artifact(tmp_path / "matrix.json", matrix)
    return tmp_path / "matrix.json"


class TestRequest:
    def test_the_first_or_the_one_that_is_named(self) -> None:
        workload = small_workload()
        other = workload.requests[0].model_copy(update={"request_id": "second"})
        workload.requests.append(other)
        assert choose_request(workload, None) is workload.requests[0]
        assert choose_request(workload, "second") is other

    def test_a_name_that_is_not_there(self) -> None:
        with pytest.raises(ArtifactError, match="has no request 'x', it has canonical_score_request_000"):
            choose_request(small_workload(), "x")

    def test_one_that_was_changed_does_not_fit_its_checksum(self) -> None:
        workload = small_workload()
        workload.requests[0].query_token_ids.append(1)
        with pytest.raises(ArtifactError, match=r"does not fit its checksum .*: the workload was changed"):
            choose_request(workload, None)


def test_a_new_matrix_says_what_it_is_of(workload: Path) -> None:
    matrix = begun_matrix(workload, OPTIONS)
    request = small_workload().requests[0]
    assert (matrix.backend, matrix.evaluation_view, matrix.results, matrix.complete) == ("jax", "portable", [], False)
    assert matrix.workload_ref.model_dump() == {
        "path": str(workload),
        "sha256": sha256_of(workload),
        "request_id": "canonical_score_request_000",
        "request_sha256": request_checksum(request.model_dump()),
    }
    assert matrix.workload.model_dump() == {
        "model": "fake-model",
        "query_tokens": 3,
        "num_items": 6,
        "item_tokens": 2,
        "label_token_ids": [3, 5],
    }
    assert matrix.arguments is not None
    assert matrix.arguments["client_chunk_sizes"] == [1, 2]
    assert matrix.notes == []


class TestWhatIsThere:
    def test_rows_are_counted(self, old: Path) -> None:
        assert (rows_in(old) or "").startswith("1 rows of jax, measured until 20")

    def test_nothing_would_be_lost(self, tmp_path: Path, workload: Path) -> None:
        (tmp_path / "empty.json").touch()
        write_artifact(tmp_path / "begun.json", begun_matrix(workload, OPTIONS))
        assert [rows_in(tmp_path / name) for name in ("none.json", "empty.json", "begun.json")] == [None] * 3

    def test_what_is_no_matrix_would_be(self, workload: Path) -> None:
        assert rows_in(workload) == "something that is no score matrix"


class TestResume:
    def fresh(self, workload: Path, options: SweepOptions = OPTIONS, **config: Any) -> ScoreMatrix:
        return begun_matrix(workload, options).model_copy(update={"server_config": {**CONFIG, **config}})

    def test_the_rows_and_notes_stay(self, workload: Path, old: Path) -> None:
        fresh = self.fresh(workload)
        fresh.notes.extend(["a note", "another"])
        resumed = resume_matrix(old, fresh)
        assert [row.client_chunk_size for row in resumed.results] == [1]
        assert resumed.notes == ["a note", "another"]

    def test_without_a_file_it_begins(self, tmp_path: Path, workload: Path) -> None:
        fresh = self.fresh(workload)
        assert resume_matrix(tmp_path / "none.json", fresh) is fresh

    def test_the_same_server_may_be_on_another_port(self, workload: Path, old: Path) -> None:
        assert resume_matrix(old, self.fresh(workload, port=2)).results

    def test_the_same_workload_may_have_been_made_again(self, tmp_path: Path, old: Path) -> None:
        again = small_workload().model_copy(update={"generated_at_utc": "2030-01-01T00:00:00Z"})
        write_artifact(tmp_path / "again.json", again)
        assert resume_matrix(old, self.fresh(tmp_path / "again.json")).results

    @pytest.mark.parametrize(
        ("change", "phrase"),
        [
            ({"backend": "pytorch"}, 'backend was "jax" and is "pytorch"'),
            ({"view": "best_native"}, 'evaluation view was "portable" and is "best_native"'),
            ({"client_chunk_sizes": (1, 4)}, r"client_chunk_sizes was \[1, 2\] and is \[1, 4\]"),
            ({"timed_runs": 6}, "timed_runs was 5 and is 6"),
            ({"timeout_sec": 1.0}, "timeout_sec was 180.0 and is 1.0"),
            ({"hardware": "tpu"}, 'hardware was null and is "tpu"'),
            ({"declared": {}}, r'declared was {"multi_item_mask_impl": "auto"} and is {}'),
        ],
    )
    def test_other_arguments_are_another_sweep(
        self, workload: Path, old: Path, change: dict[str, Any], phrase: str
    ) -> None:
        how = SweepOptions(**{**OPTIONS.__dict__, **change})
        with pytest.raises(ArtifactError, match=f"cannot be resumed: .*{phrase}"):
            resume_matrix(old, self.fresh(workload, how))

    def test_another_workload_is(self, tmp_path: Path, old: Path) -> None:
        other = write_workload(tmp_path / "other.json", first_token=11)
        with pytest.raises(ArtifactError, match="cannot be resumed: workload sha256 was"):
            resume_matrix(old, self.fresh(other))

    @pytest.mark.parametrize("now", [{"dtype": "bfloat16"}, {"new": True}])
    def test_a_server_of_another_kind_is(self, workload: Path, old: Path, now: dict[str, Any]) -> None:
        with pytest.raises(ArtifactError, match="cannot be resumed: server's"):
            resume_matrix(old, self.fresh(workload, **now))

    def test_a_server_that_is_not_there_is(self, workload: Path, old: Path) -> None:
        with pytest.raises(ArtifactError, match='server\'s dtype was "float32" and is null'):
            resume_matrix(old, begun_matrix(workload, OPTIONS))

    def test_a_file_that_is_no_matrix(self, workload: Path) -> None:
        with pytest.raises(ArtifactError, match="is no ScoreMatrix"):
            resume_matrix(workload, self.fresh(workload))
