"""The middleware around the router: every HTTP request passes it, in and out.

It gives each request an id, checks the API key or, without one, which web page sent it, adds the headers that all
responses have (CORS among them), maps every exception to the one error body, and counts and logs the request.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from prefixwise.contract.errors import (
    AuthenticationError,
    CancelledError,
    ForbiddenError,
    InternalError,
    RequestError,
    json_values,
    quote,
)
from prefixwise.server.answers import send_response
from prefixwise.server.context import HEALTH_PATHS, RequestContext, error_reply, send_and_drain
from prefixwise.server.logs import fields_of, log_request
from prefixwise.server.metrics import OTHER_ROUTE
from prefixwise.server.service import Service, shutting_down

log = logging.getLogger("prefixwise")

# Load balancers have no key. The pages show nothing but themselves and the API's description, and ask for the key.
_KEYLESS_PATHS = (*HEALTH_PATHS, "/health_generate", "/", "/reports", "/docs", "/openapi.json")
_KEYLESS_FOLDER = "/page/"

_FORM_TYPES = (b"text/plain", b"multipart/form-data")

# No more of the body is read, whatever the client sends.
_REFUSED_WHILE_SENDING = ("request_too_large", "body_memory_full", "unsupported_encoding")

_CORS_METHODS = "GET, POST, DELETE"
_CORS_EXPOSED = b"X-Request-Id, Retry-After, X-Prefixwise-Warning, Traceresponse"
_CORS_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2000}")


def without_slash(path: str) -> str:
    """Every path is served with a slash at its end, too: clients that join URLs add one, and few follow redirects."""
    return path[:-1] if path.endswith("/") and path.strip("/") else path


def needs_key(path: str) -> bool:
    """Whether the route asks for the API key, where there is one."""
    return path not in _KEYLESS_PATHS and not path.startswith(_KEYLESS_FOLDER)


def sent_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key that the client sent; empty for none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


class Middleware:
    """An ASGI application around the router."""

    def __init__(self, service: Service, router: ASGIApp, route_of: Callable[[str], str | None]) -> None:
        """`route_of`: the route of a path, for what is answered before the router; None if no route matches."""
        key = service.options.api_key
        self._service = service
        self._router = router
        self._route_of = route_of
        self._cors = Cors(service.options.cors_origins)
        self._web_pages = WebPages(service, self._cors)
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _answer_other(scope, receive, send)
            return
        share = self._service.body_memory.share()
        context = RequestContext({**scope, "path": without_slash(scope["path"])}, receive, send, share)
        if self._service.tracing is not None:
            self._service.tracing.begin(context)
        lifecycle = self._service.lifecycle
        lifecycle.enter(context)
        try:
            with json_values():
                await self._answer(context)
        finally:
            self._service.end_share(share)
            lifecycle.leave(context)
            self._report(context)
            context.leave_scope()

    async def _answer(self, context: RequestContext) -> None:
        """Send a response, and map every exception to one."""
        self._cors.add_headers(context)
        if self._service.lifecycle.is_stopping:
            context.end_connection()
        try:
            await self._route(context)
        except RequestError as error:
            await self._send_error(context, error)
        except asyncio.CancelledError:
            if not context.is_aborted:
                raise
            _uncancel()
            await self._send_error(context, shutting_down())
        except Exception:
            log.exception("a request failed", extra=fields_of(id=context.id))
            message = f"something went wrong; the server's log says what, under request id {context.id}"
            await self._send_error(context, InternalError(message))

    async def _route(self, context: RequestContext) -> None:
        preflight = self._cors.preflight(context)
        if preflight is not None:
            await send_response(context, preflight, self._service.options)
            return
        self._check_key(context)
        await self._router(context.scope, context.receive, context.send)

    def _check_key(self, context: RequestContext) -> None:
        if self._key is None:
            self._web_pages.check(context)
            return
        if not needs_key(context.path):
            return
        sent = sent_key(context.headers)
        if not hmac.compare_digest(sent, self._key):
            got = "another one" if sent else "none"
            message = f"the API key must be sent as `Authorization: Bearer KEY` or `X-API-Key: KEY`, got {got}"
            raise AuthenticationError(message, code="invalid_api_key")

    async def _send_error(self, context: RequestContext, error: RequestError) -> None:
        _forget_frames(error)
        context.error_code = error.code
        if context.status is not None:
            log.error("a response broke off", extra=fields_of(id=context.id, error=str(error)))
            return  # its start is sent already; the server closes the connection
        if isinstance(error, CancelledError):
            context.status = error.status  # for the log: the client has disconnected
            return
        response = error_reply(error, context.error_body(error))
        is_last = (
            context.ends_connection
            or error.code in _REFUSED_WHILE_SENDING
            or b"expect" in context.headers  # without 100, the client need not send the body, nor leave it out
        )
        if is_last and not context.has_whole_body:  # which may still be on its way
            context.body_share.give_back()
            await send_and_drain(context, response)
        else:
            await send_response(context, response, self._service.options)

    def _report(self, context: RequestContext) -> None:
        name = context.route or self._route_of(context.path) or OTHER_ROUTE
        status = context.status or CancelledError.status
        seconds = time.monotonic() - context.arrival
        self._service.metrics.count_request(name, status, seconds)
        log_request(context, name, status, seconds)
        if context.trace is not None:
            context.trace.end(context, name, status, next(iter(self._service.names.public), ""))


def _forget_frames(error: BaseException | None) -> None:
    """The frames of a traceback hold the request, and often the error itself: such a cycle, with megabytes of text,
    would wait for the garbage collector, which does not know how large it is."""
    while error is not None:
        before = error.with_traceback(None).__context__
        error.__cause__ = error.__context__ = None
        error = before


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


async def _answer_other(scope: Scope, receive: Receive, send: Send) -> None:
    """Close a web socket. Acknowledge lifespan events: `launch.py` does the work of startup and shutdown."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})


