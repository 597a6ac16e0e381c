"""The playground in a browser, on a real server: from the form to the ranked list."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.server_process import real_server
from tests.web.acts import ITEMS, LABELS, drop, fill_in, lines, paste, rows, score
from tests.web.browser import DESKTOP, PHONE, Scheme, Visit, visit
from tests.web.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

KEY = "the-key-of-this-test"
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


def scrolls_sideways(visited: Visit) -> bool:
    """In either scheme."""
    found = []
    for scheme in SCHEMES:
        visited.page.emulate_media(color_scheme=scheme)
        found.append(visited.scrolls_sideways())
    return any(found)


class TestScoring:
    @pytest.mark.parametrize("size", [PHONE, pytest.param(DESKTOP, marks=pytest.mark.slow)])
    def test_an_example_and_all_that_is_told_about_it(self, open_page: OpenPage, size: tuple[int, int]) -> None:
        """From one click on, in every look; what each panel says is the other tests' matter."""
        with open_page(size=size) as visited:
            page = visited.page
            assert page.locator("#nothing").is_visible()
            assert page.get_by_role("button", name="CSV", exact=True).is_disabled()
            page.get_by_role("button", name="Mood of reviews").click()
            page.wait_for_selector("[role=option]")
            assert visited.is_in_sight("#results-heading")
            assert page.locator("[role=option]").first.get_attribute("aria-setsize") == "8"
            assert "positive" in page.locator("[role=option] .values").first.inner_text()
            page.get_by_label("Filter", exact=True).fill("battery")
            page.locator("[role=option]").click()
            page.wait_for_selector(".chips li:text-is('·battery')")
            assert not scrolls_sideways(visited)
            page.get_by_role("tab", name="Isolation").click()
            page.get_by_role("button", name="Change another item and score again").click()
            assert "moved by exactly 0;" in page.locator("#moved").inner_text()
            assert not scrolls_sideways(visited)
            page.get_by_role("tab", name="How it ran").click()
            page.get_by_role("button", name="Run all three algorithms").click()
            page.wait_for_selector("text=Side by side")
            assert not scrolls_sideways(visited)
            page.get_by_role("tab", name="Copy").click()
            page.get_by_role("button", name="Copy as Python").click()
            assert "from urllib.request" in page.locator("#panel-copy pre").inner_text()
            assert not scrolls_sideways(visited)

    def test_it_ranks_sorts_and_filters(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            score(page)
            best_first = rows(page)
            assert sorted(best_first) == sorted(ITEMS)
            page.get_by_label("Sort by", exact=True).select_option("0-up")
            assert rows(page) == best_first[::-1]
            page.get_by_label("Sort by", exact=True).select_option("order")
            assert rows(page) == ITEMS
            page.get_by_label("Filter", exact=True).fill("BREAD")
            assert rows(page) == ["freshly baked bread"]
            page.get_by_label("Filter", exact=True).fill("no such item")
            assert page.locator("#no-match").is_visible()
            assert not page.locator("#list").is_visible()

    def test_it_scores_while_one_types(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            page.get_by_label("Query", exact=True).fill("Is this food? ")
            page.get_by_label("Items", exact=True).fill("bread")
            page.get_by_label("Labels", exact=True).fill(LABELS)
            page.wait_for_selector("[role=option]")
            assert rows(page) == ["bread"]

    def test_what_is_asked_for_while_one_types_is_asked_once(self, browser: Browser, server: str) -> None:
        """The pause after the last key would else ask the same again, and its answer draw all panels anew."""
        asked: list[Any] = []
        with visit(browser, server) as visited:
            page = visited.page
            page.clock.install()
            page.reload()
            page.on("request", lambda request: asked.append(request.post_data_json) if request.post_data else None)
            page.get_by_label("Query", exact=True).fill("Is this food? ")
            page.get_by_label("Items", exact=True).fill("bread\nlaw")
            page.get_by_label("Labels", exact=True).fill(LABELS)
            page.keyboard.press("Control+Enter")
            page.wait_for_selector("[role=option]")
            page.clock.run_for(1000)  # twice the pause
            page.evaluate("fetch('/health')")  # what was asked before this is known now
        assert [body["items"] for body in asked].count(["bread", "law"]) == 1

    def test_a_profile_reranks(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            page.get_by_role("button", name="Rerank passages").click()
            page.wait_for_selector("[role=option]")
            assert page.locator("[role=option] .values").first.inner_text().startswith("relevance")
            with page.expect_request(lambda request: '"profile":"chat-yes-no"' in (request.post_data or "")):
                page.get_by_label("Profile", exact=True).select_option("chat-yes-no")
            with page.expect_request(lambda request: '"instruction":"Rivers?"' in (request.post_data or "")):
                page.get_by_label("Instruction", exact=True).fill("Rivers?")

    def test_every_choice_reaches_the_server(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            page.get_by_label("Score mode", exact=True).select_option("logprob")
            page.get_by_label("A label is", exact=True).select_option("single")
            page.get_by_label("Algorithm", exact=True).select_option("serial")
            page.get_by_label("Item before the query", exact=True).check()
            with page.expect_request("**/v1/score") as sent:
                score(page)
            body: Any = sent.value.post_data_json
            assert (body["score_mode"], body["label_scoring"]) == ("logprob", "single")
            assert (body["algorithm"], body["item_first"]) == ("serial", True)
            assert (body["labels"], body["suffix"]) == ([" yes", " no"], "\nAnswer:")

    def test_results_are_downloaded(self, open_page: OpenPage, tmp_path: Path) -> None:
        tricky = ['"quoted", with a comma', "=1+1", "plain"]
        with open_page() as visited:
            page = visited.page
            fill_in(page, tricky)
            score(page)
            for kind in ("CSV", "JSON"):
                with page.expect_download() as download:
                    page.get_by_role("button", name=kind, exact=True).click()
                download.value.save_as(tmp_path / kind)
        with (tmp_path / "CSV").open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
        assert {row["item"] for row in table} == {tricky[0], "'=1+1", "plain"}
        results = json.loads((tmp_path / "JSON").read_text(encoding="utf-8"))["results"]
        assert [row["item"] for row in sorted(results, key=lambda row: row["index"])] == tricky
        assert set(results[0]["scores"]) == {" yes", " no"}


class TestItems:
    def test_cells_of_a_spreadsheet_are_pasted(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            page.get_by_label("Score as I type", exact=True).uncheck()
            paste(page, 'id\ttitle\n1\tfirst\n2\t"two\nlines"\n')
            assert lines(page) == ["first", "two⏎lines"]
            page.get_by_label("Column", exact=True).select_option(label="id")
            assert lines(page) == ["1", "2"]

    @pytest.mark.parametrize(
        ("name", "text", "expected"),
        [
            ("a.csv", 'id,text\n1,"one, two"\n2,"say ""hi"""\n', ["one, two", 'say "hi"']),
            ("a.tsv", "text\tn\nalpha\t1\nbeta\t2\n", ["alpha", "beta"]),
            ("a.jsonl", '{"id": 1, "text": "x"}\n{"id": 2, "text": "y\\nz"}\n', ["x", "y⏎z"]),
            ("a.json", '["p", "q"]', ["p", "q"]),
            ("a.json", '{"documents": [{"text": "p"}, "q"]}', ["p", "q"]),
            ("a.txt", "one\r\ntwo, with a comma\n\n", ["one", "two, with a comma"]),
        ],
    )
    def test_files_are_dropped(self, open_page: OpenPage, name: str, text: str, expected: list[str]) -> None:
        with open_page() as visited:
            page = visited.page
            page.get_by_label("Score as I type", exact=True).uncheck()
            drop(page, "#items", name, text)
            page.wait_for_selector("#item-count:has-text('2 items')")
            assert lines(page) == expected

    def test_a_file_that_cannot_be_read_is_said_so_there(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            drop(visited.page, "#items", "a.json", "{")
            visited.page.wait_for_selector("#items-error:not(:empty)")
            assert "a.json cannot be read" in visited.page.locator("#items-error").inner_text()


class TestStateAndErrors:
    def test_a_link_reproduces_the_page(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            page.get_by_label("Score mode", exact=True).select_option("logprob")
            score(page)
            page.get_by_label("Sort by", exact=True).select_option("order")
            page.get_by_role("tab", name="How it ran").click()
            before = rows(page), page.locator("[role=option] .values").all_inner_texts()
            link = page.url[len(visited.origin) :]
        with open_page(path=link) as visited:
            page = visited.page
            page.wait_for_selector("[role=option]")
            assert (rows(page), page.locator("[role=option] .values").all_inner_texts()) == before
            assert page.get_by_role("tab", name="How it ran").get_attribute("aria-selected") == "true"
            assert page.get_by_label("Sort by", exact=True).input_value() == "order"

    def test_a_server_that_is_not_ready_is_asked_again(self, browser: Browser, server: str) -> None:
        answers = [{"model": None, "status": "starting"}]
        with visit(browser, server) as visited:
            page = visited.page
            page.route(
                "**/server_info", lambda route: route.fulfill(json=answers.pop()) if answers else route.continue_()
            )
            page.reload()
            page.wait_for_selector("text=The server is starting.")
            page.wait_for_selector("#served:has-text('SmolLM2')")

    @pytest.mark.parametrize(
        ("change", "place"),
        [
            (("Query", ""), "query-error"),
            (("Items", ""), "items-error"),
            (("Labels", ""), "labels-error"),
        ],
    )
    def test_an_error_stands_beside_its_field(self, open_page: OpenPage, change: tuple[str, str], place: str) -> None:
        with open_page(size=PHONE) as visited:
            visited.refused = {400}
            page = visited.page
            fill_in(page)
            page.get_by_label(change[0], exact=True).fill(change[1])
            score(page)
            assert page.locator(f"#{place}").inner_text() != ""
            assert visited.is_in_sight(f"#{place}")
            assert page.locator("#status").inner_text() == "Not scored: see the error in the form."
            assert page.get_by_label(change[0], exact=True).get_attribute("aria-invalid") == "true"

    def test_a_mode_that_the_labels_do_not_fit_is_the_labels_fault(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            visited.refused = {400}
            page = visited.page
            fill_in(page, labels=" yes\n no\n maybe")
            page.get_by_label("Score mode", exact=True).select_option("logit_diff")
            score(page)
            assert "takes 2 labels, got 3" in page.locator("#labels-error").inner_text()

    @pytest.mark.parametrize("text", ["<script>document.title='owned'</script>", "<img src=x onerror=alert(1)>"])
    def test_html_in_an_item_or_a_label_stays_text(self, open_page: OpenPage, text: str) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page, [text, "plain"], labels=f" {text}\n no", query=f"{text} ")
            score(page)
            assert text in rows(page)
            page.wait_for_selector(".chips")
            for tab in ("Isolation", "How it ran", "Copy"):
                page.get_by_role("tab", name=tab).click()
            assert page.title() == "prefixwise playground"
            assert page.locator("main img, main script").count() == 0

    def test_the_key_is_asked_for_and_stays_in_memory(self, browser: Browser) -> None:
        with real_server("--backend=fake", f"--api-key={KEY}") as server, visit(browser, server.url) as visited:
            visited.refused = {401}
            page = visited.page
            page.clock.install()
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/metrics") else None)
            with page.expect_response("**/metrics") as refused:
                page.reload()
            assert refused.value.status == 401
            page.wait_for_selector("text=This server requires an API key.")
            page.clock.run_for(5000)
            assert len(asked) == 1, "the strip goes on asking without a key"
            page.clock.resume()
            fill_in(page)
            score(page)
            assert "API key" in page.locator("#key-error").inner_text()
            field = page.get_by_label("API key", exact=True)
            held: list[Route] = []
            page.route("**/metrics", lambda route: held.append(route), times=1)
            with page.expect_request("**/metrics"):
                field.fill("a wrong key")
                field.press("Tab")
            field.fill(KEY)
            field.press("Tab")
            held[0].continue_()  # refused when the next key has been entered
            page.wait_for_selector("[role=option]")
            page.wait_for_selector("#live-running:text-matches('[0-9]')")
            kept = page.evaluate("[location.href, JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
            page.get_by_role("tab", name="Copy").click()
            assert not any(KEY in text for text in [*kept, page.content(), page.locator("#panel-copy").inner_text()])
            assert page.context.cookies() == []
            page.get_by_role("link", name="API", exact=True).click()
            page.locator("#operations-Score-post_v1_score").wait_for()
            assert page.locator("a[href$='openapi.json']").first.is_visible()
