"""An HTTP request as a value, and the one server's application as a function from it to a response.

A front reads a request from Ray Serve's proxy, sends it to a replica as it is, and the replica puts it through the same
ASGI application that `prefixwise serve` runs. So every route, error and header is that of one server, by construction.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from starlette.types import ASGIApp, Message, Scope

Headers = tuple[tuple[bytes, bytes], ...]

REPLICA_HEADER = b"x-prefixwise-replica"  # on every answer: who gave it


@dataclass(frozen=True)
class HttpRequest:
    """All that a server needs of a request."""

    method: str
    path: str
    query_string: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    client: tuple[str, int] | None = None

    def header(self, name: bytes) -> bytes | None:
        return _value(self.headers, name)

    def with_header(self, name: bytes, value: bytes) -> HttpRequest:
        """In place of any of that name."""
        return replace(self, headers=_with(self.headers, name, value))


@dataclass(frozen=True)
class HttpResponse:
    """All that a client gets."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        return _value(self.headers, name)

    def with_header(self, name: bytes, value: bytes) -> HttpResponse:
        """In place of any of that name."""
        return replace(self, headers=_with(self.headers, name, value))

    @property
    def replica(self) -> str:
        """Whose it is; empty where it is a front's own."""
        return (self.header(REPLICA_HEADER) or b"").decode()

    def with_body(self, body: bytes) -> HttpResponse:
        """The same answer with another body, which is no single replica's."""
        headers = tuple((key, value) for key, value in self.headers if key != REPLICA_HEADER)
        return HttpResponse(self.status, _with(headers, b"content-length", str(len(body)).encode()), body)


def _value(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def _with(headers: Headers, name: bytes, value: bytes) -> Headers:
    return (*((key, each) for key, each in headers if key != name), (name, value))


async def answer(app: ASGIApp, request: HttpRequest) -> HttpResponse:
    """Put the request through the application. To cancel it is what a client that goes away is to a server."""
    exchange = _Exchange(request)
    try:
        await app(_scope(request), exchange.receive, exchange.send)
    finally:
        exchange.gone.set()
    return exchange.response()


def _scope(request: HttpRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query_string,
        "root_path": "",
        "headers": list(request.headers),
        "client": request.client,
        "server": None,
    }


class _Exchange:
    """The two functions that an application is called with."""

    def __init__(self, request: HttpRequest) -> None:
        self.gone = asyncio.Event()  # the client has its answer, or has left
        self._body: bytes | None = request.body
        self._start: Message | None = None
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        """The whole body at once. Once an answer has begun, whoever waits for more of it waits in vain."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._start is None:
            await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.gone.set()

    def response(self) -> HttpResponse:
        assert self._start is not None, "the gate answers whatever happens"
        headers = tuple((bytes(name), bytes(value)) for name, value in self._start["headers"])
        return HttpResponse(self._start["status"], headers, b"".join(self._parts))