class Cors:
    """Which web pages may read our responses, errors included. Without origins it adds nothing."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def add_headers(self, context: RequestContext) -> None:
        """Allow the page to read this response, if its origin is allowed."""
        if not self._origins:
            return
        if not self._any:
            context.add_header(b"vary", b"Origin")
        origin = context.headers.get(b"origin")
        if origin is not None and self.allows(origin):
            context.add_header(b"access-control-allow-origin", b"*" if self._any else origin)
            context.add_header(b"access-control-expose-headers", _CORS_EXPOSED)

    def preflight(self, context: RequestContext) -> Response | None:
        """The response to a preflight request; None if it is not one, or if its origin is not allowed."""
        origin = context.headers.get(b"origin")
        is_preflight = context.method == "OPTIONS" and b"access-control-request-method" in context.headers
        if not is_preflight or origin is None or not self.allows(origin):
            return None
        headers = {"access-control-allow-methods": _CORS_METHODS, "access-control-max-age": "600"}
        wanted = context.headers.get(b"access-control-request-headers", b"")
        if _CORS_HEADER_NAMES.fullmatch(wanted):
            headers["access-control-allow-headers"] = wanted.decode("ascii")
        return Response(status_code=204, headers=headers)

    def allows(self, origin: bytes) -> bool:
        """Whether its pages may use this server."""
        return self._any or origin in self._origins


class WebPages:
    """Which web pages may use a server that has no key: its own, and those of `--cors-origin`.

    A page of any site can make a browser send requests to this machine, also to ports that no other machine reaches.
    Browsers say so: `Origin` and `Sec-Fetch-Site` are theirs, and no page can change them. Programs send neither.
    A page whose name was pointed to this machine (DNS rebinding) has our origin for its browser: `Host` has its name.
    """

    def __init__(self, service: Service, cors: Cors) -> None:
        options = service.options
        self._service = service
        self._cors = cors
        self._is_open = "*" in options.cors_origins
        names = {options.host.lower(), *(urlsplit(origin).hostname or "" for origin in options.cors_origins)}
        self._is_our_name = lru_cache(64)(lambda host: _host_name(host) in names or _is_local_name(_host_name(host)))

    def check(self, context: RequestContext) -> None:
        """Raises ForbiddenError."""
        if self._is_open or context.path in HEALTH_PATHS:  # which read nothing and change nothing
            return
        headers = context.headers
        host = headers.get(b"host", b"")
        if self._service.is_local and not self._is_our_name(host):
            message = (
                f"this server answers under its address, as localhost or for --cors-origin, got Host: {_show(host)}"
            )
            raise ForbiddenError(message, code="host_not_allowed")
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is None and site is None:
            self._check_type(context)
        elif not self._is_page_allowed(context, origin, site, host):
            message = (
                "this server answers its own pages, those of --cors-origin, and with --api-key requests with the key"
            )
            raise ForbiddenError(f"{message}, got Origin: {_show(origin or b'none')}", code="origin_not_allowed")

    def _is_page_allowed(self, context: RequestContext, origin: bytes | None, site: bytes | None, host: bytes) -> bool:
        if site in (b"same-origin", b"none"):  # none: the address bar
            return True
        if origin is not None and self._cors.allows(origin):
            return True
        if site is None:
            return origin is not None and origin.partition(b"://")[2].lower() == host.lower()
        is_link = context.method == "GET" and context.headers.get(b"sec-fetch-mode") == b"navigate"
        return is_link and origin is None

    def _check_type(self, context: RequestContext) -> None:
        """Browsers before 2020 send forms without Origin. A form holds JSON in these types only; curl sends neither."""
        content_type = context.headers.get(b"content-type", b"")
        if context.method == "POST" and content_type.partition(b";")[0].strip().lower() in _FORM_TYPES:
            message = f"the content type must be application/json, got {_show(content_type)}"
            raise ForbiddenError(message, code="content_type_not_allowed")


def _host_name(host: bytes) -> str:
    """Without the port and without brackets."""
    text = host.decode("latin-1").strip().lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    return name.rstrip(".")


def _is_local_name(name: str) -> bool:
    """No page's: an address, localhost, or none (HTTP/1.0)."""
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _show(value: bytes) -> str:
    return quote(value.decode("latin-1"))
