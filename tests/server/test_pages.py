"""The pages over HTTP: their files and policies, Swagger UI on `/docs`, and `/reports` with a source of its own."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256

import pytest

from prefixwise.bench.render.document import Report
from prefixwise.bench.render.html import report_html
from prefixwise.contract.errors import ArtifactError
from prefixwise.server.config import ServerOptions
from prefixwise.server.routes import pages
from prefixwise.server.routes.pages import swagger_files
from prefixwise.web.files import page_files, page_text
from tests.server.app_client import AppClient, app_client, error_of

MODULE_IMPORT = re.compile(r'(?:from|import)\s+"([^"]+)"')
LINKED = re.compile(r'(?:src|href)="(/page/[^"]+)"')
PAGE = report_html(Report("A title", "2026-02-11", True, ("Fine.",), (), ()))


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
def test_other_files_are_not_found(client: AppClient, name: str) -> None:
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
    assert linked and set(linked) <= {*page_files(), *swagger_files()}


@pytest.fixture
def without_swagger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pages, "_SWAGGER_PACKAGE", "a_package_that_is_not_installed")
    swagger_files.cache_clear()
    yield
    monkeypatch.undo()
    swagger_files.cache_clear()


class TestDocs:
    def test_docs_is_the_page_of_swagger_ui(self, client: AppClient) -> None:
        response = client.get("/docs")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert response.text == page_text("docs.html")
        assert '<div id="swagger-ui"></div>' in response.text

    def test_every_file_that_it_references_is_served(self, client: AppClient) -> None:
        linked = [path for path in LINKED.findall(client.get("/docs").text) if path.startswith("/page/")]
        assert {"/page/swagger-ui-bundle.js", "/page/swagger-ui.css", "/page/docs.js"} <= set(linked)
        for path in linked:
            response = client.get(path)
            assert response.status_code == 200 and len(response.content) > 100, path
        assert all(client.get(path).status_code == 200 for path in ("/", "/reports", "/openapi.json"))

    def test_the_files_of_swagger_ui_have_type_tag_and_policy(self, client: AppClient) -> None:
        script, style = client.get("/page/swagger-ui-bundle.js"), client.get("/page/swagger-ui.css")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert style.headers["content-type"] == "text/css; charset=utf-8"
        assert style.headers["content-security-policy"] == pages.CONTENT_SECURITY_POLICY
        again = client.get("/page/swagger-ui.css", headers={"If-None-Match": style.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert not re.search(r"url\((?![\"']?data:)|@import", style.text)

    def test_its_policy_allows_no_more_than_this_server_and_images_in_the_style_sheet(self, client: AppClient) -> None:
        policy = dict(part.split(" ", 1) for part in client.get("/docs").headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["img-src"] == "'self' data:"
        assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"

    def test_its_script_asks_no_other_host(self) -> None:
        assert 'url: "/openapi.json"' in page_text("docs.js")
        assert "validatorUrl: null" in page_text("docs.js")

    def test_its_head_has_the_links_of_the_other_pages(self) -> None:
        top = re.compile(r'<li><a href="([^"]+)"(?: aria-current="page")?>([^<]+)</a></li>')
        texts = [page_text(name) for name in ("docs.html", "index.html", "reports.html")]
        heads = [top.findall(text.partition("</header>")[0]) for text in texts]
        assert len(heads[0]) == 3
        assert heads[0] == heads[1] == heads[2]

    def test_it_suits_phones_and_dark_mode(self) -> None:
        assert '<meta name="viewport" content="width=device-width' in page_text("docs.html")
        assert '<meta name="color-scheme" content="light dark">' in page_text("docs.html")
        assert b"html.dark-mode" in swagger_files()["swagger-ui.css"].content

    @pytest.mark.usefixtures("without_swagger")
    def test_without_the_package_it_names_the_package(self, client: AppClient) -> None:
        response = client.get("/docs")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        assert "flask-swagger-ui" in response.json()["message"] and "pip install" in response.json()["message"]
        assert client.get("/page/swagger-ui.css").status_code == 404
        assert client.get("/page/docs.css").status_code == 200


class Source:
    """One artifact."""

    def artifacts(self) -> Sequence[Mapping[str, object]]:
        return [{"name": "a.json", "folder": ".", "kind": "matrix", "bytes": 3}]

    def page(self, name: str) -> str:
        if name != "a.json":
            raise ArtifactError(f"{name} is not there")
        return PAGE

    def page_of(self, content: bytes, name: str) -> str:
        if content != b"good":
            raise ArtifactError(f"{name} is bad")
        return PAGE


@pytest.fixture
def viewer() -> Iterator[AppClient]:
    with app_client(ServerOptions(reports_dir="somewhere"), reports=Source()) as made:
        yield made


def test_the_list_is_the_source_s(viewer: AppClient) -> None:
    assert viewer.get("/reports/list").json() == {"has_folder": True, "artifacts": Source().artifacts()}


def test_a_report_may_load_and_run_nothing(viewer: AppClient) -> None:
    response = viewer.get("/reports/view?name=a.json")
    assert (response.status_code, response.text) == (200, PAGE)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and policy.endswith("sandbox") and "script" not in policy


def test_a_lone_surrogate_in_a_report_is_shown_as_its_number(
    viewer: AppClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "page_of", lambda self, content, name: "<p>\ud800</p>")
    assert viewer.request("POST", "/reports/view", content=b"good").text == "<p>\\ud800</p>"


@pytest.mark.parametrize("path", ["/reports", "/reports/view?name=a.json"])
def test_the_policy_allows_the_style_sheet_inside_a_report(viewer: AppClient, path: str) -> None:
    style = re.search(r"<style>(.*)</style>", PAGE, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(sha256(style[1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in viewer.get(path).headers["content-security-policy"]


def test_a_report_that_is_sent_is_shown(viewer: AppClient) -> None:
    assert viewer.request("POST", "/reports/view", content=b"good").text == PAGE


def test_an_artifact_that_is_sent_has_a_bounded_size(viewer: AppClient) -> None:
    error = viewer.request("POST", "/reports/view", content=b" " * (2**20 + 1)).json()["error"]
    assert (error["code"], error["message"]) == (
        "invalid_artifact",
        "an artifact that is sent must have at most 1048576 bytes, got 1048577",
    )


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/reports/view", "missing_name"),
        ("GET", "/reports/view?name=b.json", "invalid_artifact"),
        ("POST", "/reports/view?name=b.json", "invalid_artifact"),
    ],
)
def test_an_artifact_that_cannot_be_shown_is_an_error_of_the_request(
    viewer: AppClient, method: str, path: str, code: str
) -> None:
    error = viewer.request(method, path).json()["error"]
    assert (error["code"], error["param"]) == (code, "name")


def test_a_report_that_is_too_large_is_refused() -> None:
    with app_client(ServerOptions(max_response_bytes=10), reports=Source()) as client:
        for response in (client.get("/reports/view?name=a.json"), client.post("/reports/view", content=b"good")):
            assert error_of(response) == (400, "invalid_value_error", "response_too_large", None)


def test_without_a_report_source_the_viewer_says_so(client: AppClient) -> None:
    response = client.get("/reports/list")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "no_report_viewer")
