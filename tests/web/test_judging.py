"""Expected labels, the threshold, and two prompts side by side."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.web.acts import drop, fill_in, score
from tests.web.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Scores of " yes", and what was expected: yes, no, yes, yes, nothing, no.
SCORES = (0.9, 0.8, 0.7, 0.4, 0.3, 0.1)
EXPECTED = ["yes", "no", "yes", "yes", "", "no"]
ANSWER: dict[str, Any] = {
    "request": {"body": {"labels": [" yes", " no"]}},
    "columns": [" yes", " no"],
    "rows": [{"index": index, "values": [value, 1 - value]} for index, value in enumerate(SCORES)],
}


def call(page: Page, function: str, *arguments: object) -> Any:
    """A function of expected.js."""
    code = "async ([name, given]) => (await import('/page/expected.js'))[name](...given)"
    return page.evaluate(code, [function, list(arguments)])


class TestExpectedLabels:
    def test_the_figures_of_a_threshold_and_of_the_confusion(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            assert call(page, "expectedOf", "yes\n\nno \n") == ["yes", "", "no"]
            at = call(page, "countsAt", ANSWER, EXPECTED, 0.5)
            assert (at["above"], at["below"]) == (3, 3)
            assert (at["precision"], at["recall"], at["right"]) == (2 / 3, 2 / 3, 3 / 5)
            assert call(page, "countsAt", ANSWER, [], 0.7)["precision"] is None
            best = call(page, "bestThreshold", ANSWER, EXPECTED)  # 3 of 4 found are right, and none is missed
            assert (best["f1"], round(best["threshold"], 6)) == (6 / 7, 0.25)
            confusion = call(page, "confusionOf", ANSWER, EXPECTED)
            assert (confusion["names"], confusion["counts"]) == (["yes", "no"], [[2, 1], [1, 1]])
            assert (confusion["numRight"], confusion["total"]) == (3, 5)
            other = call(page, "confusionOf", ANSWER, ["maybe"])
            assert (other["names"], other["counts"][2]) == (["yes", "no", "maybe"], [1, 0])

    def test_they_come_from_a_column_and_go_into_the_download(self, open_page: OpenPage, tmp_path: Path) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            drop(page, "#items", "a.csv", "text,label\nbread,yes\nlaw,no\n")
            page.wait_for_selector("#expected-count:text-is('(2)')")
            score(page)
            page.get_by_role("tab", name="Threshold").click()
            assert "of 2 items get their expected label" in page.locator("#panel-threshold caption").inner_text()
            with page.expect_download() as download:
                page.get_by_role("button", name="CSV", exact=True).click()
            download.value.save_as(tmp_path / "scores.csv")
            page.get_by_label("Expected label", exact=True).select_option(label="none")
            assert page.locator("#expected-count").inner_text() == "(none)"
        with (tmp_path / "scores.csv").open(encoding="utf-8", newline="") as file:
            assert {row["item"]: row["expected"] for row in csv.DictReader(file)} == {"bread": "yes", "law": "no"}


class TestThreshold:
    def test_the_slider_moves_by_keys_and_its_counts_follow(self, open_page: OpenPage) -> None:
        with open_page(path="/") as visited:
            page = visited.page
            page.wait_for_selector("[role=option]")
            page.get_by_role("tab", name="Threshold").click()
            slider = page.get_by_label("Threshold", exact=True).and_(page.locator("input"))
            assert slider.input_value() == "0.5"
            slider.press("Home")
            assert "8 items at or above (100 %)" in page.locator("#threshold-counts").inner_text()
            slider.press("ArrowRight")
            assert float(slider.input_value()) == 0.005
            assert "threshold=0.005" in page.url
            slider.press("End")
            assert "8 below (100 %)" in page.locator("#threshold-counts").inner_text()
            page.locator("#best-threshold").click()
            assert "precision" in page.locator("#threshold-counts").inner_text()
            chosen, link = slider.input_value(), page.url[len(visited.origin) :]
        with open_page(path=link) as visited:
            page = visited.page
            page.wait_for_selector("#threshold-counts p")
            assert abs(float(page.locator("#threshold").input_value()) - float(chosen)) < 1e-5

    def test_without_expected_labels_it_says_what_they_are_for(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            page.get_by_label("Score mode", exact=True).select_option("logprob")
            score(page)
            page.get_by_role("tab", name="Threshold").click()
            assert "With expected labels" in page.locator("#panel-threshold").inner_text()
            assert "3 scores" in (page.locator(".histogram").get_attribute("aria-label") or "")


class TestComparison:
    def test_two_prompts_are_scored_on_the_same_items_and_a_link_has_both(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            score(page)
            page.get_by_role("tab", name="Compare").click()
            assert page.get_by_label("Query of B").input_value() == "Is this food? Text: "
            assert "other" not in page.url
            with page.expect_request(lambda request: '"query":"Edible? "' in (request.post_data or "")):
                page.get_by_label("Query of B").fill("Edible? ")
                page.get_by_role("button", name="Compare", exact=True).click()
            page.wait_for_selector("#compared")
            assert "of 3 items change their rank" in page.locator("#compared").inner_text()
            table = page.locator("#comparison tbody tr").all_inner_texts()
            assert len(table) == 3
            link = page.url[len(visited.origin) :]
        with open_page(path=link) as visited:
            page = visited.page
            page.wait_for_selector("#compared")
            assert page.locator("#comparison tbody tr").all_inner_texts() == table
            page.get_by_role("button", name="Make B the same as A").click()
            assert page.get_by_label("Query of B").input_value() == "Is this food? Text: "
            assert "other" not in page.url

    def test_ranks_and_differences_are_those_of_the_two_answers(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            code = """async ([a, b]) => (await import('/page/comparison.js')).pairs(a, b)"""
            texts = [{**row, "text": f"item {row['index']}"} for row in ANSWER["rows"]]
            other = [{**row, "values": [1 - row["values"][0]]} for row in texts[:5]]
            failed = {"index": 5, "text": "item 5", "values": None}
            found = visited.page.evaluate(code, [{"rows": texts}, {"rows": [*other, failed]}])
        assert [(each["rankA"], each["rankB"]) for each in found] == [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)]
        assert found[0] == {"text": "item 0", "rankA": 1, "rankB": 5, "a": 0.9, "b": 1 - 0.9}

    def test_an_error_of_b_stands_beside_b(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            visited.refused = {400}
            page = visited.page
            fill_in(page)
            score(page)
            page.get_by_role("tab", name="Compare").click()
            page.get_by_label("Labels of B").fill("")
            page.get_by_label("Labels of B").press("Control+Enter")
            page.wait_for_selector("#comparison .error:has-text('B: ')")
            assert page.locator("#labels-error").inner_text() == ""


def test_the_link_of_a_state_is_copied(open_page: OpenPage) -> None:
    with open_page() as visited:
        page = visited.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        fill_in(page)
        page.get_by_role("button", name="Copy link").click()
        page.wait_for_selector("text=The link is copied.")
        assert page.evaluate("navigator.clipboard.readText()") == page.url
        page.get_by_label("Items", exact=True).fill("long " * 20_000)
        page.get_by_role("button", name="Copy link").click()
        page.wait_for_selector("text=too long for a link; download")
