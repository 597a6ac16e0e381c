"""The report of a comparison, as `bench compare` writes it."""

from __future__ import annotations

from pathlib import Path

from prefixwise.bench.kinds.comparison.report import comparison_report
from prefixwise.bench.kinds.comparison.tables import portable_table
from prefixwise.bench.kinds.score_matrix import P95, THROUGHPUT
from prefixwise.bench.render.markdown import report_markdown
from prefixwise.bench.render.terminal import terminal_lines
from tests.bench.matrix_samples import bad_row, good_row, shifted
from tests.bench.run.test_comparison import JAX, PYTORCH, compared


def test_side_by_side_with_changes(tmp_path: Path) -> None:
    lines = report_markdown(comparison_report(compared(tmp_path), "comparison.json")).splitlines()
    assert lines[0].startswith("# JAX vs PyTorch: multi-item scoring (")
    assert "| 1 | 10.0 | 20.0 | -50.0% | 600.0 | 300.0 | +100.0% | 600.0 | 300.0 | +100.0% | 0 | 0 | pass |" in lines
    assert "| 6 | 60.0 | 50.0 | +20.0% | 100.0 | 120.0 | -16.7% | 100.0 | 120.0 | -16.7% | 0 | 0 | pass |" in lines
    assert "- Recommendation, overall: jax, in both views." in lines
    assert "| throughput (items/s) | 60.0 | 50.0 | +20.0% |" in lines
    assert "Scores of the two selected rows: pass, max abs diff 0 (at most 0.02), mean 0 (at most 0.01)." in lines
    assert any(line.startswith("The gate passed.") for line in lines)
    assert any(line.startswith("| jax_portable | `") for line in lines)


def test_wrong_and_missing_scores_are_shown(tmp_path: Path) -> None:
    jax = [bad_row(1), JAX[1], good_row(6, 100.0, shifted(0.03))]
    found = compared(tmp_path, jax, PYTORCH[1:])
    lines = report_markdown(comparison_report(found, "comparison.json")).splitlines()
    assert any(line.startswith("| 1 | **failed** | - | -") and line.endswith("| not compared |") for line in lines)
    assert any(line.startswith("| 6 | 60.0 | 50.0 | +20.0%") and line.endswith("| **FAIL** |") for line in lines)
    assert any(line.startswith("The gate FAILED.") for line in lines)
    assert any(line.startswith("Scores of the two selected rows: FAIL, max abs diff 0.03") for line in lines)


def test_a_terminal_shows_the_same_table_with_fewer_columns(tmp_path: Path) -> None:
    _, header, first, *_ = terminal_lines(portable_table(compared(tmp_path), (THROUGHPUT, P95)))
    assert "p50" not in header
    assert first.split() == ["1", "10.0", "20.0", "-50.0%", "600.0", "300.0", "+100.0%", "0", "0", "pass"]
