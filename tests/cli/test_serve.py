"""What `serve` shares with the other verbs; its own flags are tested in tests/test_launch_server.py."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from prefixwise.bench.run.report import ReportFolder
from prefixwise.cli import serve
from prefixwise.cli.failures import CommandError
from prefixwise.cli.serve import LateReports
from prefixwise.contract.errors import ArtifactError
from prefixwise.host import install_command
from prefixwise.server.config import ServerOptions
from tests.cli.conftest import REAL_PROGRAM, run_process


def test_a_profile_that_is_not_there_is_an_error_with_a_hint_before_the_model_is_loaded() -> None:
    ran = run_process([*REAL_PROGRAM, "serve", "--port", "0", "--model", "no such model", "--profile", "nobody"])
    error, hint = ran.err.splitlines()[-2:]
    assert (ran.status, ran.out) == (1, "")
    assert error.startswith('error: no profile is called "nobody"; expected bge-')
    assert hint.startswith("hint: `prefixwise profiles` lists")


def failure_of(source: LateReports | ReportFolder) -> str:
    with pytest.raises(ArtifactError) as failed:
        source.page("mine.json")
    return str(failed.value)


def failure_of_sent(source: LateReports | ReportFolder) -> str:
    with pytest.raises(ArtifactError) as failed:
        source.page_of(b"{}", "sent.json")
    return str(failed.value)


def test_it_shows_what_the_viewer_shows(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    late, viewer = LateReports(tmp_path), ReportFolder(tmp_path)
    assert late.artifacts() == viewer.artifacts()
    assert failure_of(late) == failure_of(viewer)
    assert failure_of_sent(late) == failure_of_sent(viewer)


def test_nothing_is_imported_before_somebody_asks() -> None:
    code = (
        "import sys; from prefixwise.cli.serve import LateReports; reports = LateReports(None); "
        "name = 'prefixwise.bench.run.report'; print(name in sys.modules); reports.artifacts(); "
        "print(name in sys.modules)"
    )
    assert run_process([sys.executable, "-c", code]).out.split() == ["False", "True"]


def test_where_it_cannot_be_imported_the_server_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda package: None)
    with caplog.at_level(logging.WARNING, "prefixwise"):
        assert serve._report_source(ServerOptions(reports_dir=str(tmp_path))) is None
    assert caplog.messages == [f"--reports-dir has no effect: pydantic is missing; {install_command('harness')}"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--reports-dir must be a folder, got"):
        serve._report_source(ServerOptions(reports_dir=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("given", "device", "accelerator", "cores", "expected"),
    [
        (None, "auto", False, 64, 0),  # on a CPU the model needs the cores
        (None, "cpu", True, 64, 0),
        (None, "auto", True, 2, 1),
        (None, "auto", True, 12, 3),
        (None, "cuda:1", False, 64, 4),
        (0, "cuda", True, 64, 0),
        (7, "cpu", False, 2, 7),
    ],
)
def test_http_workers_follow_device_and_cores(
    given: int | None, device: str, accelerator: bool, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "has_accelerator", lambda: accelerator)
    monkeypatch.setattr(serve, "num_cores", lambda: cores)
    assert serve.num_http_workers(given, device) == expected
