"""`/` and `/page/...`: the page, file by file. It may load nothing but these, and ask no other server than this one."""

from __future__ import annotations

from starlette.responses import Response

from prefixwise.contract.describe import quote
from prefixwise.contract.errors import NotFoundError
from prefixwise.server.call import Call
from prefixwise.server.service import Service
from prefixwise.web.files import page_files

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
    "cache-control": "no-cache",  # asked for again each time, and answered with 304 where nothing has changed
}


async def home(service: Service, call: Call) -> Response:
    """The playground."""
    return send_file(call, "index.html")


async def page_file(service: Service, call: Call) -> Response:
    """A part of the page."""
    return send_file(call, call.path_params["name"])


def send_file(call: Call, name: str) -> Response:
    """The file, or no more than that it is still the same."""
    found = page_files().get(name)
    if found is None:
        raise NotFoundError(f"the page has no file {quote(name)}", code="not_found")
    headers = {**PAGE_HEADERS, "etag": found.etag}
    if found.etag.encode() in call.headers.get(b"if-none-match", b""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
