"""One browser and one server on the embedded model for all tests of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from itemwise.harness.files import write_artifact
from tests.harness.evaluations import MULTI_SCORES, evaluation, took
from tests.harness.report_samples import write_comparison
from tests.page.browser import Visit, open_browser, visit, why_no_browser
from tests.server.server_process import real_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OpenPage = Callable[..., AbstractContextManager[Visit]]


@pytest.fixture(scope="session")
def needs_browser() -> None:
    reason = why_no_browser()
    if reason is not None:
        pytest.skip(f"THE PAGE IS NOT TESTED: {reason}")


@pytest.fixture(scope="module")
def browser(needs_browser: None) -> Iterator[Browser]:
    """One for each file: while it is open there is a running event loop, which tests of other files would trip over."""
    with open_browser() as running:
        yield running


@pytest.fixture(scope="session")
def reports_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    run = folder / "run-1"
    run.mkdir()
    write_comparison(run)
    write_artifact(folder / "evaluation.json", evaluation("multi", MULTI_SCORES, {"1": took(0.5), "10": took(2.0)}))
    return folder


@pytest.fixture(scope="session")
def embedded_server(needs_browser: None, reports_dir: Path) -> Iterator[str]:
    """Its address. Without a browser no server is started."""
    with real_server(f"--reports-dir={reports_dir}") as running:
        yield running.url


@pytest.fixture
def open_page(browser: Browser, embedded_server: str) -> OpenPage:
    return partial(visit, browser, embedded_server)
