"""Takes the pictures of the page in docs/page (`make screenshots`): a server on the embedded model, and Chromium."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.server.server_process import real_server
from tests.web.browser import DESKTOP, PHONE, Scheme, open_browser, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Picture:
    """An example, scored, with one of the panels open."""

    size: tuple[int, int]
    scheme: Scheme
    example: str
    tab: str
    shown: str  # a selector of what the panel shows in the end
    button: str | None = None  # pressed before


PICTURES = {
    "desktop": Picture(DESKTOP, "light", "Mood of reviews", "What the model saw", ".chips"),
    "phone": Picture(PHONE, "light", "Topic of headlines", "What the model saw", ".chips"),
    "dark": Picture(DESKTOP, "dark", "Mood of reviews", "Isolation", "#moved", "Change another item"),
    "threshold": Picture(DESKTOP, "light", "Mood of reviews", "Threshold", "table"),
    "distribution": Picture(DESKTOP, "light", "Judge replies", "Distribution", "#judged"),
    "compare": Picture(DESKTOP, "light", "Two prompts", "Compare", "#compared"),
    "compare-phone": Picture(PHONE, "light", "Two prompts", "Compare", "#compared"),
}


def take(browser: Browser, origin: str, name: str) -> None:
    """Desktop pictures are as high as the page; those of a phone show what fits its screen, from the results on."""
    picture = PICTURES[name]
    with visit(browser, origin, size=picture.size, scheme=picture.scheme) as visited:
        page = visited.page
        page.get_by_role("button", name="Got it").click()
        page.get_by_role("tab", name=picture.tab).click()
        page.get_by_role("button", name=picture.example).click()
        page.wait_for_selector("[role=option]")
        if picture.button:
            page.get_by_role("button", name=picture.button).click()
        page.wait_for_selector(f"[role=tabpanel]:not([hidden]) {picture.shown}")
        page.wait_for_selector("#live-items:text-matches('^[0-9]')")
        if picture.size == PHONE:
            heading = "#comparison" if picture.tab == "Compare" else "#results-heading"
            page.locator(heading).evaluate("each => each.scrollIntoView({block: 'start', behavior: 'instant'})")
        else:
            height = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": picture.size[0], "height": height})
        page.screenshot(path=FOLDER / f"{name}.png", animations="disabled")


def main() -> None:
    """All of them."""
    FOLDER.mkdir(exist_ok=True)
    with real_server() as server, open_browser() as browser:
        for name in PICTURES:
            take(browser, server.url, name)
            print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
