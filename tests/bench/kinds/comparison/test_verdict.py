from __future__ import annotations

from pathlib import Path

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.comparison.charts import p95_chart
from prefixwise.bench.kinds.comparison.inputs import ReportPaths, read_report_inputs
from prefixwise.bench.kinds.comparison.model import Comparison
from prefixwise.bench.kinds.comparison.report import make_report
from prefixwise.bench.kinds.comparison.verdict import agreement, thresholds
from prefixwise.bench.render.document import Report
from prefixwise.bench.render.html import report_html
from prefixwise.bench.render.markdown import report_markdown
from tests.bench.matrix_samples import bad_row, good_row
from tests.bench.report_samples import SIZES, agreeing_rows, write_comparison


def reported(path: Path) -> Report:
    return make_report(read_report_inputs(ReportPaths(path)), "2026-02-11")


def test_a_backend_that_failed_everywhere_was_not_compared(tmp_path: Path) -> None:
    path = write_comparison(tmp_path, agreeing_rows(100.0), [bad_row(size) for size in SIZES])
    assert agreement(read_artifact(path, Comparison)) == "not compared"
    report = reported(path)
    scores = report.cards[2]
    assert (scores.value, scores.detail, scores.tone) == ("not compared", "nothing was compared", "open")
    assert report.statements[2] == "Whether the scores agree is not known: none could be compared."
    assert report.passed is None
    assert '<div class="verdict open">' in report_html(report)
    page = report_markdown(report)
    assert "The gate is open" in page
    assert "Scores of the two selected rows: not compared, no scores of pytorch." in page
    assert "FAIL" not in page


def test_chunk_sizes_that_only_one_has_leave_it_open(tmp_path: Path) -> None:
    path = write_comparison(tmp_path, [good_row(1, 100.0), good_row(2, 90.0)], [good_row(4, 100.0), good_row(6, 90.0)])
    report = reported(path)
    assert report.statements[2] == (
        "Whether the scores agree is not known everywhere: they differ by at most 0 (bound 0.02) where both have some, "
        "but nothing was compared for the same client."
    )
    assert report.cards[2].value == "not compared"
    assert report.passed is None


def test_scores_of_another_shape_differ(tmp_path: Path) -> None:
    other = [[0.5, 0.25, 0.25]] * 6
    report = reported(write_comparison(tmp_path, [good_row(1, 100.0, other)], [good_row(1, 100.0)]))
    assert report.passed is False
    assert report.statements[2].startswith("The scores do NOT agree everywhere: scores must be of one shape")
    assert report.cards[2].value == "DIFFER"


def test_it_is_never_greener_than_the_file(tmp_path: Path) -> None:
    comparison = read_artifact(write_comparison(tmp_path, agreeing_rows(100.0), agreeing_rows(90.0)), Comparison)
    assert agreement(comparison) == "agree"
    comparison.correctness["pass"] = False
    assert agreement(comparison) == "differ"


def test_bounds_that_are_no_numbers_are_none(tmp_path: Path) -> None:
    comparison = read_artifact(write_comparison(tmp_path), Comparison)
    comparison.correctness["thresholds"] = {"max_abs_diff": "0.02", "mean_abs_diff": float("nan")}
    assert thresholds(comparison) == (None, None)


def test_a_guardrail_that_is_not_drawn_is_not_explained(tmp_path: Path) -> None:
    path = write_comparison(tmp_path, agreeing_rows(100.0), [bad_row(size) for size in SIZES])
    chart = p95_chart(read_artifact(path, Comparison))
    assert "guardrail" not in chart.caption
    assert "guardrail" not in chart.svg
    assert chart.title == "p95 latency by chunk size"
