"""The gate: every HTTP request comes in and goes out through it.

It gives each request an id and each response the headers that all have, asks for the key, turns whatever is raised
into the one error body, and counts and logs the request when it is over.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from prefixwise.contract.errors import (
    AuthenticationError,
    CancelledError,
    InternalError,
    RequestError,
    RequestTooLargeError,
)
from prefixwise.server.body import send_and_drain
from prefixwise.server.call import Call
from prefixwise.server.cors import Cors
from prefixwise.server.lifecycle import shutting_down
from prefixwise.server.logs import fields_of, log_request
from prefixwise.server.metrics import OTHER_ROUTE
from prefixwise.server.replies import error_reply
from prefixwise.server.service import Service

log = logging.getLogger("prefixwise")

# Load balancers have no key; and the pages, which hold nothing but themselves and what the API is like, ask for it.
_KEYLESS_PATHS = ("/health", "/health_generate", "/", "/reports", "/docs", "/openapi.json")
_KEYLESS_FOLDER = "/page/"


class Gate:
    """An ASGI application around the router."""

    def __init__(self, service: Service, router: ASGIApp) -> None:
        key = service.options.api_key
        self._service = service
        self._router = router
        self._cors = Cors(service.options.cors_origins)
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _answer_lifespan(scope, receive, send)
            return
        call = Call(scope, receive, send)
        lifecycle = self._service.lifecycle
        lifecycle.enter(call)
        try:
            await self._answer(call)
        finally:
            lifecycle.leave(call)
            self._report(call)
            call.leave_scope()

    async def _answer(self, call: Call) -> None:
        """A response, whatever happens."""
        self._cors.add_headers(call)
        if self._service.lifecycle.is_stopping:
            call.add_header(b"connection", b"close")
        try:
            await self._let_in(call)
        except RequestError as error:
            await self._refuse(call, error)
        except asyncio.CancelledError:
            if not call.is_aborted:
                raise
            _uncancel()
            await self._refuse(call, shutting_down())
        except Exception:
            log.exception("a request failed", extra=fields_of(id=call.id))
            message = f"something went wrong; the server's log says what, under request id {call.id}"
            await self._refuse(call, InternalError(message))

    async def _let_in(self, call: Call) -> None:
        preflight = self._cors.preflight(call)
        if preflight is not None:
            await preflight(call.scope, call.receive, call.send)
            return
        self._check_key(call)
        await self._router(call.scope, call.receive, call.send)

    def _check_key(self, call: Call) -> None:
        if self._key is None or call.path in _KEYLESS_PATHS or call.path.startswith(_KEYLESS_FOLDER):
            return
        scheme, _, token = call.headers.get(b"authorization", b"").partition(b" ")
        sent = token.strip() if scheme.lower() == b"bearer" else call.headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(sent, self._key):
            what = "another one" if sent else "none"
            message = f"the API key must be sent as `Authorization: Bearer KEY` or `X-API-Key: KEY`, got {what}"
            raise AuthenticationError(message, code="invalid_api_key")

    async def _refuse(self, call: Call, error: RequestError) -> None:
        if call.status is not None:
            log.error("a response broke off", extra=fields_of(id=call.id, error=str(error)))
            return  # its beginning is gone; the server closes the connection
        if isinstance(error, CancelledError):
            call.status = error.status  # nobody is there to receive it
            return
        response = error_reply(error, call.error_body(error))
        if isinstance(error, RequestTooLargeError):
            await send_and_drain(call, response)
        else:
            await response(call.scope, call.receive, call.send)

    def _report(self, call: Call) -> None:
        route = call.scope.get("route")
        name = OTHER_ROUTE if route is None else route.path
        status = call.status or CancelledError.status
        seconds = time.monotonic() - call.arrival
        self._service.metrics.count_request(name, status, seconds)
        log_request(call, name, status, seconds)


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


async def _answer_lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """Nothing happens there: the server's life is `lifecycle.py`'s. A web socket is refused."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})
