"""One browser and one server for the files of this room that a process runs one after the other.

Its scores are arithmetic, at once; the rest is real, the embedded model's tokenizer among it. `test_many_items.py`
has the page on real models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prefixwise.bench.files import write_artifact
from tests.bench.evaluations import MULTI_SCORES, evaluation, took
from tests.bench.report_samples import write_comparison
from tests.server.server_process import real_server
from tests.web.browser import Tab, Visit, open_browser, why_no_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OpenPage = Callable[..., AbstractContextManager[Visit]]


@pytest.fixture(scope="session")
def needs_browser() -> None:
    reason = why_no_browser()
    if reason is not None:
        pytest.skip(f"THE PAGE IS NOT TESTED: {reason}")


@pytest.fixture(scope="package")
def browser(needs_browser: None) -> Iterator[Browser]:
    """Not longer: while it is open there is a running event loop, which tests of other rooms would trip over."""
    with open_browser() as running:
        yield running


@pytest.fixture(scope="package")
def reports_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    run = folder / "run-1"
    run.mkdir()
    write_comparison(run)
    write_artifact(folder / "evaluation.json", evaluation("multi", MULTI_SCORES, {"1": took(0.5), "10": took(2.0)}))
    return folder


@pytest.fixture(scope="package")
def server(needs_browser: None, reports_dir: Path) -> Iterator[str]:
    """Its address. Without a browser no server is started."""
    with real_server("--backend=fake", f"--reports-dir={reports_dir}") as running:
        yield running.url


@pytest.fixture(scope="module")
def open_page(browser: Browser, server: str) -> OpenPage:
    """Opens the server's page, in the same tab again and again; `visit` is for tests that change the tab itself."""
    return Tab(browser, server).visit
