"""`/reports`: the harness's artifacts for people. A report is HTML without a script, and may load nothing."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse, Response

from prefixwise.contract.errors import ArtifactError, InvalidValueError, NotFoundError
from prefixwise.contract.parse import missing
from prefixwise.host import install_command
from prefixwise.server.body import read_body
from prefixwise.server.call import Call
from prefixwise.server.replies import json_reply
from prefixwise.server.reports import ReportSource
from prefixwise.server.routes.page import CONTENT_SECURITY_POLICY, send_file
from prefixwise.server.service import Service
from prefixwise.web.files import report_style

_DROPPED = "the file"


@cache
def _style_hash() -> str:
    """Of the style sheet inside a report, as `<style>` holds it."""
    digest = sha256(f"\n{report_style()}".encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


async def reports(service: Service, call: Call) -> Response:
    """The viewer. A report in it is under the viewer's own policy, so that has to allow its style sheet."""
    response = send_file(call, "reports.html")
    policy = CONTENT_SECURITY_POLICY.replace("style-src 'self'", f"style-src 'self' {_style_hash()}")
    response.headers["content-security-policy"] = policy
    return response


async def list_reports(service: Service, call: Call) -> Response:
    """What lies in the folder of reports."""
    found = await service.in_pool(_source(service).artifacts)
    return json_reply({"has_folder": service.options.reports_dir is not None, "artifacts": found})


async def view_report(service: Service, call: Call) -> Response:
    """One of them."""
    name = _name(call)
    if name is None:
        raise missing("name", "an artifact that GET /reports/list has")
    source = _source(service)
    return await _page(service, lambda: source.page(name))


async def view_sent_report(service: Service, call: Call) -> Response:
    """One that is in the body."""
    content = await read_body(call, service.options.max_request_bytes)
    source, name = _source(service), _name(call) or _DROPPED
    return await _page(service, lambda: source.page_of(content, name))


async def _page(service: Service, make: Callable[[], str]) -> Response:
    try:
        page = await service.in_pool(make)
    except ArtifactError as error:
        raise InvalidValueError(str(error), code="invalid_artifact", param="name") from None
    policy = f"default-src 'none'; style-src {_style_hash()}; base-uri 'none'; sandbox"
    return HTMLResponse(page, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})


def _source(service: Service) -> ReportSource:
    if service.reports is None:
        message = f"this server is without the report viewer; it comes with: {install_command('harness')}"
        raise NotFoundError(message, code="no_report_viewer")
    return service.reports


def _name(call: Call) -> str | None:
    asked: bytes = call.scope["query_string"]
    names = parse_qs(asked.decode("ascii", "replace")).get("name")
    return names[0] if names else None
