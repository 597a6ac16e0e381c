"""The documentation site: it builds without a warning, which every broken link and every page outside the menu is."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import prefixwise
from tests.web.browser import AXE, DESKTOP, PHONE, Scheme, open_browser, visit, why_no_browser

pytest.importorskip("material", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_it_has_all_pages_and_loads_nothing_from_other_hosts(site: Path) -> None:
    reference = (site / "reference" / "index.html").read_text(encoding="utf-8")
    explained = {each.rpartition(".")[2] for each in re.findall(r'id="(prefixwise\.[\w.]+)"', reference)}
    assert explained >= {"score", "rerank", *prefixwise.__all__} - {"__version__"}
    assert (site / "search" / "search_index.json").stat().st_size > 10_000
    assert (site / "prefixwise.d.ts").is_file()
    start = (site / "index.html").read_text(encoding="utf-8")
    assert 'data-md-color-scheme="slate"' in start, "dark mode"
    assert '"provider": "mike"' in start, "the menu of versions"
    pages = list(site.rglob("index.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(r'<(?:script|img)[^>]* src="(https?:[^"]*)"', page.read_text(encoding="utf-8"))
        assert loaded == [], page


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    # As `make docs-version` writes it, for the menu of versions.
    (folder / "versions.json").write_text('[{"version": "1.0", "title": "1.0", "aliases": ["latest"]}]')
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


@pytest.mark.skipif(why_no_browser() is not None, reason=str(why_no_browser()))
@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed")
def test_axe_finds_no_fault_on_pages_with_code_tables_and_scrolling_ones(site: Path) -> None:
    cases: list[tuple[str, tuple[int, int], Scheme]] = [
        ("/", DESKTOP, "light"),
        ("/tutorials/threshold/", DESKTOP, "dark"),
        ("/batch/", PHONE, "light"),
    ]
    with served(site) as origin, open_browser() as browser:
        for path, size, scheme in cases:
            with visit(browser, origin, path, size, scheme) as visited:
                visited.page.wait_for_selector(".md-search[aria-label]", state="attached")
                assert visited.faults() == [], path
