"""The pages for people: playground, API documentation (Swagger UI) and reports. They load nothing from other hosts."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse, Response

from prefixwise.contract.errors import ArtifactError, InvalidValueError, NotFoundError, quote
from prefixwise.contract.fields import missing
from prefixwise.host import install_command
from prefixwise.server.answers import SharedResponse
from prefixwise.server.config import ReportSource
from prefixwise.server.context import JsonResponse, RequestContext, json_reply, read_body
from prefixwise.server.openapi import openapi_document
from prefixwise.server.service import Service
from prefixwise.web.files import PageFile, page_file_of, page_files, report_style

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
PAGE_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # the browser asks each time, and gets 304 if nothing has changed
}
# The style sheet of Swagger UI has its icons as data: addresses.
_DOCS_POLICY = CONTENT_SECURITY_POLICY.replace("img-src 'self'", "img-src 'self' data:")
_SWAGGER_PACKAGE = "flask_swagger_ui"  # only its files are used: it is never imported, nor is Flask
_SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
MAX_SENT_REPORT = 2**20  # bytes; artifacts have 100 KB, and their parser holds the interpreter lock
_SENT_REPORT = "the file"  # its name, if the request has none


async def home(service: Service, context: RequestContext) -> Response:
    """The playground."""
    return _send_file(context, "index.html")


async def page_file(service: Service, context: RequestContext) -> Response:
    """A file of a page."""
    return _send_file(context, context.path_params["name"])


def _send_file(context: RequestContext, name: str) -> Response:
    """The file, or 304 if the browser has it."""
    found = page_files().get(name) or swagger_files().get(name)
    if found is None:
        raise NotFoundError(f"the page has no file {quote(name)}", code="not_found")
    headers = {**PAGE_HEADERS, "etag": found.etag}
    if found.etag.encode() in context.headers.get(b"if-none-match", b""):
        return Response(status_code=304, headers=headers)
    return SharedResponse(found.content, headers=headers, media_type=found.media_type)


async def openapi(service: Service, context: RequestContext) -> Response:
    """The OpenAPI document."""
    content = _openapi_json(has_key=service.options.api_key is not None)
    return SharedResponse(content, media_type=JsonResponse.media_type)


@cache
def _openapi_json(*, has_key: bool) -> bytes:
    return bytes(json_reply(openapi_document(has_key=has_key)).body)


async def docs(service: Service, context: RequestContext) -> Response:
    """Swagger UI, which shows the OpenAPI document."""
    if not swagger_files():
        message = f"/docs needs the package flask-swagger-ui, which is not installed; run: {install_command('server')}"
        raise NotFoundError(message, code="not_found")
    response = _send_file(context, "docs.html")
    response.headers["content-security-policy"] = _DOCS_POLICY
    return response


@cache
def swagger_files() -> dict[str, PageFile]:
    """The files of Swagger UI by name, from the package that ships them; empty if it is not installed."""
    found = find_spec(_SWAGGER_PACKAGE)
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(found.submodule_search_locations[0]) / "dist"
    return {name: page_file_of(name, (folder / name).read_bytes()) for name in _SWAGGER_FILES}


async def reports(service: Service, context: RequestContext) -> Response:
    """The report viewer. Its policy applies to the report in it, so it allows the style sheet of reports."""
    response = _send_file(context, "reports.html")
    policy = CONTENT_SECURITY_POLICY.replace("style-src 'self'", f"style-src 'self' {_style_hash()}")
    response.headers["content-security-policy"] = policy
    return response


async def list_reports(service: Service, context: RequestContext) -> Response:
    """The artifacts in the reports folder."""
    found = await service.in_pool(_report_source(service).artifacts)
    return json_reply({"has_folder": service.options.reports_dir is not None, "artifacts": found})


async def view_report(service: Service, context: RequestContext) -> Response:
    """One of these artifacts as HTML."""
    name = _report_name(context)
    if name is None:
        raise missing("name", "an artifact that GET /reports/list has")
    return await _report(service, partial(_report_source(service).page, name))


async def view_sent_report(service: Service, context: RequestContext) -> Response:
    """The artifact in the body as HTML."""
    content = await read_body(context, service.options.max_request_bytes)
    if len(content) > MAX_SENT_REPORT:
        message = f"an artifact that is sent must have at most {MAX_SENT_REPORT} bytes, got {len(content)}"
        raise InvalidValueError(message, code="invalid_artifact", param="name")
    name = _report_name(context) or _SENT_REPORT
    return await _report(service, partial(_report_source(service).page_of, content, name))


async def _report(service: Service, render: Callable[[], str]) -> Response:
    """A report is HTML without a script, and may load nothing."""
    try:
        page = await service.in_pool(render)
    except ArtifactError as error:
        raise InvalidValueError(str(error), code="invalid_artifact", param="name") from None
    policy = f"default-src 'none'; style-src {_style_hash()}; base-uri 'none'; sandbox"
    content = page.encode("utf-8", "backslashreplace")  # JSON can hold lone surrogates
    largest = service.options.max_response_bytes
    if len(content) > largest:
        message = f"a response must have at most {largest} bytes (--max-response-bytes), got a report of {len(content)}"
        raise InvalidValueError(message, code="response_too_large")
    return HTMLResponse(content, headers={"content-security-policy": policy, "x-content-type-options": "nosniff"})


@cache
def _style_hash() -> str:
    """Of the style sheet inside a report, as `<style>` holds it."""
    digest = sha256(f"\n{report_style()}".encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _report_source(service: Service) -> ReportSource:
    if service.reports is None:
        message = f"this server has no report viewer; install it with: {install_command('harness')}"
        raise NotFoundError(message, code="no_report_viewer")
    return service.reports


def _report_name(context: RequestContext) -> str | None:
    query: bytes = context.scope["query_string"]
    names = parse_qs(query.decode("ascii", "replace")).get("name")
    return names[0] if names else None
