"""The middleware around the router: every HTTP request passes it, in and out.

It gives each request an id, checks the API key, adds the headers that all responses have (CORS among them), maps every
exception to the one error body, and counts and logs the request at its end.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from prefixwise.contract.errors import (
    AuthenticationError,
    CancelledError,
    InternalError,
    RequestError,
    RequestTooLargeError,
)
from prefixwise.server.context import RequestContext, error_reply, send_and_drain
from prefixwise.server.logs import fields_of, log_request
from prefixwise.server.metrics import OTHER_ROUTE
from prefixwise.server.service import Service, shutting_down

log = logging.getLogger("prefixwise")

# Load balancers have no key. The pages show nothing but themselves and the API's description, and ask for the key.
_KEYLESS_PATHS = ("/health", "/health_generate", "/", "/reports", "/docs", "/openapi.json")
_KEYLESS_FOLDER = "/page/"

_CORS_METHODS = "GET, POST, DELETE"
_CORS_EXPOSED = b"X-Request-Id, Retry-After"
_CORS_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2000}")


class Middleware:
    """An ASGI application around the router."""

    def __init__(self, service: Service, router: ASGIApp) -> None:
        key = service.options.api_key
        self._service = service
        self._router = router
        self._cors = Cors(service.options.cors_origins)
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _answer_other(scope, receive, send)
            return
        context = RequestContext(scope, receive, send)
        lifecycle = self._service.lifecycle
        lifecycle.enter(context)
        try:
            await self._answer(context)
        finally:
            lifecycle.leave(context)
            self._report(context)
            context.leave_scope()

    async def _answer(self, context: RequestContext) -> None:
        """Send a response, and map every exception to one."""
        self._cors.add_headers(context)
        if self._service.lifecycle.is_stopping:
            context.add_header(b"connection", b"close")
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
            await preflight(context.scope, context.receive, context.send)
            return
        self._check_key(context)
        await self._router(context.scope, context.receive, context.send)

    def _check_key(self, context: RequestContext) -> None:
        if self._key is None or context.path in _KEYLESS_PATHS or context.path.startswith(_KEYLESS_FOLDER):
            return
        scheme, _, token = context.headers.get(b"authorization", b"").partition(b" ")
        sent = token.strip() if scheme.lower() == b"bearer" else context.headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(sent, self._key):
            got = "another one" if sent else "none"
            message = f"the API key must be sent as `Authorization: Bearer KEY` or `X-API-Key: KEY`, got {got}"
            raise AuthenticationError(message, code="invalid_api_key")

    async def _send_error(self, context: RequestContext, error: RequestError) -> None:
        if context.status is not None:
            log.error("a response broke off", extra=fields_of(id=context.id, error=str(error)))
            return  # its start is sent already; the server closes the connection
        if isinstance(error, CancelledError):
            context.status = error.status  # for the log: the client has disconnected
            return
        response = error_reply(error, context.error_body(error))
        if isinstance(error, RequestTooLargeError):
            await send_and_drain(context, response)
        else:
            await response(context.scope, context.receive, context.send)

    def _report(self, context: RequestContext) -> None:
        route = context.scope.get("route")
        name = OTHER_ROUTE if route is None else route.path
        status = context.status or CancelledError.status
        seconds = time.monotonic() - context.arrival
        self._service.metrics.count_request(name, status, seconds)
        log_request(context, name, status, seconds)


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
        if origin is not None and self._allows(origin):
            context.add_header(b"access-control-allow-origin", b"*" if self._any else origin)
            context.add_header(b"access-control-expose-headers", _CORS_EXPOSED)

    def preflight(self, context: RequestContext) -> Response | None:
        """The response to a preflight request; None if it is not one, or if its origin is not allowed."""
        origin = context.headers.get(b"origin")
        is_preflight = context.method == "OPTIONS" and b"access-control-request-method" in context.headers
        if not is_preflight or origin is None or not self._allows(origin):
            return None
        headers = {"access-control-allow-methods": _CORS_METHODS, "access-control-max-age": "600"}
        wanted = context.headers.get(b"access-control-request-headers", b"")
        if _CORS_HEADER_NAMES.fullmatch(wanted):
            headers["access-control-allow-headers"] = wanted.decode("ascii")
        return Response(status_code=204, headers=headers)

    def _allows(self, origin: bytes) -> bool:
        return self._any or origin in self._origins
