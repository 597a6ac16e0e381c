"""5,000 items: the page is there again soon after the answer, and its document stays small. Panels on a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.server.server_process import real_server
from tests.web.acts import fill_in, paste, score
from tests.web.browser import visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NUM_ITEMS = 5000

# From the answer's last byte to a frame drawn after it, in which a click is answered.
MEASURE = """() => new Promise((resolve) => {
  const list = document.querySelector("#list");
  const answered = () => performance.getEntriesByName(`${location.origin}/v1/score`)[0];
  const look = () => {
    const entry = answered();
    const isBusy = !entry || list.getAttribute("aria-busy") || !list.querySelector("[role=option]");
    if (isBusy) return void setTimeout(look, 5);
    list.querySelector("[role=option]").click();
    requestAnimationFrame(() => requestAnimationFrame(() => resolve((performance.now() - entry.responseEnd) / 1000)));
  };
  look();
})"""


# The longest that the page takes from a change of the list to a frame in which it is seen.
SLOWEST_CHANGE = """async () => {
  const list = document.querySelector("#list");
  const drawn = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  const put = (id, value) => () => {
    document.querySelector(id).value = value;
    document.querySelector(id).dispatchEvent(new Event("input", {bubbles: true}));
  };
  const scrolls = Array.from({length: 20}, (_, i) => () => { list.scrollTop = i * 13_000; });
  const sorts = ["order", "0-up", "1-down", "0-down"].map((value) => put("#sort", value));
  const filters = ["4", "49", "499", ""].map((value) => put("#filter", value));
  const took = [];
  for (const change of [...scrolls, ...sorts, ...filters]) {
    const begin = performance.now();
    change();
    await drawn();
    took.push(performance.now() - begin);
  }
  return Math.max(...took) / 1000;
}"""


@pytest.fixture(scope="module")
def small_server(browser: Browser, checkpoint_of: Callable[[str], Path]) -> Iterator[str]:
    """A small model that computes."""
    with real_server(f"--model-path={checkpoint_of('qwen3')}", "--dtype=float32") as running:
        yield running.url


def test_the_page_is_interactive_soon_after_the_answer(browser: Browser, server: str) -> None:
    """Scores of the fake backend cost nothing: what is tried is the page."""
    try_many_items(browser, server)


@pytest.mark.slow
def test_it_is_with_the_embedded_model(browser: Browser) -> None:
    with real_server() as server:
        try_many_items(browser, server.url)


def test_the_panels_hold_for_what_a_model_computes(browser: Browser, small_server: str) -> None:
    with visit(browser, small_server) as visited:
        page = visited.page
        fill_in(page)
        score(page)
        page.get_by_role("tab", name="Isolation").click()
        page.get_by_role("button", name="Change another item and score again").click()
        page.wait_for_selector("#moved")
        assert "moved by exactly 0;" in page.locator("#moved").inner_text()
        assert not page.locator("#moved").inner_text().endswith("by 0.")
        page.get_by_role("tab", name="How it ran").click()
        page.get_by_role("button", name="Run all three algorithms").click()
        page.wait_for_selector("text=Side by side")
        panel = page.locator("#panel-ran")
        assert panel.locator("h3").all_inner_texts() == ["prefill_extend", "packed", "serial"]
        differences = panel.locator("table").last.locator("tbody tr td:last-child").all_inner_texts()
        assert differences == ["0", "0", "0"]


def try_many_items(browser: Browser, origin: str) -> None:
    """Prints what it measures: pytest shows it with -s."""
    items = [f"item number {index}, with a few words" for index in range(NUM_ITEMS)]
    with visit(browser, origin) as visited:
        page = visited.page
        page.context.set_default_timeout(300_000)
        fill_in(page, [])
        paste(page, "text\tnumber\n" + "\n".join(f"{item}\t{index}" for index, item in enumerate(items)))
        assert page.locator("#item-count").inner_text().startswith("5,000 items")
        page.evaluate("performance.setResourceTimingBufferSize(1000)")
        page.get_by_role("button", name="Score", exact=True).click()
        seconds = page.evaluate(MEASURE)
        page.get_by_role("tab", name="Isolation").click()
        assert "of 5,000 items are drawn" in page.locator("#panel-isolation").inner_text()
        slowest = page.evaluate(SLOWEST_CHANGE)
        status = page.locator("#status").inner_text()
        print(f"{status}; interactive after {seconds:.2f} s; the slowest change of the list {slowest:.2f} s")
        assert page.locator("[role=option]").count() < 40
        page.locator("#list").focus()
        page.keyboard.press("End")
        assert page.locator("[role=option] .rank").last.inner_text() == str(NUM_ITEMS)
