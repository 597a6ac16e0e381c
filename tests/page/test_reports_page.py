"""The report viewer in a browser: a folder's artifacts, a dropped one, and a hostile one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page.conftest import OpenPage
from tests.page.test_playground import drop


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("comparison.json", "JAX vs PyTorch: multi-item scoring"),
        ("jax_matrix.json", "Score matrix: JAX, portable view"),
        ("evaluation.json", "Evaluation of a multi endpoint"),
    ],
)
def test_what_lies_in_the_folder_is_shown_with_plots(open_page: OpenPage, name: str, heading: str) -> None:
    with open_page(path="/reports") as visited:
        visited.page.get_by_role("link", name=name).click()
        report = visited.page.frame_locator("#report")
        report.locator("h1", has_text=heading).wait_for()
        assert report.locator("figure svg").count() >= 1
        colour = report.locator(".verdict").evaluate("each => getComputedStyle(each).borderLeftWidth")
        assert colour == "5px", "the report's own style sheet was refused"
        link = visited.page.url[len(visited.origin) :]
    with open_page(path=link) as visited:
        visited.page.frame_locator("#report").locator("h1", has_text=heading).wait_for()


def test_a_dropped_file_is_shown(open_page: OpenPage, reports_dir: Path) -> None:
    with open_page(path="/reports") as visited:
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
        assert visited.page.title() == "itemwise reports"


def test_another_file_is_refused_in_words(open_page: OpenPage) -> None:
    with open_page(path="/reports") as visited:
        visited.refused = {400}
        drop(visited.page, "#drop", "other.json", "{}")
        visited.page.wait_for_selector("#other-error:not(:empty)")
        assert "other.json is none of the artifacts" in visited.page.locator("#other-error").inner_text()
