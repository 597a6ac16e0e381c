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


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), pytest.param(PHONE, "dark", marks=pytest.mark.slow)])
def test_every_operation_is_shown_and_found(open_page: OpenPage, size: tuple[int, int], scheme: Scheme) -> None:
    """The page is short, and its contents lead to every operation."""
    with open_page("/docs", size=size, scheme=scheme) as visit:  # fails at the end for any console error, policy
        page = visit.page  # violation or foreign request
        wait_for_operations(page)
        paths = [each.replace("\u200b", "") for each in page.locator(".opblock-summary-path").all_inner_texts()]
        assert sorted(paths) == sorted(operation.path for operation in OPERATIONS)
        groups = page.locator(".opblock-tag-section .opblock-tag").all()
        assert [group.get_attribute("data-tag") for group in groups] == list(TAGS)
        assert page.evaluate("document.documentElement.classList.contains('dark-mode')") is (scheme == "dark")
        assert not visit.scrolls_sideways()
        page.locator("#operation-list a").nth(len(OPERATIONS) - 1).wait_for(state="attached")
        assert page.evaluate("document.documentElement.scrollHeight") < 150 * len(OPERATIONS)  # one or two lines each
        targets = page.locator("#operation-list a").evaluate_all("links => links.map((link) => link.hash.slice(1))")
        assert sorted(targets) == sorted(page.locator(".opblock").evaluate_all("blocks => blocks.map(({id}) => id)"))
        if size == PHONE:
            page.locator("#contents summary").click()
        page.get_by_role("link", name="GET /metrics").click()
        block = page.locator("#operations-Server-get_metrics")
        block.locator(".opblock-body").wait_for()
        assert visit.is_in_sight("#operations-Server-get_metrics .opblock-summary")
        assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
        if size == DESKTOP:
            operation = page.locator("#operations-Score-post_v1_score")
            operation.locator(".opblock-summary-control").click()
            operation.get_by_role("button", name="Try it out").click()
            operation.get_by_role("button", name="Execute").click()
            operation.locator(".live-responses-table .response-col_status", has_text="200").wait_for()
