"""The report viewer in a browser: a folder's artifacts, a dropped one, and a hostile one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.web.acts import drop
from tests.web.browser import DESKTOP, PHONE, Scheme, visit
from tests.web.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.mark.parametrize(
    ("name", "heading", "size", "scheme"),
    [
        ("comparison.json", "JAX vs PyTorch: multi-item scoring", DESKTOP, "light"),
        ("comparison.json", "JAX vs PyTorch: multi-item scoring", PHONE, "dark"),
        pytest.param("jax_matrix.json", "Score matrix: JAX, portable view", PHONE, "light", marks=pytest.mark.slow),
        pytest.param("evaluation.json", "Evaluation of a multi endpoint", DESKTOP, "dark", marks=pytest.mark.slow),
    ],
)
def test_what_lies_in_the_folder_is_shown_with_plots(
    open_page: OpenPage, name: str, heading: str, size: tuple[int, int], scheme: Scheme
) -> None:
    with open_page(path="/reports", size=size, scheme=scheme) as visited:
        assert visited.page.locator("#nothing").is_visible()
        visited.page.get_by_role("link", name=name).click()
        report = visited.page.frame_locator("#report")
        report.locator("h1", has_text=heading).wait_for()
        assert report.locator("figure svg").count() >= 1
        colour = report.locator(".verdict").evaluate("each => getComputedStyle(each).borderLeftWidth")
        assert colour == "5px", "the report's own style sheet was refused"
        assert visited.is_in_sight("#report-heading")
        assert not visited.scrolls_sideways()
        assert visited.page.locator("#folders [aria-current]").inner_text().startswith(name)
        link = visited.page.url[len(visited.origin) :]
    with open_page(path=link) as visited:
        visited.page.frame_locator("#report").locator("h1", has_text=heading).wait_for()


def test_a_dropped_file_is_shown_and_a_part_of_one_says_what_it_is_for(open_page: OpenPage, reports_dir: Path) -> None:
    with open_page(path="/reports") as visited:
        part = visited.page.locator("#folders .part", has_text="jax_matrix.workload.json")
        assert "the requests that were sent" in part.inner_text()
        assert part.get_by_role("link").count() == 0
        drop(visited.page, "#drop", "mine.json", (reports_dir / "run-1" / "jax_matrix.json").read_text())
        visited.page.frame_locator("#report").locator("h1", has_text="Score matrix").wait_for()
        assert visited.page.locator("#report-heading").inner_text() == "mine.json"


def test_a_script_in_an_artifact_stays_text(open_page: OpenPage, reports_dir: Path) -> None:
    text = (reports_dir / "evaluation.json").read_text()
    hostile = text.replace("a-model", "<script>top.document.title='owned'</script>")
    with open_page(path="/reports") as visited:
        drop(visited.page, "#drop", "hostile.json", hostile)
        report = visited.page.frame_locator("#report")
        report.locator("text=top.document.title").first.wait_for()
        assert report.locator("script").count() == 0
        assert visited.page.title() == "prefixwise reports"


def test_another_file_is_refused_in_words(open_page: OpenPage) -> None:
    with open_page(path="/reports") as visited:
        visited.refused = {400}
        drop(visited.page, "#drop", "other.json", "{}")
        visited.page.wait_for_selector("#other-error:not(:empty)")
        assert "other.json is none of the artifacts" in visited.page.locator("#other-error").inner_text()


def test_without_a_folder_a_sample_is_open(browser: Browser, server: str) -> None:
    listed = {"name": "evaluation.json", "folder": ".", "kind": "evaluation", "note": None}
    with visit(browser, server) as visited:
        page = visited.page
        page.route("**/reports/list", lambda route: route.fulfill(json={"has_folder": False, "artifacts": [listed]}))
        page.goto(f"{visited.origin}/reports")
        page.frame_locator("#report").locator("h1", has_text="Evaluation of a multi endpoint").wait_for()
        assert "this is a sample" in page.locator("#folder-note").inner_text()
        assert page.get_by_role("heading", name="Sample").is_visible()
        assert page.locator("#folders [aria-current]").count() == 1
