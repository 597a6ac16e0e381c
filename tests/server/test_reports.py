"""`/reports` over HTTP, with a source of its own: the server knows no more of reports than that they are HTML."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256

import pytest

from prefixwise.bench.report.document import Report
from prefixwise.bench.report.html import report_html
from prefixwise.contract.errors import ArtifactError
from prefixwise.server.config import ServerOptions
from tests.server.app_client import AppClient, app_client

PAGE = report_html(Report("A title", "2026-02-11", True, ("Fine.",), (), ()))


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


@pytest.mark.parametrize("path", ["/reports", "/reports/view?name=a.json"])
def test_the_policy_allows_the_style_sheet_inside_a_report(viewer: AppClient, path: str) -> None:
    style = re.search(r"<style>(.*)</style>", PAGE, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(sha256(style[1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in viewer.get(path).headers["content-security-policy"]


def test_what_is_sent_is_shown(viewer: AppClient) -> None:
    assert viewer.request("POST", "/reports/view", content=b"good").text == PAGE


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/reports/view", "missing_name"),
        ("GET", "/reports/view?name=b.json", "invalid_artifact"),
        ("POST", "/reports/view?name=b.json", "invalid_artifact"),
    ],
)
def test_what_cannot_be_shown_is_the_request_s_fault(viewer: AppClient, method: str, path: str, code: str) -> None:
    error = viewer.request(method, path).json()["error"]
    assert (error["code"], error["param"]) == (code, "name")


def test_without_what_makes_reports_the_viewer_says_so(client: AppClient) -> None:
    response = client.get("/reports/list")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "no_report_viewer")
