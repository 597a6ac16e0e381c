"""Who is faster, where every view was measured twice. Six items in 120 ms are 50 items/s, in 100 ms 60, in 80 ms 75."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwise.bench.kinds.comparison.inputs import ReportPaths, read_report_inputs
from prefixwise.bench.kinds.comparison.report import make_report
from prefixwise.bench.render.document import Report
from tests.bench.matrix_samples import good_row
from tests.bench.report_samples import agreeing_rows, write_comparison


def reported(folder: Path, jax_again: float, pytorch_again: float) -> Report:
    """PyTorch wins the sweep, 60 items/s against 50, in chunks of 1."""
    again = ([good_row(1, total), good_row(2, 2 * total)] for total in (jax_again, pytorch_again))
    path = write_comparison(folder, agreeing_rows(120.0), agreeing_rows(100.0), *again)
    return make_report(read_report_inputs(ReportPaths(path)), "2026-02-11")


def test_a_winner_of_both_phases_is_named_with_both_figures(tmp_path: Path) -> None:
    report = reported(tmp_path, jax_again=120.0, pytorch_again=80.0)
    assert report.statements[0] == (
        "With the same client, PyTorch is 20.0% faster: 60.0 items/s in chunks of 1; JAX does 50.0 items/s in chunks "
        "of 1 (confirm phase: PyTorch 75.0, JAX 50.0 items/s)."
    )
    # The best-native view quotes the confirm phase, so there the sweep is the other one.
    assert "PyTorch is 50.0% faster" in report.statements[1]
    assert report.statements[1].endswith("(sweep: PyTorch 60.0, JAX 50.0 items/s).")
    assert [card.value for card in report.cards[:2]] == ["PyTorch +20.0%", "PyTorch +50.0%"]


def test_a_winner_that_the_confirm_phase_reverses_is_none(tmp_path: Path) -> None:
    report = reported(tmp_path, jax_again=80.0, pytorch_again=100.0)
    assert report.statements[0] == (
        "With the same client, there is no sure winner: the sweep has PyTorch 20.0% faster (60.0 items/s in chunks of "
        "1; JAX does 50.0 items/s in chunks of 1), but the confirm phase has JAX 25.0% faster (75.0 against 60.0 "
        "items/s)."
    )
    assert report.statements[1].startswith(
        "Each at its best, there is no sure winner: the confirm phase has JAX 25.0% faster"
    )
    portable = report.cards[0]
    assert (portable.value, portable.tone) == ("no sure winner", "open")
    assert portable.detail == "sweep: JAX 50.0, PyTorch 60.0\nconfirm phase: JAX 75.0, PyTorch 60.0 items/s"


def test_a_winner_that_is_only_equal_the_second_time_is_none(tmp_path: Path) -> None:
    report = reported(tmp_path, jax_again=100.0, pytorch_again=100.0)
    assert "but the confirm phase has the two equal (60.0 against 60.0 items/s)" in report.statements[0]


@pytest.mark.parametrize("missing", ["jax", "pytorch"])
def test_without_both_matrices_there_is_one_figure(tmp_path: Path, missing: str) -> None:
    again = ([good_row(1, 80.0)], [good_row(1, 100.0)])
    path = write_comparison(tmp_path, agreeing_rows(120.0), agreeing_rows(100.0), *again)
    (tmp_path / f"{missing}_matrix.json").unlink()
    report = make_report(read_report_inputs(ReportPaths(path)), "2026-02-11")
    assert report.statements[0].endswith("JAX does 50.0 items/s in chunks of 1.")


def test_one_that_wins_by_its_smaller_chunk_is_not_called_faster(tmp_path: Path) -> None:
    path = write_comparison(
        tmp_path, [good_row(2, 100.0), good_row(6, 300.0)], [good_row(2, 300.0), good_row(6, 100.0)]
    )
    report = make_report(read_report_inputs(ReportPaths(path)), "2026-02-11")
    assert report.statements[0].startswith(
        "With the same client, JAX wins although it is only as fast, because its chunks are smaller"
    )
