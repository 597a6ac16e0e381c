"""The panels about an answer, the live strip, and the keyboard, in a browser on a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.web.acts import fill_in, rows, score, tab_to
from tests.web.browser import visit
from tests.web.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route


class TestPanels:
    def test_what_the_model_saw(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            score(page)
            page.wait_for_selector(".chips")
            page.locator("[role=option]", has_text="income taxes").click()
            page.wait_for_selector(".chips li:text-is('·taxes')")
            prefix = page.locator(".chips .prefix").all_inner_texts()
            assert "".join(prefix).replace("·", " ") == "Is this food? Text: "
            assert page.locator(".chips .scored").count() == 1
            assert page.locator("#panel-saw tbody tr").count() == 12
            assert "exactly the scores that it has in the list" in page.locator("#panel-saw").inner_text()

    @pytest.mark.parametrize("algorithm", ["serial", "packed", "prefill_extend"])
    def test_isolation(self, open_page: OpenPage, algorithm: str) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            page.get_by_label("Algorithm", exact=True).select_option(algorithm)
            score(page)
            page.get_by_role("tab", name="Isolation").click()
            assert page.locator(".picture .chosen-item").count() >= 1
            assert page.locator(".picture path.prefix").count() == (3 if algorithm == "serial" else 1)
            page.get_by_role("button", name="Change another item and score again").click()
            assert "moved by exactly 0;" in page.locator("#moved").inner_text()
            assert not page.locator("#moved").inner_text().endswith("by 0.")

    def test_how_it_ran(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            score(page)
            page.get_by_role("tab", name="How it ran").click()
            panel = page.locator("#panel-ran")
            for word in ("tokenize", "queue", "prefill", "extend", "host", "1 batch;", "prefix cache hit"):
                assert word in panel.inner_text()
            page.get_by_role("button", name="Run all three algorithms").click()
            page.wait_for_selector("text=Side by side")
            assert panel.locator("h3").all_inner_texts() == ["prefill_extend", "packed", "serial"]
            differences = panel.locator("table").last.locator("tbody tr td:last-child").all_inner_texts()
            assert differences == ["0", "0", "0"]

    def test_the_request_is_copied_and_means_the_same_elsewhere(self, browser: Browser, server: str) -> None:
        quotes = ['it\'s "quoted"', "back\\slash"]
        with visit(browser, server) as visited:
            page = visited.page
            page.context.grant_permissions(["clipboard-read", "clipboard-write"])
            fill_in(page, quotes)
            page.get_by_label("Algorithm", exact=True).select_option("serial")
            score(page)
            page.get_by_role("tab", name="Copy").click()
            copied = {}
            for name in ("curl", "Python", "JSON"):
                page.get_by_role("button", name=f"Copy as {name}").click()
                page.wait_for_selector(f"text=Copied as {name}.")
                copied[name] = page.evaluate("navigator.clipboard.readText()")
            assert json.loads(copied["JSON"])["items"] == quotes
            answers = [
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
                for command in (["bash", "-c", copied["curl"]], [sys.executable, "-c", copied["Python"]])
            ]
            assert json.loads(answers[0])["scores"] == json.loads(answers[1])["scores"]

    def test_the_live_strip_follows_the_server(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            score(page)
            page.wait_for_selector("#live-items:text-matches('^[1-9]')")
            assert page.locator("#live-waiting").inner_text() == "0"
            assert page.locator("#live-hits").inner_text() != ""

    def test_the_live_strip_asks_only_while_somebody_looks(self, browser: Browser, server: str) -> None:
        with visit(browser, server) as visited:
            page = visited.page
            page.clock.install()
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/metrics") else None)

            def goes_on_asking() -> bool:
                """Each question comes when the one before is answered."""
                for _ in range(3):
                    with page.expect_request("**/metrics"):
                        page.clock.run_for(1000)
                return True

            def asked_within_5_seconds() -> int:
                asked.clear()
                page.clock.run_for(5000)
                return len(asked)

            def look(state: str) -> None:
                page.evaluate(
                    """(state) => {
                      Object.defineProperty(document, "visibilityState", {value: state, configurable: true});
                      document.dispatchEvent(new Event("visibilitychange"));
                    }""",
                    state,
                )

            page.reload()
            page.wait_for_selector("#live-running:text-is('0')")
            assert goes_on_asking()
            look("hidden")
            assert asked_within_5_seconds() == 0
            with page.expect_request("**/metrics"):
                look("visible")
            assert goes_on_asking()
            held: list[Route] = []
            page.route("**/metrics", lambda route: held.append(route))
            with page.expect_request("**/metrics"):
                page.clock.run_for(1000)
            assert asked_within_5_seconds() == 0, "a slow server is asked once at a time"
            page.evaluate("AbortSignal.timeout = ((real) => () => real(1))(AbortSignal.timeout.bind(AbortSignal))")
            held[-1].continue_()
            assert goes_on_asking(), "an answer that does not come is given up"

    def test_a_panel_says_where_its_question_failed(self, browser: Browser, server: str) -> None:
        with visit(browser, server) as visited:
            visited.refused = {503}
            page = visited.page
            fill_in(page)
            score(page)
            page.get_by_role("tab", name="Isolation").click()
            page.route("**/v1/score", lambda route: route.fulfill(status=503, json={"error": {"message": "too busy"}}))
            page.get_by_role("button", name="Change another item and score again").click()
            page.wait_for_selector("#panel-isolation .error:text-is('too busy')")
            assert "Scoring again" not in page.locator("#panel-isolation").inner_text()


class TestKeyboard:
    def test_all_of_it_goes_without_a_mouse(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page, keys = visited.page, visited.page.keyboard
            tab_to(page, "query")
            keys.type("Is this food? Text: ")
            tab_to(page, "items")
            keys.type("bread\nlaw\nsoup")
            tab_to(page, "labels")
            keys.type(" yes\n no")
            keys.press("Control+Enter")
            page.wait_for_selector("[role=option]")
            chosen, shown = page.locator("[role=option][aria-selected=true] .text"), rows(page)
            tab_to(page, "list")
            keys.press("End")
            assert chosen.inner_text() == shown[-1]
            keys.press("ArrowUp")
            assert chosen.inner_text() == shown[-2]
            tab_to(page, "tab-saw")
            keys.press("ArrowLeft")
            assert page.locator("#panel-copy").is_visible()
            for _ in range(2):
                keys.press("ArrowLeft")
            assert page.locator("#panel-isolation").is_visible()
            tab_to(page, "perturb")
            keys.press("Space")
            assert "moved by exactly 0;" in page.locator("#moved").inner_text()

    def test_the_skip_link_leads_to_the_results_and_leaves_the_form_alone(self, open_page: OpenPage) -> None:
        with open_page(path="/#query=kept&sort=order") as visited:
            page = visited.page
            page.wait_for_selector("#query")
            page.keyboard.press("Tab")
            assert visited.is_in_sight(".skip")
            page.keyboard.press("Enter")
            assert page.evaluate("document.activeElement.id") == "results-heading"
            assert page.get_by_label("Query", exact=True).input_value() == "kept"
            assert "sort=order" in page.url
