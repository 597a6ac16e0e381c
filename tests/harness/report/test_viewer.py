"""The report viewer's folder: what it lists, what it shows, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from itemwise.contract.errors import ArtifactError
from itemwise.harness.artifacts import GateReport
from itemwise.harness.files import write_artifact
from itemwise.harness.report.viewer import ReportFolder
from tests.harness.evaluations import MULTI_SCORES, evaluation, took
from tests.harness.report_samples import multi_vs_serial, parity, write_comparison


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    run = root / "run-1"
    run.mkdir()
    write_comparison(run)
    write_artifact(root / "evaluation.json", evaluation("multi", MULTI_SCORES, {"1": took(0.5), "10": took(2.0)}))
    write_artifact(root / "multi_vs_serial.json", multi_vs_serial())
    write_artifact(root / "parity.json", parity())
    write_artifact(root / "gate.json", GateReport(checks={}, all_pass=True))
    (root / "other.json").write_text('{"something": "else"}')
    (root / "broken.json").write_text("{")
    return root


def test_it_lists_artifacts_by_kind_and_nothing_else(folder: Path) -> None:
    found = {each["name"]: each["kind"] for each in ReportFolder(folder).artifacts()}
    assert found == {
        "evaluation.json": "evaluation",
        "gate.json": "gates",
        "multi_vs_serial.json": "multi vs serial",
        "parity.json": "parity",
        "run-1/comparison.json": "comparison",
        "run-1/jax_matrix.json": "matrix",
        "run-1/pytorch_matrix.json": "matrix",
    }


def test_without_a_folder_it_lists_nothing() -> None:
    assert ReportFolder(None).artifacts() == []


def test_all_that_it_lists_can_be_shown(folder: Path) -> None:
    viewer = ReportFolder(folder)
    pages = {str(each["name"]): viewer.page(str(each["name"])) for each in viewer.artifacts()}
    assert all(page.startswith("<!DOCTYPE html>") and "<script" not in page for page in pages.values())
    for name in ("run-1/comparison.json", "run-1/jax_matrix.json", "evaluation.json"):
        assert "<svg" in pages[name], f"{name} has no plot"


@pytest.mark.parametrize("name", ["other.json", "broken.json", "../x.json", "/etc/passwd", "run-1", ""])
def test_nothing_else_can(folder: Path, name: str) -> None:
    with pytest.raises(ArtifactError):
        ReportFolder(folder).page(name)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link.json").symlink_to(folder / "evaluation.json")
    assert ReportFolder(inside).artifacts() == []


@pytest.mark.parametrize("name", ["run-1/comparison.json", "run-1/jax_matrix.json", "evaluation.json", "parity.json"])
def test_what_is_sent_is_shown_and_no_file_is_read_for_it(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    assert ReportFolder(None).page_of(content, "sent.json").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"checks": 1, "all_pass": 2}', b"[" * 100_000])
def test_what_is_no_artifact_is_said_so(content: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"sent\.json"):
        ReportFolder(None).page_of(content, "sent.json")
