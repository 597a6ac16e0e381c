"""5,000 items: the page is there again soon after the answer, and the document stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.page.browser import visit
from tests.page.test_playground import fill_in, paste
from tests.server.server_process import real_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NUM_ITEMS = 5000
SECONDS = 2.0

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


@pytest.fixture(scope="module")
def small_server(browser: Browser, checkpoint_of: Callable[[str], Path]) -> Iterator[str]:
    """A small model: what is measured is the page."""
    with real_server(f"--model-path={checkpoint_of('qwen3')}", "--dtype=float32") as running:
        yield running.url


def test_the_page_is_interactive_soon_after_the_answer(browser: Browser, small_server: str) -> None:
    items = [f"item number {index}, with a few words" for index in range(NUM_ITEMS)]
    with visit(browser, small_server) as visited:
        page = visited.page
        fill_in(page, [])
        paste(page, "text\tnumber\n" + "\n".join(f"{item}\t{index}" for index, item in enumerate(items)))
        assert page.locator("#item-count").inner_text().startswith("5,000 items")
        page.get_by_label("A label is", exact=True).select_option("sequence")
        page.evaluate("performance.setResourceTimingBufferSize(1000)")
        page.get_by_role("button", name="Score", exact=True).click()
        page.context.set_default_timeout(120_000)
        seconds = page.evaluate(MEASURE)
        assert seconds < SECONDS, f"{seconds:.2f} s"
        assert page.locator("[role=option]").count() < 40
        page.locator("#list").focus()
        page.keyboard.press("End")
        assert page.locator("[role=option] .rank").last.inner_text() == str(NUM_ITEMS)
        page.get_by_role("tab", name="Isolation").click()
        assert "of 5,000 items are drawn" in page.locator("#panel-isolation").inner_text()
