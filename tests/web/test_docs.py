"""Swagger UI on `/docs`: it shows every operation, under the page's security policy, and asks no other host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from prefixwise.server.openapi_operations import OPERATIONS, TAGS
from tests.web.browser import DESKTOP, PHONE, Scheme
from tests.web.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page


def wait_for_operations(page: Page) -> None:
    page.locator(".opblock").nth(len(OPERATIONS) - 1).wait_for()


def test_every_operation_is_shown(open_page: OpenPage) -> None:
    with open_page("/docs") as visit:  # fails at the end for any console error, policy violation or foreign request
        wait_for_operations(visit.page)
        paths = [each.replace("\u200b", "") for each in visit.page.locator(".opblock-summary-path").all_inner_texts()]
        assert sorted(paths) == sorted(operation.path for operation in OPERATIONS)
        groups = visit.page.locator(".opblock-tag-section .opblock-tag").all()
        assert [group.get_attribute("data-tag") for group in groups] == list(TAGS)
        visit.page.locator("#operations-Score-post_v1_score .opblock-summary-control").click()
        visit.page.get_by_role("button", name="Try it out").click()
        visit.page.get_by_role("button", name="Execute").click()
        visit.page.locator(".live-responses-table .response-col_status", has_text="200").wait_for()


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_it_follows_the_color_scheme_and_fits_a_phone(open_page: OpenPage, scheme: Scheme, is_dark: bool) -> None:
    with open_page("/docs", size=PHONE, scheme=scheme) as visit:
        wait_for_operations(visit.page)
        assert visit.page.evaluate("document.documentElement.classList.contains('dark-mode')") is is_dark
        assert not visit.scrolls_sideways()


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_is_short_and_its_contents_lead_to_every_operation(open_page: OpenPage, size: tuple[int, int]) -> None:
    with open_page("/docs", size=size) as visit:
        page = visit.page
        wait_for_operations(page)
        page.locator("#operation-list a").nth(len(OPERATIONS) - 1).wait_for(state="attached")
        assert page.evaluate("document.documentElement.scrollHeight") < 150 * len(OPERATIONS)  # one or two lines each
        targets = page.locator("#operation-list a").evaluate_all("links => links.map((link) => link.hash.slice(1))")
        assert sorted(targets) == sorted(block.get_attribute("id") or "" for block in page.locator(".opblock").all())
        if size == PHONE:
            page.locator("#contents summary").click()
        page.get_by_role("link", name="GET /metrics").click()
        block = page.locator("#operations-Server-get_metrics")
        block.locator(".opblock-body").wait_for()
        assert visit.is_in_sight("#operations-Server-get_metrics .opblock-summary")
        assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
