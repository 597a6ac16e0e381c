"""A comparison as people read it."""

from __future__ import annotations

from pathlib import Path

from prefixwise.bench.comparison.markdown import comparison_markdown
from tests.bench.comparison.test_compare import JAX, PYTORCH, compared
from tests.bench.matrix_samples import bad_row, good_row, shifted


def test_side_by_side_with_deltas(tmp_path: Path) -> None:
    lines = comparison_markdown(compared(tmp_path)).splitlines()
    assert lines[0] == "# JAX and PyTorch, compared"
    assert "| 1 | 10.0 | 20.0 | -50.0% | 600.0 | 300.0 | +100.0% | 0.0e+00 | yes |" in lines
    assert "| 6 | 60.0 | 50.0 | +20.0% | 100.0 | 120.0 | -16.7% | 0.0e+00 | yes |" in lines
    assert "- **Overall**: jax, in both views." in lines
    assert "| items/s | 60.0 | 50.0 | +20.0% |" in lines
    assert "Correct: yes, max abs diff 0 (at most 0.02), mean 0 (at most 0.01)." in lines
    assert any(line.startswith("Correctness gate: **passed**, 3 of 3 rows") for line in lines)
    assert any(line.startswith("| jax_portable | `") for line in lines)


def test_what_is_wrong_or_missing_is_seen(tmp_path: Path) -> None:
    jax = [bad_row(1), JAX[1], good_row(6, 100.0, shifted(0.03))]
    lines = comparison_markdown(compared(tmp_path, jax, PYTORCH[1:])).splitlines()
    assert "| 1 | - | - | - | - | - | - | - | missing |" in lines
    assert "| 6 | 60.0 | 50.0 | +20.0% | 100.0 | 120.0 | -16.7% | 3.0e-02 | NO |" in lines
    assert any(line.startswith("Correctness gate: **FAILED**, 1 of 2 rows") for line in lines)
    assert any(line.startswith("Correct: NO, max abs diff 0.03") for line in lines)
