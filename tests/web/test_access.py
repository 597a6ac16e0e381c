"""Can everybody use it? axe-core looks at every panel, on a dark phone and on a light desk.

The page and its reports differ in nothing but colors between light and dark: all rules are tried at both sizes, and
those on colors in both schemes. The other two looks are slow, and have the rules on colors alone.
"""

from __future__ import annotations

import pytest

from tests.web.browser import AXE, DESKTOP, PHONE, Scheme
from tests.web.conftest import OpenPage

# A tab, and the button that fills its panel, if it needs one.
PANELS = (
    ("What the model saw", None),
    ("Distribution", None),
    ("Threshold", "Use "),
    ("Isolation", "Change another"),
    ("How it ran", "Run all three"),
    ("Copy", "Copy as JSON"),
)

EVERY_LOOK = pytest.mark.parametrize(
    ("size", "scheme", "of_colors"),
    [
        (PHONE, "dark", False),
        (DESKTOP, "light", False),
        pytest.param(PHONE, "light", True, marks=pytest.mark.slow),
        pytest.param(DESKTOP, "dark", True, marks=pytest.mark.slow),
    ],
)

pytestmark = pytest.mark.skipif(not AXE.is_file(), reason=f"ACCESSIBILITY IS NOT TESTED: no axe-core at {AXE}")


@EVERY_LOOK
def test_no_panel_has_a_fault(open_page: OpenPage, size: tuple[int, int], scheme: Scheme, of_colors: bool) -> None:
    with open_page(size=size, scheme=scheme) as visited:
        page = visited.page
        assert visited.faults(of_colors=of_colors) == []
        page.get_by_role("button", name="Two prompts").click()
        page.wait_for_selector("#compared")
        assert visited.faults(of_colors=of_colors) == []
        for tab, button in PANELS:
            page.get_by_role("tab", name=tab).click()
            if button:
                page.get_by_role("button", name=button).click()
            page.wait_for_selector("[role=tabpanel]:not([hidden], [aria-busy]) :is(table, pre, .chips)")
            assert visited.faults(of_colors=of_colors) == [], tab


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")])
def test_a_judge_has_no_fault(open_page: OpenPage, size: tuple[int, int], scheme: Scheme) -> None:
    with open_page(size=size, scheme=scheme) as visited:
        visited.page.get_by_role("button", name="Judge replies").click()
        visited.page.wait_for_selector("#panel-distribution table")
        assert visited.faults() == []


@EVERY_LOOK
def test_no_report_has_a_fault(open_page: OpenPage, size: tuple[int, int], scheme: Scheme, of_colors: bool) -> None:
    with open_page(path="/reports", size=size, scheme=scheme) as visited:
        visited.page.get_by_role("link", name="comparison.json").click()
        visited.page.frame_locator("#report").locator("h1").wait_for()
        assert visited.faults(of_colors=of_colors) == []


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")])
def test_the_api_has_no_fault(open_page: OpenPage, size: tuple[int, int], scheme: Scheme) -> None:
    with open_page(path="/docs", size=size, scheme=scheme) as visited:
        visited.page.locator(".opblock").last.wait_for()
        assert visited.faults() == []
        assert not visited.scrolls_sideways()
