from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer

from prefixwise.bench.files import write_artifact
from prefixwise.cli.bench.report import report
from prefixwise.cli.failures import CommandError
from prefixwise.contract.errors import ArtifactError
from tests.bench.report_samples import multi_vs_serial, parity, write_comparison

Run = Callable[..., dict[str, object]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The verb as a program has it; what it says last."""
    app = typer.Typer()
    app.command()(report)

    def call(*args: object) -> dict[str, object]:
        app([str(arg) for arg in args], standalone_mode=False)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert isinstance(found, dict)
        return found

    return call


def test_both_files_are_written_and_named_last(run: Run, tmp_path: Path) -> None:
    markdown, html = tmp_path / "out" / "report.md", tmp_path / "out" / "report.html"
    comparison = write_comparison(tmp_path)
    reported = run(
        *("--comparison-json", comparison, "--output-report", markdown),
        *("--output-html", html, "--title-date", "2026-02-11"),
    )
    assert reported["output_report"] == str(markdown)
    assert reported["output_html"] == str(html)
    assert reported["pass"] is True
    assert reported["notes"] == []
    assert markdown.read_text().startswith("# JAX vs PyTorch: multi-item scoring (2026-02-11)\n")
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert f"--output-html {html}" in markdown.read_text()


def test_the_earlier_command_line_is_enough(run: Run, tmp_path: Path) -> None:
    markdown = tmp_path / "report.md"
    before = datetime.now(UTC).date().isoformat()
    reported = run("--comparison-json", write_comparison(tmp_path), "--output-report", markdown)
    assert reported["output_html"] is None
    assert reported["title_date"] in (before, datetime.now(UTC).date().isoformat())
    assert markdown.read_text().splitlines()[0].endswith(f"({reported['title_date']})")


def test_what_else_is_given_adds_sections(run: Run, tmp_path: Path) -> None:
    write_artifact(tmp_path / "multi.json", multi_vs_serial())
    write_artifact(tmp_path / "parity.json", parity())
    reported = run(
        *("--comparison-json", write_comparison(tmp_path), "--output-html", tmp_path / "report.html"),
        *("--multi-vs-serial-json", tmp_path / "multi.json", "--parity-json", tmp_path / "parity.json"),
    )
    sections = reported["sections"]
    assert isinstance(sections, list)
    assert "Validation gates" in sections
    assert "All 5 gates passed." in (tmp_path / "report.html").read_text()


def test_what_is_given_more_than_once_is_all_there_and_a_failure_of_one_counts(run: Run, tmp_path: Path) -> None:
    options: list[object] = []
    for backend, speedup in (("jax", 4.0), ("pytorch", 2.0)):
        path = tmp_path / f"{backend}_multi_vs_serial.json"
        write_artifact(path, multi_vs_serial(speedup))
        options += ["--multi-vs-serial-json", path]
    reported = run("--comparison-json", write_comparison(tmp_path), "--output-html", tmp_path / "report.html", *options)
    assert reported["pass"] is False
    page = (tmp_path / "report.html").read_text()
    assert "Validation gates FAILED: PyTorch speedup_n32_ge_3x." in page
    assert "Gates: JAX" in page


def test_a_missing_matrix_is_told_and_the_report_is_written(run: Run, tmp_path: Path) -> None:
    comparison = write_comparison(tmp_path)
    (tmp_path / "pytorch_matrix.json").unlink()
    reported = run("--comparison-json", comparison, "--output-report", tmp_path / "report.md")
    assert len(reported["notes"]) == 2  # type: ignore[arg-type]
    assert (tmp_path / "report.md").exists()


@pytest.mark.parametrize("when", ["11.02.2026", "2026-13-01", "today"])
def test_a_date_that_is_none_is_refused(run: Run, tmp_path: Path, when: str) -> None:
    with pytest.raises(CommandError, match="--title-date must be a date like 2026-02-11") as raised:
        run("--comparison-json", tmp_path / "c.json", "--output-report", tmp_path / "r.md", "--title-date", when)
    assert raised.value.status == 2


def test_it_must_have_somewhere_to_go(run: Run, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="expected --output-report or --output-html or both, got neither") as raised:
        run("--comparison-json", tmp_path / "comparison.json")
    assert raised.value.status == 2


def test_there_is_no_report_without_a_comparison(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere\.json cannot be read"):
        run("--comparison-json", tmp_path / "nowhere.json", "--output-report", tmp_path / "report.md")
    assert not (tmp_path / "report.md").exists()
