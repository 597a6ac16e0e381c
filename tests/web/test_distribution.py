"""A judge on the playground: its request, its distribution, and what other panels make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.web.acts import fill_in, rows, score
from tests.web.browser import DESKTOP, PHONE
from tests.web.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page

RUBRIC = "How kind is this? "


def fill_in_judge(page: Page, labels: str = "1-5") -> None:
    fill_in(page, labels=labels, query=RUBRIC)
    page.get_by_label("a judge's answers", exact=True).check()


def sent_by_score(page: Page) -> Any:
    with page.expect_request("**/v1/judge") as sent:
        score(page)
    return sent.value.post_data_json


@pytest.mark.parametrize("size", [PHONE, pytest.param(DESKTOP, marks=pytest.mark.slow)])
def test_an_example_shows_its_distribution(open_page: OpenPage, size: tuple[int, int]) -> None:
    with open_page(size=size) as visited:
        page = visited.page
        with page.expect_response("**/v1/judge") as answered:
            page.get_by_role("button", name="Judge replies").click()
        page.wait_for_selector("#panel-distribution table")
        found: Any = answered.value.json()
        page.get_by_label("Sort by", exact=True).select_option("order")
        page.locator("[role=option]").nth(1).click()
        panel, judged = page.locator("#panel-distribution"), found["results"][1]
        names = panel.locator("tbody th").all_inner_texts()
        assert names == ["insulting", "rude", "neutral", "polite", "very kind"]
        shown = [float(cell) for cell in panel.locator("tbody td.number").all_inner_texts()]
        assert shown == pytest.approx(judged["probs"], abs=1e-4)
        widths = panel.locator(".bar > span").evaluate_all("bars => bars.map((each) => parseFloat(each.style.width))")
        assert widths == pytest.approx([100 * each for each in judged["probs"]], abs=1e-3)
        text = panel.locator("#judged").inner_text()
        assert text.startswith(f"Most likely: {judged['answer'].strip()}. The expected value is ")
        assert f"The entropy is {judged['entropy']:.4f} bits." in text
        assert not visited.scrolls_sideways()


def test_panels_ask_the_judge_again(open_page: OpenPage) -> None:
    with open_page() as visited:
        page = visited.page
        fill_in_judge(page, " yes\n no")
        score(page)
        page.wait_for_selector("#panel-saw .good:has-text('exactly the scores')")
        assert "<|im_start|>" in page.locator("#panel-saw .chips").inner_text()
        page.get_by_role("tab", name="Isolation").click()
        page.get_by_role("button", name="Change another item and score again").click()
        assert "moved by exactly 0;" in page.locator("#moved").inner_text()
        page.get_by_role("tab", name="Compare").click()
        with page.expect_request("**/v1/judge") as sent:
            page.get_by_label("Query of B").fill("Is it? ")
            page.get_by_role("button", name="Compare", exact=True).click()
        assert "Is it? {item}" in (sent.value.post_data or "")
        page.wait_for_selector("#compared")


def test_the_form_makes_a_chat(open_page: OpenPage) -> None:
    with open_page() as visited:
        page = visited.page
        fill_in_judge(page)
        assert page.get_by_label("Score mode", exact=True).is_hidden()
        body = sent_by_score(page)
        assert body["messages"] == [{"role": "user", "content": RUBRIC + "{item}\nAnswer:"}]
        assert (body["answers"], len(body["items"]), "values" in body) == ("1-5", 3, False)
        page.get_by_label("Query", exact=True).fill("Is {item} kind? ")
        page.get_by_label("Labels", exact=True).fill(" good\n bad")
        page.get_by_label("Beginning of the answer", exact=True).fill("It is")
        page.get_by_label("Values of the labels", exact=True).fill("1, 0.5")
        page.get_by_label("Algorithm", exact=True).select_option("serial")
        body = sent_by_score(page)
        assert body["messages"] == [
            {"role": "user", "content": "Is {item} kind? \nAnswer:"},
            {"role": "assistant", "content": "It is"},
        ]
        assert (body["answers"], body["values"], body["algorithm"]) == ([" good", " bad"], [1, 0.5], "serial")


def test_items_are_ranked_by_the_expected_value_and_a_link_has_it_all(open_page: OpenPage) -> None:
    with open_page() as visited:
        page = visited.page
        fill_in_judge(page)
        with page.expect_response("**/v1/judge") as answered:
            score(page)
        found: Any = answered.value.json()
        items = page.get_by_label("Items", exact=True).input_value().split("\n")
        by_value = sorted(range(3), key=lambda index: -found["results"][index]["expected_value"])
        assert rows(page) == [items[index] for index in by_value]
        assert page.locator("[role=option] .values").first.inner_text().startswith("mean")
        page.get_by_role("tab", name="Threshold").click()
        assert page.locator("#panel-threshold .axis").inner_text().split() == ["1", "5"]
        page.locator("#expected-field").evaluate("each => { each.open = true; }")
        page.get_by_label("Expected labels", exact=True).fill("1\n2\n3")
        assert "of 3 items get their expected label" in page.locator("#panel-threshold caption").inner_text()
        assert "precision" not in page.locator("#threshold-counts").inner_text()
        before, link = rows(page), page.url[len(visited.origin) :]
    with open_page(path=link) as visited:
        visited.page.wait_for_selector("[role=option]")
        assert rows(visited.page) == before
        assert visited.page.get_by_label("a judge's answers", exact=True).is_checked()


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("Labels", "high", "labels-error"),
        ("Query", "{item} and {item}", "query-error"),
        ("Values of the labels", "1 many", "values-error"),
    ],
)
def test_an_error_stands_beside_its_field(open_page: OpenPage, field: str, value: str, place: str) -> None:
    with open_page() as visited:
        visited.refused = {400}
        page = visited.page
        fill_in_judge(page)
        page.get_by_label(field, exact=True).fill(value)
        score(page)
        assert page.locator(f"#{place}").inner_text() != ""


def test_labels_have_a_distribution_where_scores_are_probabilities(open_page: OpenPage) -> None:
    with open_page() as visited:
        page = visited.page
        fill_in(page)
        score(page)
        page.get_by_role("tab", name="Distribution").click()
        assert page.locator("#panel-distribution tbody th").all_inner_texts() == ["yes", "no"]
        page.get_by_label("Score mode", exact=True).select_option("logit_diff")
        score(page)
        page.wait_for_selector("text=The scores of this mode are not probabilities.")
