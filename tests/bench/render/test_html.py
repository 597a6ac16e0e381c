from __future__ import annotations

import re
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from prefixwise.bench.kinds.comparison.report import make_report
from prefixwise.bench.render.document import Card, Chart, Charts, Paragraph, Report, Section, Table
from prefixwise.bench.render.html import report_html
from prefixwise.web.files import report_style
from tests.bench.report_samples import sample_inputs
from tests.web.browser import CHROMIUM

_VOID = {"meta", "br", "hr", "img", "input", "link"}
_PHONE_WIDTH = 390


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps what tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report_html(make_report(sample_inputs(tmp_path_factory.mktemp("html")), "2026-02-11"))


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_it_fetches_nothing_and_runs_nothing(page: Page, text: str) -> None:
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith("#")
    assert page.all("script") == page.all("link") == page.all("iframe") == []
    assert "url(" not in text
    assert "@import" not in text


def test_links_lead_to_sections(page: Page) -> None:
    targets = {attributes["id"] for attributes in page.all("section")}
    links = {attributes["href"] for attributes in page.all("a")}
    assert links == {f"#{target}" for target in targets}
    assert len(links) == 8


def test_ids_are_unique(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_figure_has_text_alternatives(page: Page, text: str) -> None:
    assert len(page.all("figure")) == len(page.all("svg")) == len(page.all("figcaption")) == 6
    ids = {attributes.get("id") for name, attributes in page.tags if name in ("title", "desc")}
    for attributes in page.all("svg"):
        assert attributes["role"] == "img"
        assert set((attributes["aria-labelledby"] or "").split()) <= ids
    assert re.search(r"<desc[^>]*></desc>", text) is None


def test_tables_are_tables(page: Page) -> None:
    tables = page.all("table")
    assert len(tables) == len(page.all("caption")) == len(page.all("thead"))
    assert {attributes.get("scope") for attributes in page.all("th")} == {"col", "row"}
    boxes = [attributes for attributes in page.all("div") if attributes.get("class") == "scroll"]
    assert len(boxes) == len(tables)
    assert all(box["tabindex"] == "0" and box["aria-label"] for box in boxes)


def test_it_says_what_the_markdown_says(page: Page) -> None:
    phrase = " ".join(page.texts)
    assert "With the same client, PyTorch is 200.0% faster" in phrase
    assert "200.0 (1/2)" in phrase
    assert "<b>out | of memory</b>" in phrase  # as text, not as tags
    assert page.all("b") == []


def test_it_is_for_phones_and_printers_and_the_dark(page: Page) -> None:
    viewport = next(attributes for attributes in page.all("meta") if attributes.get("name") == "viewport")
    assert viewport["content"] == "width=device-width, initial-scale=1"
    assert "@media (prefers-color-scheme: dark)" in report_style()
    paper = report_style().split("@media print")[1]
    assert "--page: #ffffff" in paper
    assert re.search(r"figure[^{]*\{ break-inside: avoid", paper)
    # A long table begins where it stands and goes on over pages, instead of leaving the rest of one empty.
    assert re.search(r"\.scroll[^{]*\{ break-inside: avoid", paper) is None


def test_every_figure_has_a_title_that_is_seen(page: Page) -> None:
    titles = [attributes for attributes in page.all("p") if attributes.get("class") == "figure-title"]
    assert len(titles) == len(page.all("figure"))
    assert "Throughput by chunk size" in page.texts


def test_everything_that_is_told_is_escaped() -> None:
    evil = '"><script>alert(1)</script>&'
    blocks = (
        Paragraph(evil),
        Table(evil, (evil, evil), ((evil, evil),)),
        Charts((Chart(evil, "<svg></svg>", evil),)),
    )
    made = Page(report_html(Report(evil, evil, False, (evil,), (Card(evil, evil, evil),), (Section(evil, blocks),))))
    assert made.all("script") == []
    assert made.texts.count(evil) >= 10


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_phone_shows_it_without_scrolling_sideways(text: str, tmp_path: Path) -> None:
    # A window cannot be so narrow, but a frame can; what the frame measures is written into the page around it.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id="phone" style="border:0;width:{_PHONE_WIDTH}px;height:844px" srcdoc="{escape(text)}"></iframe>'
        "<p id='found'></p><script>addEventListener('load', () => {"
        "const page = document.getElementById('phone').contentDocument;"
        "const size = getComputedStyle(page.body).fontSize;"
        "const wide = [...page.querySelectorAll('.scroll')].some(box => box.scrollWidth > box.clientWidth);"
        "document.getElementById('found').textContent = "
        "`page=${page.documentElement.scrollWidth} text=${size} tables-scroll=${wide}`;});</script>"
    )
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom")
    command = [CHROMIUM or "", *options, f"--user-data-dir={tmp_path / 'profile'}", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r'id="found">([^<]*)<', done.stdout)
    assert found is not None, done.stderr
    assert found[1] == f"page={_PHONE_WIDTH} text=16px tables-scroll=true"
