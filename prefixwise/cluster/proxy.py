"""Around Serve's HTTP proxy, one per node: every request gets an answer in time, in the form of all errors.

The proxy sends a request to a front. Where the front dies with it, the proxy has no answer, and the client would get a
bare 500. Where the front's host does not answer, the proxy would wait. Serve loads `middlewares` into its proxies if
their environment names it (`connection.PROXY_ENVIRONMENT`).
"""

from __future__ import annotations

import asyncio
import logging

import orjson
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixwise.contract.errors import DeadlineExceededError, InvalidValueError, RequestError, UnavailableError
from prefixwise.server.scoring import TIMEOUT_HEADER, allowed_seconds, deadline_error

log = logging.getLogger("prefixwise")

PROXY_GRACE = 3.0  # seconds beyond a request's timeout, so that its front is the one that reports it

_HEADER = TIMEOUT_HEADER.lower().encode()
_SERVES_ROUTES = "/-/"  # of the proxy itself: its health
_SERVE_TIMED_OUT = 408
_UNAVAILABLE = 503
_RETRY_SECONDS = 1


def middlewares() -> list[Middleware]:
    """Serve's callback."""
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    """An ASGI application around the proxy's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_SERVES_ROUTES):
            await self._app(scope, receive, send)
            return
        seconds = _asked_for(scope)
        answer = _Answer(send)
        try:
            async with asyncio.timeout(None if seconds is None else seconds + PROXY_GRACE):
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            answer.refused = deadline_error(seconds or 0.0)
        except Exception:
            log.exception("the proxy failed")
        if not answer.has_started:
            await _respond(answer.refused or _front_gone(), scope, receive, send)


class _Answer:
    """The proxy's messages on their way to the client; its own refusals, which are plain text, are held back."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False
        self.refused: RequestError | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self.has_started:
            self.refused = _serves_own(message)
            self.has_started = self.refused is None
        if self.refused is None:
            await self._send(message)


def _serves_own(start: Message) -> RequestError | None:
    """The refusal that Serve began to send; None for an answer of a front."""
    headers = dict(start.get("headers", ()))
    if not headers.get(b"content-type", b"").startswith(b"text/plain"):
        return None
    if start["status"] == _SERVE_TIMED_OUT:
        return DeadlineExceededError("the request must be done within the server's time limit, and it is not")
    if start["status"] == _UNAVAILABLE:
        return UnavailableError("no front is ready; try again soon", code="not_ready", retry_after=_RETRY_SECONDS)
    return None


def _front_gone() -> RequestError:
    message = "the front went away while it had this request; send it again"
    return UnavailableError(message, code="replicas_gone", retry_after=_RETRY_SECONDS)


def _asked_for(scope: Scope) -> float | None:
    """The client's own timeout; the server's is Serve's `request_timeout_s`."""
    try:
        return allowed_seconds(dict(scope["headers"]).get(_HEADER), 0.0)
    except InvalidValueError:  # the replica reports it
        return None


async def _respond(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    seconds = getattr(error, "retry_after", None)
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    body = orjson.dumps(error.to_body())
    await Response(body, error.status, headers, media_type="application/json")(scope, receive, send)
