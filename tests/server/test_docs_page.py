"""The documentation page: complete, whole, and on its own."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from prefixwise.server import docs_page as module
from prefixwise.server.docs_page import docs_page
from prefixwise.server.openapi import openapi_document
from prefixwise.server.openapi_errors import ERROR_TABLE
from prefixwise.server.openapi_schemas import SCORE_FIELDS
from prefixwise.web.files import page_text
from tests.server.app_client import AppClient

VOID = {"meta", "br", "link", "img"}


class Outline(HTMLParser):
    """Checks that tags are closed in order, and collects what a browser would fetch or show."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            if name == "id" and value is not None:
                self.ids.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_it_is_served_as_html(client: AppClient) -> None:
    response = client.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text == docs_page()


def test_it_needs_nothing_but_the_pages_files(client: AppClient) -> None:
    page = docs_page()
    found = outline(page)
    assert not {"script", "style", "iframe"} & found.tags
    assert not re.search(r"https?://|url\(|@import", page)
    paths = {link for link in found.links if not link.startswith("#")}
    assert paths >= {"/page/look.css", "/page/docs.css", "/", "/reports", "/openapi.json"}
    assert all(client.get(path).status_code == 200 for path in paths)
    policy = client.get("/docs").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_its_head_leads_where_those_of_the_other_pages_lead() -> None:
    top = re.compile(r'<li><a href="([^"]+)"(?: aria-current="page")?>([^<]+)</a></li>')
    pages = [docs_page(), page_text("index.html"), page_text("reports.html")]
    heads = [top.findall(page.partition("</header>")[0]) for page in pages]
    assert len(heads[0]) == 3
    assert heads[0] == heads[1] == heads[2]


def test_links_within_it_lead_somewhere() -> None:
    found = outline(docs_page())
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))


def test_every_route_field_and_error_is_on_it() -> None:
    text = outline(docs_page()).text
    assert all(path in text for path in openapi_document()["paths"])
    assert all(field in text for field in SCORE_FIELDS)
    assert all(code in text for row in ERROR_TABLE for code in row.codes)


def test_it_suits_phones_and_dark_rooms() -> None:
    assert '<meta name="viewport" content="width=device-width' in docs_page()
    assert '<meta name="color-scheme" content="light dark">' in docs_page()


def test_the_key_is_explained_only_where_there_is_one() -> None:
    page = docs_page(has_key=True)
    assert "curl -s -X POST $URL/v1/score -H &quot;Authorization: Bearer $KEY&quot; -d" in page
    assert "curl -s $URL/health</pre>" in page
    assert "Bearer" not in docs_page()


def test_whatever_the_document_holds_is_escaped() -> None:
    schema = {"properties": {"<b>": {"type": "string", "description": "<script>", "default": '<i "'}}}
    assert not {"b", "script", "i"} & outline(module._fields(schema)).tags
