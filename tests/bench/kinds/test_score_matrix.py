"""The report of a score matrix, as `bench matrix` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.score_matrix import (
    MatrixSummary,
    ScoreMatrix,
    make_row,
    matrix_report,
    num_chunks,
    quoted,
    rows_table,
    summarise,
)
from prefixwise.bench.render.markdown import report_markdown
from prefixwise.bench.render.terminal import terminal_lines
from prefixwise.bench.rules import Bounds
from prefixwise.bench.run.matrix import SweepOptions
from tests.bench.matrix_samples import NUM_ITEMS, SCORES, bad_row, bad_run, good_row, good_run, write_matrix

OPTIONS = SweepOptions("jax", "portable", (1, 2, 6))


def sample(folder: Path) -> ScoreMatrix:
    rows = [good_row(1, 600.0), bad_row(2), good_row(6, 100.0)]
    path = write_matrix(
        folder / "m.json", OPTIONS, rows, [good_row(1, 600.0), good_row(6, 120.0)], hardware={"device": "cpu"}
    )
    return read_artifact(path, ScoreMatrix)


def test_rows_recommendation_and_failures(tmp_path: Path) -> None:
    matrix = sample(tmp_path)
    matrix.notes.append("JAX portable run")
    text = report_markdown(matrix_report(matrix))
    lines = text.splitlines()
    assert lines[0].startswith("# Score matrix: JAX, portable view (")
    assert "Chunks of 6 are recommended: 50.0 items/s, p95 120.0 ms." in text
    assert "| 1 | 6 | 2/2 | 10.0 | 600.0 | 600.0 | 600.0 | 1.00x | - |" in lines
    assert "| 2 | 3 | 0/2 | - | - | - | - | - | **2 x timeout** |" in lines
    assert "| 6 | 1 | 2/2 | 60.0 | 100.0 | 100.0 | 100.0 | 1.00x | - |" in lines
    assert "- chunk size 2: 2 x timeout; chunk 1 of 3: too late" in lines
    assert "| device | `cpu` |" in lines
    assert "- JAX portable run" in lines
    assert "not finished" not in text


def test_an_unfinished_one_without_any_good_row_says_so(tmp_path: Path) -> None:
    matrix = read_artifact(write_matrix(tmp_path / "m.json", OPTIONS, [bad_row(1)]), ScoreMatrix)
    text = report_markdown(matrix_report(matrix.model_copy(update={"complete": False})))
    assert "The sweep is not finished." in text
    assert "No chunk size can be recommended: none worked in every run." in text
    assert "## Confirmed" not in text


def test_costs_and_failures_are_columns_only_where_there_are_some() -> None:
    plain, costly = good_row(6, 100.0), good_row(6, 100.0).model_copy(update={"items_per_usd": 5000.0})
    _, header, _ = terminal_lines(rows_table("sweep", [plain]))
    assert header.endswith("first run")
    _, header, row, failed = terminal_lines(rows_table("sweep", [costly, bad_row(2)]))
    assert header.endswith("first run  items/USD     failures")
    assert row.endswith("1.00x      5,000            -")
    assert failed.endswith("-          -  2 x timeout")
    assert rows_table("sweep", []) == ()


def test_a_confirm_phase_that_failed_is_why_nothing_is_recommended(tmp_path: Path) -> None:
    path = write_matrix(tmp_path / "m.json", OPTIONS, [good_row(6, 100.0)], [bad_row(6)])
    text = report_markdown(matrix_report(read_artifact(path, ScoreMatrix)))
    assert "No chunk size can be recommended: of those measured again none worked in every run." in text


@pytest.mark.parametrize(("items", "size", "chunks"), [(6, 1, 6), (6, 2, 3), (6, 4, 2), (6, 6, 1), (6, 500, 1)])
def test_the_last_chunk_may_be_smaller_and_one_may_hold_all(items: int, size: int, chunks: int) -> None:
    assert num_chunks(items, size) == chunks


class TestGoodRow:
    row = make_row(
        2,
        6,
        [good_run(0, 300.0, [90, 100, 110]), good_run(1, 100.0, [30, 30, 40]), good_run(2, 200.0, [60, 60, 80])],
        SCORES,
        usd_per_hour=3.6,
    )

    def test_all_runs_succeeded(self) -> None:
        row = self.row
        assert (row.status, row.timed_runs, row.successful_runs, row.success_rate) == ("ok", 3, 3, 1.0)
        assert (row.num_chunks, row.failure_reason_counts, row.reference_scores) == (3, {}, SCORES)

    def test_times_of_runs(self) -> None:
        """100, 200, 300: the 95th percentile is at place 1.9, a tenth before the last."""
        assert self.row.p50_total_e2e_ms == 200.0
        assert self.row.p95_total_e2e_ms == pytest.approx(290.0)
        assert self.row.mean_total_e2e_ms == 200.0

    def test_times_of_calls(self) -> None:
        """30 30 40 60 60 80 90 100 110: their sum is 600, and place 7.6 is 0.6 of the way from 100 to 110."""
        assert self.row.mean_chunk_call_ms == pytest.approx(600 / 9)
        assert self.row.p95_chunk_call_ms == pytest.approx(106.0)

    def test_throughput_is_items_by_the_mean_time(self) -> None:
        assert self.row.throughput_items_sec == pytest.approx(30.0)

    def test_the_first_run_against_the_others(self) -> None:
        assert self.row.first_run_penalty_ratio == pytest.approx(2.0)

    def test_money(self) -> None:
        """3.60 dollars an hour are 0.001 a second; a run takes 0.2 of them."""
        assert self.row.usd_per_run == pytest.approx(0.0002)
        assert self.row.items_per_usd == pytest.approx(30_000)

    def test_without_a_price_there_is_no_money(self) -> None:
        row = good_row(2, 100.0)
        assert (row.usd_per_run, row.items_per_usd) == (None, None)

    def test_what_costs_nothing_gives_no_items_per_dollar(self) -> None:
        row = make_row(2, 6, [good_run(0, 100.0)], SCORES, usd_per_hour=0.0)
        assert (row.usd_per_run, row.items_per_usd) == (0.0, None)


class TestFailingRow:
    def test_figures_are_of_the_runs_that_succeeded(self) -> None:
        runs = [good_run(0, 100.0), bad_run(1, "oom"), good_run(2, 300.0), bad_run(3, "timeout"), bad_run(4, "oom")]
        row = make_row(2, 6, runs, SCORES)
        assert (row.status, row.successful_runs, row.success_rate) == ("partial_failure", 2, 0.4)
        assert row.mean_total_e2e_ms == 200.0
        assert row.throughput_items_sec == pytest.approx(30.0)
        assert row.first_run_penalty_ratio == pytest.approx(1 / 3)
        assert row.failure_reason_counts == {"oom": 2, "timeout": 1}

    def test_a_first_run_that_failed_has_no_penalty(self) -> None:
        row = make_row(2, 6, [bad_run(0), good_run(1, 100.0), good_run(2, 50.0)], SCORES)
        assert row.first_run_penalty_ratio is None

    def test_where_no_run_succeeded_there_are_no_figures(self) -> None:
        row = bad_row(2)
        assert (row.status, row.success_rate, row.failure_reason_counts) == ("failed", 0.0, {"timeout": 2})
        metrics = (row.p50_total_e2e_ms, row.p95_total_e2e_ms, row.mean_total_e2e_ms, row.throughput_items_sec)
        assert metrics == (None, None, None, None)
        assert (row.mean_chunk_call_ms, row.p95_chunk_call_ms, row.first_run_penalty_ratio) == (None, None, None)


def chosen(summary: MatrixSummary) -> tuple[int | None, ...]:
    """The chunk sizes that the sweep, the confirm phase and both recommend."""
    found = (summary.sweep_recommendation, summary.confirm_recommendation, summary.final_recommendation)
    return tuple(None if each.selected is None else each.selected.client_chunk_size for each in found)


class TestSummary:
    # 6 items: in 100 ms they are 60 a second
    swept = (good_row(1, 600.0), good_row(2, 200.0), good_row(4, 100.0), bad_row(5), good_row(6, 120.0))

    def test_the_fastest_is_recommended_and_its_neighbours_are_confirmed(self) -> None:
        """The one that failed is nobody's neighbour."""
        summary = summarise(self.swept, [], confirms=True)
        metrics = {"throughput_items_sec": pytest.approx(60.0), "p95_total_e2e_ms": 100.0, "success_rate": 1.0}
        assert summary.sweep_recommendation.model_dump() == {
            "eligible_count": 4,
            "guardrail_ratio": 1.25,
            "guardrail_p95_ms": 125.0,
            "selected": {"client_chunk_size": 4, **metrics},
            "notes": [],
        }
        assert summary.confirm_chunk_sizes == [1, 2, 4, 6]
        assert chosen(summary) == (4, None, 4)
        assert (summary.guardrail_ratio, summary.correctness_thresholds.max_abs_diff) == (1.25, 0.02)
        assert summary.correctness_thresholds.mean_abs_diff == 0.01

    def test_what_was_confirmed_counts_for_more(self) -> None:
        again = [good_row(1, 600.0), good_row(2, 200.0), good_row(4, 130.0), good_row(6, 110.0)]
        summary = summarise(self.swept, again, confirms=True)
        assert chosen(summary) == (4, 6, 6)

    def test_while_rows_of_the_confirm_phase_are_missing_the_sweeps_stays(self) -> None:
        for some in ([bad_row(1), bad_row(4)], [good_row(1, 600.0), good_row(2, 200.0)]):
            assert chosen(summarise(self.swept, some, confirms=True))[2] == 4

    def test_a_confirm_phase_that_failed_leaves_nothing_to_recommend(self) -> None:
        summary = summarise(self.swept, [bad_row(1), bad_row(2), bad_row(4), bad_row(6)], confirms=True)
        assert chosen(summary) == (4, None, None)
        assert summary.final_recommendation.notes == ["no chunk size worked in every run"]

    def test_one_row_of_the_confirm_phase_that_failed_cannot_be_recommended(self) -> None:
        again = [good_row(1, 600.0), good_row(2, 200.0), bad_row(4), good_row(6, 110.0)]
        assert chosen(summarise(self.swept, again, confirms=True)) == (4, 6, 6)

    def test_without_a_confirm_phase_nothing_is_confirmed(self) -> None:
        assert summarise(self.swept, [], confirms=False).confirm_chunk_sizes == []

    def test_where_nothing_worked_nothing_is_recommended(self) -> None:
        summary = summarise([bad_row(1), bad_row(2)], [], confirms=True)
        assert (chosen(summary), summary.confirm_chunk_sizes) == ((None, None, None), [])

    def test_the_bounds_are_the_callers(self) -> None:
        """Chunks of 6 have the best p95, and are the slower ones: a guardrail of 1 leaves nothing else."""
        steady = make_row(6, NUM_ITEMS, [good_run(0, 120.0), good_run(1, 120.0)], None)
        jumpy = make_row(4, NUM_ITEMS, [good_run(0, 60.0), good_run(1, 130.0)], None)
        bounds = Bounds(max_abs_diff=0.5, mean_abs_diff=0.25, guardrail_ratio=1.0)
        assert chosen(summarise([steady, jumpy], [], confirms=False))[0] == 4
        summary = summarise([steady, jumpy], [], confirms=True, bounds=bounds)
        assert (chosen(summary)[0], summary.guardrail_ratio) == (6, 1.0)
        assert summary.correctness_thresholds.model_dump() == {"max_abs_diff": 0.5, "mean_abs_diff": 0.25}


def test_a_quoted_row_has_its_figures_without_records_and_scores() -> None:
    row = quoted(good_row(2, 100.0))
    assert row is not None
    assert (row["client_chunk_size"], row["throughput_items_sec"]) == (2, pytest.approx(60.0))
    assert not {"run_records", "reference_scores"} & set(row)
    assert quoted(None) is None
