"""The page's files over HTTP: their types, their policy, and that they name no other host."""

from __future__ import annotations

import re

import pytest

from prefixwise.web.files import page_files
from tests.server.app_client import AppClient

MODULE_IMPORT = re.compile(r'(?:from|import)\s+"([^"]+)"')


def test_home_is_the_playground(client: AppClient) -> None:
    response = client.get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert response.content == page_files()["index.html"].content


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("look.css", "text/css; charset=utf-8"),
        ("main.js", "text/javascript; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    ],
)
def test_every_file_has_its_type_and_the_policy(client: AppClient, name: str, media_type: str) -> None:
    headers = client.get(f"/page/{name}").headers
    assert headers["content-type"] == media_type
    assert headers["x-content-type-options"] == "nosniff"
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy


def test_a_file_that_is_still_the_same_is_not_sent_again(client: AppClient) -> None:
    first = client.get("/page/main.js")
    again = client.get("/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["none.js", "..%2Ffiles.py", "files.py", "__init__.py"])
def test_nothing_else_can_be_had(client: AppClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


@pytest.mark.parametrize("name", sorted(page_files()))
def test_no_file_names_another_host(name: str) -> None:
    text = page_files()[name].content.decode()
    assert not re.findall(r"https?://(?!www\.w3\.org/)[^\s\"'`$]+", text)


@pytest.mark.parametrize("name", [name for name in sorted(page_files()) if name.endswith(".js")])
def test_a_module_imports_files_that_are_there_and_writes_no_html(name: str) -> None:
    text = page_files()[name].content.decode()
    assert {path.removeprefix("./") for path in MODULE_IMPORT.findall(text)} <= set(page_files())
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert way not in text, f"{name} uses {way}"


@pytest.mark.parametrize("name", [name for name in sorted(page_files()) if name.endswith(".html")])
def test_a_page_has_no_script_or_style_of_its_own(name: str) -> None:
    text = page_files()[name].content.decode()
    assert not re.search(r"<style|style=|\son[a-z]+=|<script(?![^>]* src=)", text)
    linked = re.findall(r'(?:src|href)="/page/([^"]+)"', text)
    assert linked and set(linked) <= set(page_files())
