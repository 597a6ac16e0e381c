"""A score matrix as people read it."""

from __future__ import annotations

from pathlib import Path

from prefixwise.bench.artifacts import ScoreMatrix
from prefixwise.bench.files import read_artifact
from prefixwise.bench.matrix.markdown import matrix_markdown, number, table
from prefixwise.bench.matrix.sweep import SweepOptions
from tests.bench.matrix_samples import bad_row, good_row, write_matrix

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
    text = matrix_markdown(matrix)
    lines = text.splitlines()
    assert lines[0] == "# Score matrix: jax, portable view"
    assert "**Recommended: chunk size 6**, 50.0 items/s, p95 120.0 ms." in lines
    assert "| 1 | 6 | 2/2 | 10.0 | 600.0 | 600.0 | 600.0 | 1.00x | - |" in lines
    assert "| 2 | 3 | 0/2 | - | - | - | - | - | - |" in lines
    assert "| 6 | 1 | 2/2 | 60.0 | 100.0 | 100.0 | 100.0 | 1.00x | - |" in lines
    assert "- chunk size 2: 2 x timeout; chunk 1 of 3: too late" in lines
    assert "| device | `cpu` |" in lines
    assert "- JAX portable run" in lines
    assert "not finished" not in text


def test_an_unfinished_one_without_any_good_row_says_so(tmp_path: Path) -> None:
    matrix = read_artifact(write_matrix(tmp_path / "m.json", OPTIONS, [bad_row(1)]), ScoreMatrix)
    text = matrix_markdown(matrix.model_copy(update={"complete": False}))
    assert "**The sweep is not finished.**" in text
    assert "**No chunk size can be recommended: none worked in every run.**" in text
    assert "## Confirmed" not in text


def test_numbers_and_cells() -> None:
    assert (number(None), number(1234.56), number(0.000123, 6)) == ("-", "1,234.6", "0.000123")
    assert table(("a", "b"), [["x|y", "1"]]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_a_confirm_phase_that_failed_is_why_nothing_is_recommended(tmp_path: Path) -> None:
    path = write_matrix(tmp_path / "m.json", OPTIONS, [good_row(6, 100.0)], [bad_row(6)])
    text = matrix_markdown(read_artifact(path, ScoreMatrix))
    assert "**No chunk size can be recommended: of those measured again none worked in every run.**" in text
