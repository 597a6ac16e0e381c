"""The playground in a browser, on a real server with the embedded model: everything that one can click."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.browser import DESKTOP, PHONE, Scheme, visit
from tests.page.conftest import OpenPage
from tests.server.server_process import real_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ITEMS = ["a pizza with mushrooms", "the law of income taxes", "freshly baked bread"]
LABELS = " yes\n no"
KEY = "the-key-of-this-test"


def fill_in(page: Page, items: list[str] = ITEMS, labels: str = LABELS, query: str = "Is this food? Text: ") -> None:
    page.get_by_label("Score as I type", exact=True).uncheck()
    page.get_by_label("Query", exact=True).fill(query)
    page.get_by_label("Items", exact=True).fill("\n".join(items))
    page.get_by_label("Labels", exact=True).fill(labels)
    page.get_by_label("Text after every item", exact=True).fill("\nAnswer:")


def score(page: Page) -> None:
    page.get_by_role("button", name="Score", exact=True).click()
    page.wait_for_selector("#list:not([aria-busy])", state="attached")


def rows(page: Page) -> list[str]:
    return page.locator("[role=option] .text").all_inner_texts()


def paste(page: Page, text: str) -> None:
    page.get_by_label("Items", exact=True).evaluate(
        """(field, text) => {
          const data = new DataTransfer();
          data.setData("text/plain", text);
          field.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
        }""",
        text,
    )


def drop(page: Page, selector: str, name: str, text: str) -> None:
    page.locator(selector).evaluate(
        """(target, {name, text}) => {
          const data = new DataTransfer();
          data.items.add(new File([text], name));
          target.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
        }""",
        {"name": name, "text": text},
    )


def lines(page: Page) -> list[str]:
    return page.get_by_label("Items", exact=True).input_value().split("\n")


class TestScoring:
    @pytest.mark.parametrize("size", [PHONE, DESKTOP])
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_a_click_on_an_example_scores_it(self, open_page: OpenPage, size: tuple[int, int], scheme: Scheme) -> None:
        with open_page(size=size, scheme=scheme) as visited:
            page = visited.page
            page.get_by_role("button", name="Is it food?").click()
            page.wait_for_selector("[role=option]")
            assert len(rows(page)) == 5
            assert "yes" in page.locator("[role=option] .values").first.inner_text()
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

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

    def test_it_scores_while_one_types(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            page.get_by_label("Query", exact=True).fill("Is this food? ")
            page.get_by_label("Items", exact=True).fill("bread")
            page.get_by_label("Labels", exact=True).fill(LABELS)
            page.wait_for_selector("[role=option]")
            assert rows(page) == ["bread"]

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
            page.get_by_label("The item stands before the query", exact=True).check()
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
            for word in ("tokenize", "queue", "prefill", "extend", "host", "1 batch;", "found in the cache"):
                assert word in panel.inner_text()
            page.get_by_role("button", name="Run all three algorithms").click()
            page.wait_for_selector("text=Side by side")
            assert panel.locator("h3").all_inner_texts() == ["prefill_extend", "packed", "serial"]
            differences = panel.locator("table").last.locator("tbody tr td:last-child").all_inner_texts()
            assert differences == ["0", "0", "0"]

    def test_the_request_is_copied_and_means_the_same_elsewhere(self, open_page: OpenPage) -> None:
        quotes = ['it\'s "quoted"', "back\\slash"]
        with open_page() as visited:
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

    @pytest.mark.parametrize(
        ("change", "place"),
        [
            (("Query", ""), "query-error"),
            (("Items", ""), "items-error"),
            (("Labels", ""), "labels-error"),
        ],
    )
    def test_an_error_stands_beside_its_field(self, open_page: OpenPage, change: tuple[str, str], place: str) -> None:
        with open_page() as visited:
            visited.refused = {400}
            page = visited.page
            fill_in(page)
            page.get_by_label(change[0], exact=True).fill(change[1])
            score(page)
            assert page.locator(f"#{place}").inner_text() != ""
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
            assert page.title() == "itemwise playground"
            assert page.locator("main img, main script").count() == 0

    def test_the_key_is_asked_for_and_stays_in_memory(self, browser: Browser) -> None:
        with real_server(f"--api-key={KEY}") as server, visit(browser, server.url) as visited:
            visited.refused = {401}
            page = visited.page
            page.wait_for_selector("text=This server asks for an API key.")
            fill_in(page)
            score(page)
            assert "API key" in page.locator("#key-error").inner_text()
            page.get_by_label("API key", exact=True).fill(KEY)
            page.get_by_label("API key", exact=True).press("Tab")
            page.wait_for_selector("[role=option]")
            kept = page.evaluate("[location.href, JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
            page.get_by_role("tab", name="Copy").click()
            assert not any(KEY in text for text in [*kept, page.content(), page.locator("#panel-copy").inner_text()])
            assert page.context.cookies() == []


class TestKeyboard:
    def test_the_list_and_the_tabs_are_walked_with_keys(self, open_page: OpenPage) -> None:
        with open_page() as visited:
            page = visited.page
            fill_in(page)
            page.get_by_label("Query", exact=True).press("Control+Enter")
            page.wait_for_selector("[role=option]")
            shown = rows(page)
            page.locator("#list").focus()
            page.keyboard.press("End")
            assert page.locator("[aria-selected=true] .text").first.inner_text() == shown[-1]
            page.keyboard.press("ArrowUp")
            assert page.locator("[aria-selected=true] .text").first.inner_text() == shown[-2]
            page.get_by_role("tab", name="What the model saw").focus()
            page.keyboard.press("ArrowLeft")
            assert page.get_by_role("tab", name="Copy").get_attribute("aria-selected") == "true"
            assert page.locator("#panel-copy").is_visible()
