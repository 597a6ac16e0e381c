"""The last steps of a comparison of backends, from the four matrices in its folder: side by side, then the report."""

from __future__ import annotations

from pathlib import Path

from prefixwise.bench.comparison.compare import compare
from prefixwise.bench.comparison.inputs import read_inputs
from prefixwise.bench.comparison.markdown import comparison_markdown
from prefixwise.bench.comparison.rows import CompareOptions
from prefixwise.bench.files import write_artifact, write_text
from prefixwise.bench.remote.compare.plan import ComparePlan, MatrixStep
from prefixwise.bench.report.html import report_html
from prefixwise.bench.report.inputs import ReportPaths, read_report_inputs
from prefixwise.bench.report.make import make_report
from prefixwise.bench.report.markdown import report_markdown

COMPARISON = "comparison.json"
COMPARISON_FILES = (COMPARISON, "comparison.md")
REPORT_MARKDOWN, REPORT_HTML = REPORT_FILES = ("report.md", "report.html")


def write_comparison(folder: Path, plan: ComparePlan) -> None:
    """Raises ArtifactError."""
    inputs = read_inputs(
        folder / MatrixStep("jax", "portable").file_name,
        folder / MatrixStep("pytorch", "portable").file_name,
        folder / MatrixStep("jax", "best_native").file_name,
        folder / MatrixStep("pytorch", "best_native").file_name,
    )
    gates = CompareOptions(plan.correctness_threshold_max_abs, plan.correctness_threshold_mean_abs)
    comparison = compare(inputs, gates)
    write_text(folder / "comparison.md", comparison_markdown(comparison))
    write_artifact(folder / COMPARISON, comparison)


def write_report(folder: Path) -> None:
    """Of the day of the comparison, so that the same comparison has the same report. Raises ArtifactError."""
    markdown, html = folder / REPORT_MARKDOWN, folder / REPORT_HTML
    inputs = read_report_inputs(ReportPaths(folder / COMPARISON, output_report=markdown, output_html=html))
    day = (inputs.comparison.generated_at_utc or "").partition("T")[0]
    report = make_report(inputs, day)
    write_text(markdown, report_markdown(report))
    write_text(html, report_html(report))
