"""Takes the pictures of the page in docs/page (`make screenshots`): a server on the embedded model, and Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.server.server_process import real_server
from tests.web.browser import DESKTOP, PHONE, Scheme, open_browser, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = Path(__file__).parent / "page"
PICTURES: dict[str, tuple[tuple[int, int], Scheme, str]] = {
    "desktop": (DESKTOP, "light", "What the model saw"),
    "phone": (PHONE, "light", "What the model saw"),
    "dark": (DESKTOP, "dark", "Isolation"),
}


def take(browser: Browser, origin: str, name: str) -> None:
    """One picture: an example, scored, with one of the panels open."""
    size, scheme, tab = PICTURES[name]
    with visit(browser, origin, size=size, scheme=scheme) as visited:
        page = visited.page
        page.get_by_role("tab", name=tab).click()
        page.get_by_role("button", name="Is it food?").click()
        page.wait_for_selector("[role=tabpanel]:not([hidden]) :is(.chips, .picture)")
        if tab == "Isolation":
            page.get_by_role("button", name="Change another item").click()
            page.wait_for_selector("#moved")
        page.wait_for_selector("#live-items:text-matches('^[0-9]')")
        if (
            size != PHONE
        ):  # as high as what it shows; a phone shows what somebody with one sees, scrolled to the results
            height = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": size[0], "height": height})
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
