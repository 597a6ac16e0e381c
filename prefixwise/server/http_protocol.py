"""uvicorn's HTTP protocol with limits on what one connection may cost before its request reaches the application.

head          its bytes, the number of its headers (trailers count, too)
pipelining    requests behind the one in progress
upgrade       a request that offers another protocol (`Upgrade: h2c`, as Java's HttpClient does) is served in this one

A check costs a request an addition or a look into a dict; what needs a clock or other connections is in
`connections.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

import httptools
import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from prefixwise.contract.errors import InvalidRequestError
from prefixwise.server.config import ServerOptions
from prefixwise.server.context import CONNECTION_KEY, new_request_id

_BODY_HEADERS = (b"content-length", b"transfer-encoding")


class RefusedError(Exception):
    """Stops the parser. It becomes a response and ends the connection."""

    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Registry(Protocol):
    """All connections of a process, as one of them sees them."""

    options: ServerOptions
    waiting: dict[HttpProtocol, None]  # within the limits, without a request; the longest first

    def add(self, protocol: HttpProtocol) -> None:
        """A client has connected."""

    def remove(self, protocol: HttpProtocol) -> None:
        """The connection is closed, or will be in a moment."""

    def count(self, reason: str) -> None:
        """A connection was refused, or closed before its request had a response."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. No middleware sees a request that it refuses."""

    def __init__(
        self,
        connections: Registry,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        options = connections.options
        self._connections = connections
        self._waiting = connections.waiting
        self._max_header_bytes = options.max_header_bytes
        self._max_headers = options.max_headers
        self._max_pipelined = options.max_pipelined_requests
        self._running: RequestResponseCycle | None = None  # `cycle` is the last of those that wait behind it
        self._num_hosts = 0  # headers of that name in this request
        self._header_bytes = 0  # of this request, as far as parsed
        self._unparsed = 0  # bytes since the parser last came to the end of a head, or to a part of a body
        self._repeats_head = False  # the parser reads a head that it has seen, for the sake of its body
        self.is_reserved = False  # a connection beyond the limits
        self._ignores_input = False  # the connection ends with the response in progress
        self.is_head_due = True  # a new connection, or one whose request has begun and has no complete head
        self.has_begun = False  # the request has begun
        self.since = 0.0  # when it did, else when the connection became idle; of the event loop's clock
        self.heard = 0.0  # when the client last sent something
        self.unsent = (0, 0.0)  # bytes that the client has not read, and since when it is that number
        self.body_bytes = 0  # of this request's body, so far
        self.body_mark = (0, 0.0)  # how many there were at a time in the past

    # Called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.heard = self.loop.time()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.clear()  # nobody reads their responses
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._connections.remove(self)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.heard = self.loop.time()
        self._unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self.refuse(error.__context__ if isinstance(error.__context__, RefusedError) else _invalid_http())
        else:
            if self._unparsed > self._max_header_bytes:
                self.refuse(_headers_too_large(self._max_header_bytes))

    def _parse(self, data: bytes) -> None:
        """Where a request offers another protocol, the parser takes its body for that protocol's: it reads the body
        behind a head that offers none."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                self._repeats_head = True
                data = _head_for_body(self.cycle.scope["headers"]) + data[upgrade.args[0] :]

    # Called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._num_hosts = 0
        self.is_head_due = self.has_begun = True
        self.since = self.heard
        self.body_bytes, self.body_mark = 0, (0, self.heard)

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"host":
            self._num_hosts += 1
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        headers = self.headers
        headers.append((name, value))
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self._max_header_bytes:
            raise _headers_too_large(self._max_header_bytes)
        if len(headers) > self._max_headers:
            message = f"a request must have at most {self._max_headers} headers (--max-headers), got more"
            raise RefusedError(431, message, code="too_many_headers")

    def on_headers_complete(self) -> None:
        if self._repeats_head:
            self._repeats_head = self.is_head_due = self.has_begun = False
            return
        if self._num_hosts != 1 and self.parser.get_http_version() != "1.0":
            message = f"a request must have one Host header, got {self._num_hosts}"
            raise RefusedError(400, message, code="invalid_host")
        if len(self.pipeline) >= self._max_pipelined and self.is_busy:
            message = f"at most {self._max_pipelined} requests may wait behind another one (--max-pipelined-requests)"
            raise RefusedError(400, message, code="too_many_pipelined")
        if self.expect_100_continue and self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # such a client takes 100 for the response
        self._unparsed = 0
        self.is_head_due = self.has_begun = False
        self._waiting.pop(self, None)
        self.scope[CONNECTION_KEY] = self  # type: ignore[literal-required]  # ours
        is_behind = self.is_busy
        super().on_headers_complete()
        if not is_behind:
            self._running = self.cycle
        if self.scope["method"] != "HEAD":  # nothing is written behind the head of its response
            self.cycle.transport = _ResponseWriter(self.transport)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else its body follows
            super().on_message_complete()

    # Called by the request in progress

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self.cycle.response_complete:  # of the last one
            if not self.has_begun:  # else its next head is due since its first byte
                self.since = self.loop.time()
            if not self.is_reserved:
                self._waiting[self] = None

    # Called by a response on its way (`context.Connection`)

    @property
    def is_gone(self) -> bool:
        """Whether nobody reads the response any more."""
        return self.transport.is_closing()

    def leave(self) -> None:
        """The rest of the response in progress is not sent."""
        if self._running is not None:
            self._running.disconnected = True  # else uvicorn logs that the response is incomplete

    def cut(self) -> None:
        """End the connection: its client reads too slowly."""
        self._connections.count("slow_transfer")
        self.leave()
        self.transport.abort()  # `close` would wait for the client to read

    # Called by the registry

    @property
    def is_busy(self) -> bool:
        """Whether a request has no complete response."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits_for_body(self) -> bool:
        """Whether the one request in progress needs more of its body."""
        return self.is_busy and not self.pipeline and self.cycle.more_body and not self.cycle.response_started

    def refuse(self, refused: RefusedError) -> None:
        """Send the error and close. If earlier requests have no response yet, they get theirs, and no error follows."""
        self._connections.count(refused.code)
        self._ignores_input = True
        if self.pipeline and self.cycle.more_body and self._running is not None:
            self.pipeline.popleft()  # the last one will never be whole
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
        if self.is_busy and not self.cycle.more_body:
            self.cycle.keep_alive = False  # the last one closes the connection
            scope = self.cycle.scope  # uvicorn before 0.53 says so only where the request asks for it
            scope["headers"] = [*scope["headers"], (b"connection", b"close")]
            return
        if not self.is_busy or self.waits_for_body:
            self.transport.write(_response(refused))
        self.transport.close()


class _ResponseWriter(asyncio.Transport):
    """Writes the head of a response with the beginning of its body: two writes would wake the client twice.

    It has the methods of a transport that uvicorn's responses use.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._head: bytes | None = None  # b"": written

    def write(self, data: Any) -> None:
        if self._head is None and not data.startswith(STATUS_LINE[100]):
            self._head = data
            return
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def close(self) -> None:
        if self._head:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def _head_for_body(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A head that says where the body ends, as these headers do."""
    lines = [b"POST / HTTP/1.1", *(name + b": " + value for name, value in headers if name in _BODY_HEADERS)]
    return b"\r\n".join((*lines, b"", b""))


def _response(refused: RefusedError) -> bytes:
    body = orjson.dumps(InvalidRequestError(str(refused), code=refused.code).to_body())
    head = (
        "content-type: application/json\r\nconnection: close\r\n"
        f"x-request-id: {new_request_id()}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return STATUS_LINE[refused.status] + head.encode() + body


def _invalid_http() -> RefusedError:
    message = "the request must be valid HTTP/1.1, got something else"
    return RefusedError(400, message, code="invalid_http")


def _headers_too_large(max_bytes: int) -> RefusedError:
    message = f"the request line and all headers must have at most {max_bytes} bytes (--max-header-bytes), got more"
    return RefusedError(431, message, code="headers_too_large")
