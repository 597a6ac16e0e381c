"""What somebody sees who opens the page for the first time: a scored example and one sentence, all of it on a phone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.server.server_process import real_server
from tests.web.acts import fill_in, rows, score
from tests.web.browser import DESKTOP, EMPTY_FORM, PHONE, visit
from tests.web.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Elements that a reader cannot see whole: beyond the edge of the page, or cut by a box that does not scroll.
CUT_OFF = """(selector) => [...document.querySelectorAll(selector)].filter((each) => {
  const { left, right } = each.getBoundingClientRect();
  return left < 0 || right > document.documentElement.clientWidth || each.scrollWidth > each.clientWidth + 1;
}).map((each) => each.textContent)"""


def labels_right(page: Page) -> str:
    """What the confusion table says."""
    page.get_by_role("tab", name="Threshold").click()
    return page.locator("#panel-threshold caption").inner_text()


def test_it_opens_with_a_scored_example_and_without_a_state_in_the_address(open_page: OpenPage) -> None:
    with open_page(path="/") as visited:
        page = visited.page
        page.wait_for_selector("[role=option]")
        assert len(rows(page)) == 8
        assert page.url == f"{visited.origin}/"
        assert "Score many items against one query:" in page.locator(".intro").inner_text()
        assert "million parameters" in page.locator("#model-note").inner_text()
        page.get_by_role("button", name="Empty form").click()
        assert page.locator("#nothing").is_visible()
        assert page.locator("#list").is_hidden()
        page.reload()  # an empty form has an address of its own
        page.wait_for_selector("#served:has-text('SmolLM2')")
        assert page.url.endswith(EMPTY_FORM)
        assert page.locator("#nothing").is_visible()


def test_on_a_phone_a_link_leads_to_the_results_below_the_form(open_page: OpenPage) -> None:
    with open_page(path="/", size=PHONE) as visited:
        page = visited.page
        page.wait_for_selector("[role=option]")
        page.get_by_role("link", name="See the results").click()
        assert visited.is_in_sight("#results-heading")
        assert page.url == f"{visited.origin}/", "the part after the # is the state"
        page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
        assert page.get_by_role("link", name="See the results").count() == 0, "there they are beside the form"


def test_the_first_steps_stay_away_once_they_were_read(browser: Browser, server: str) -> None:
    with visit(browser, server) as visited:
        page = visited.page
        page.get_by_role("button", name="Got it").click()
        assert page.locator("#first-steps").is_hidden()
        assert page.evaluate("document.activeElement.id") == "query"
        page.reload()
        page.wait_for_selector("#served:has-text('SmolLM2')")
        assert page.locator("#first-steps").is_hidden()


@pytest.mark.parametrize("size", [PHONE, pytest.param(DESKTOP, marks=pytest.mark.slow)])
def test_labels_tabs_bars_and_hints_are_on_the_screen(open_page: OpenPage, size: tuple[int, int]) -> None:
    with open_page(size=size) as visited:
        page = visited.page
        page.get_by_role("button", name="Topic of headlines").click()
        page.wait_for_selector(".chips")
        for selector in ("[role=option] .figure", "[role=tab]", "#panel-saw .bar", ".actions"):
            assert page.locator(selector).count() > 0
            assert page.evaluate(CUT_OFF, selector) == []
        page.get_by_role("button", name="Two prompts").click()
        page.wait_for_selector("#compared")
        assert page.evaluate(CUT_OFF, "#comparison td, #comparison th, #comparison .scroll") == []
        page.get_by_role("button", name="Topic of headlines").click()
        page.wait_for_selector("[role=option]:has-text('politics')")
        figures = page.locator("[role=option]").first.locator(".figure")
        assert figures.count() == 3
        row = page.locator("[role=option]").first.bounding_box()
        last = figures.last.bounding_box()
        assert row and last and last["y"] + last["height"] <= row["y"] + row["height"], (
            "the row is too low for its values"
        )
        covers = """() => {
          const hint = document.querySelector("#labels-hint");
          hint.scrollIntoView({block: "end", behavior: "instant"});
          const { left, bottom } = hint.getBoundingClientRect();
          return document.elementFromPoint(left + 5, bottom - 5).id;
        }"""
        assert page.evaluate(covers) == "labels-hint", "something covers the hint of the labels"


def test_a_warning_about_the_model_stands_out(open_page: OpenPage) -> None:
    with open_page() as visited:
        page = visited.page
        page.get_by_role("button", name="Rerank passages").click()
        page.wait_for_selector("#notes:has-text('no reranker profile is known')")
        color = "each => getComputedStyle(each).color"
        assert page.locator("#notes").evaluate(color) != page.locator("#status").evaluate(color)
        fill_in_labels(page)
        assert page.locator("#notes").inner_text() == ""


def fill_in_labels(page: Page) -> None:
    page.get_by_label("labels as text").check()
    fill_in(page)
    score(page)


def test_a_server_that_still_loads_gets_the_example_when_it_is_ready(browser: Browser, server: str) -> None:
    answers = [{"model": None, "status": "starting"}]
    with visit(browser, server, "/") as visited:
        page = visited.page
        page.route("**/server_info", lambda route: route.fulfill(json=answers.pop()) if answers else route.continue_())
        page.reload()
        page.wait_for_selector("text=The server is starting.")
        assert page.locator("#nothing").is_visible()
        page.wait_for_selector("[role=option]")


@pytest.mark.slow
def test_the_embedded_model_gets_the_examples_right(browser: Browser) -> None:
    with real_server("--dtype=float32") as running, visit(browser, running.url) as visited:
        page = visited.page
        page.wait_for_selector("#model-note:has-text('135 million parameters')")
        examples = {
            "Mood of reviews": 8,
            "Topic of headlines": 6,
            "Rude comments": 6,
            "Judge replies": 6,
            "Item first": 8,
        }
        for name, total in examples.items():
            page.get_by_role("button", name=name).click()
            page.wait_for_selector("#list:not([aria-busy])")
            assert f"{total} of {total} items get their expected label" in labels_right(page), name
        page.get_by_role("button", name="Rerank passages").click()
        page.wait_for_selector("#notes:not(:empty)")
        assert rows(page)[0].startswith("To reset your password")
        page.get_by_role("button", name="Two prompts").click()
        page.wait_for_selector("text=A gets 8 of 8 right")
