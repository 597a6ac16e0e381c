"""Chromium on the page: opens it at a width and in a scheme, and remembers whatever must not happen there."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request

Scheme = Literal["light", "dark"]
# Debian's shell for tests is the same engine without a browser's windows, and takes half the CPU time.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
PHONE, DESKTOP = (390, 844), (1400, 1000)
EMPTY_FORM = "/#query="  # without a hash the playground opens with an example
_NPM_FOLDER = Path(__file__).parents[2] / ".venv" / "npm"
AXE = Path(os.environ.get("PREFIXWISE_AXE", _NPM_FOLDER / "node_modules" / "axe-core" / "axe.min.js"))


def why_no_browser() -> str | None:
    """Why the page cannot be tried here; None where it can."""
    if CHROMIUM is None:
        return "neither chromium-headless-shell nor chromium on the PATH"
    if importlib.util.find_spec("playwright") is None:
        return "the package playwright is not installed"
    return None


@contextmanager
def open_browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """One page, and what went wrong on it."""

    page: Page
    origin: str
    problems: list[str] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)  # statuses that the test provokes

    @contextmanager
    def watched(self, path: str) -> Iterator[Visit]:
        """From the first request on; in the end nothing may have gone wrong."""
        self.page.on("console", self._on_console)
        self.page.on("pageerror", self._on_error)
        self.page.on("request", self._on_request)
        self.page.goto(self.origin + path)
        yield self
        self.page.remove_listener("console", self._on_console)
        self.page.remove_listener("pageerror", self._on_error)
        self.page.remove_listener("request", self._on_request)
        assert self.problems == []

    def _on_error(self, error: Error) -> None:
        self.problems.append(f"error: {error}")

    def _on_console(self, message: ConsoleMessage) -> None:
        is_provoked = any(f"status of {status}" in message.text for status in self.refused)
        if message.type in ("error", "warning") and not is_provoked:
            self.problems.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.origin, "blob:", "data:", "about:")):
            self.problems.append(f"a request left the origin: {request.url}")

    def is_in_sight(self, selector: str) -> bool:
        """Does the whole of it stand where somebody looks, now or when the page has stopped to scroll?"""
        whole = "([found]) => { if (found.isIntersecting) done(true); }"
        return bool(
            self.page.locator(selector).evaluate(
                f"""(each) => new Promise((done) => {{
                  new IntersectionObserver({whole}, {{threshold: 1}}).observe(each);
                  setTimeout(() => done(false), 3000);
                }})"""
            )
        )

    def scrolls_sideways(self) -> bool:
        """No page should."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))

    def faults(self, *, of_colors: bool = False) -> list[str]:
        """What axe-core finds wrong on the page as it is; `of_colors`: by its rules on colors alone. Both
        leave out what it does not ask for by default: contrasts of level AAA, as `runOnly` would add."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
        rules = (
            {"runOnly": ["cat.color"], "rules": {"color-contrast-enhanced": {"enabled": False}}} if of_colors else {}
        )
        found = self.page.evaluate("options => axe.run(options)", {"resultTypes": ["violations"], **rules})
        return [f"{each['id']}: {[node['html'][:200] for node in each['nodes']]}" for each in found["violations"]]


def new_tab(browser: Browser, size: tuple[int, int] = DESKTOP, scheme: Scheme = "light") -> Page:
    """One that shares nothing with others."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, accept_downloads=True
    )
    context.set_default_timeout(30_000)
    return context.new_page()


@contextmanager
def visit(
    browser: Browser, origin: str, path: str = EMPTY_FORM, size: tuple[int, int] = DESKTOP, scheme: Scheme = "light"
) -> Iterator[Visit]:
    """The page of a server in a tab of its own; in the end nothing may have gone wrong."""
    page = new_tab(browser, size, scheme)
    with Visit(page, origin).watched(path) as made:
        yield made
        page.context.close()


class Tab:
    """One for many visits, each of which loads the page anew: to make a tab takes longer than all that follows.

    For visits that leave clock, routes and listeners as they are.
    """

    def __init__(self, browser: Browser, origin: str) -> None:
        self._browser = browser
        self._origin = origin
        self._page: Page | None = None

    @contextmanager
    def visit(
        self, path: str = EMPTY_FORM, size: tuple[int, int] = DESKTOP, scheme: Scheme = "light"
    ) -> Iterator[Visit]:
        """As `visit`."""
        page, self._page = self._page or new_tab(self._browser), None  # one whose visit has failed is not used again
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme)
        with Visit(page, self._origin).watched(path) as made:
            yield made
        page.goto("about:blank")  # else a visit whose address differs in the hash would load nothing
        self._page = page
