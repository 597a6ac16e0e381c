"""uvicorn's HTTP protocol with limits on what a client may cost before its request reaches the application.

connections   in all and per address; beyond them a small reserve answers `/health` and `/metrics` alone
head          its bytes, the number of its headers (trailers count, too), the seconds until it is complete
idle          seconds between requests, and seconds without a byte while the server waits for the client
rate          bytes a second of a body that takes longer; `answers.py` has the same for responses
pipelining    requests behind the one in progress

A check costs a request an addition or a look into a dict; whatever needs a clock is done once a second (`sweep`).
"""

from __future__ import annotations

import asyncio
import collections
import logging
import socket
from collections.abc import Iterable
from typing import Any

import httptools
import orjson
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from prefixwise.contract.errors import InvalidRequestError, UnavailableError
from prefixwise.server.config import ServerOptions
from prefixwise.server.context import CONNECTION_KEY, HEALTH_PATHS, new_request_id
from prefixwise.server.metrics import Metrics
from prefixwise.server.usage import CONNECTIONS, Usage, address_field

log = logging.getLogger("prefixwise")

RESERVE = 16  # connections beyond the limits
_RESERVE_PATHS = (*HEALTH_PATHS, "/metrics")
_ANSWER_SECONDS = 5.0  # for a handler to answer a request whose time is over
_LOG_SECONDS = 10.0  # between two lines about refused connections


class _RefusedError(Exception):
    """Stops the parser. It becomes a response and ends the connection."""

    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class HttpProtocol(HttpToolsProtocol):
    """One connection. No middleware sees a request that it refuses."""

    def __init__(
        self,
        connections: Connections,
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
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the server knows no other protocol, and answers the request
        except httptools.HttpParserError as error:
            self.refuse(error.__context__ if isinstance(error.__context__, _RefusedError) else _invalid_http())
        else:
            if self._unparsed > self._max_header_bytes:
                self.refuse(_headers_too_large(self._max_header_bytes))

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
            raise _RefusedError(431, message, code="too_many_headers")

    def on_headers_complete(self) -> None:
        if self._num_hosts != 1 and self.parser.get_http_version() != "1.0":
            message = f"a request must have one Host header, got {self._num_hosts}"
            raise _RefusedError(400, message, code="invalid_host")
        if len(self.pipeline) >= self._max_pipelined and self.is_busy:
            message = f"at most {self._max_pipelined} requests may wait behind another one (--max-pipelined-requests)"
            raise _RefusedError(400, message, code="too_many_pipelined")
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

    def cut(self) -> None:
        """End the connection: its client reads too slowly."""
        self._connections.count("slow_transfer")
        if self._running is not None:
            self._running.disconnected = True  # else uvicorn logs that the response is incomplete
        self.transport.abort()  # `close` would wait for the client to read

    # For this module

    @property
    def is_busy(self) -> bool:
        """Whether a request has no complete response."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits_for_body(self) -> bool:
        """Whether the one request in progress needs more of its body."""
        return self.is_busy and not self.pipeline and self.cycle.more_body and not self.cycle.response_started

    def refuse(self, refused: _RefusedError) -> None:
        """Send the error and close. If earlier requests have no response yet, they get theirs, and no error follows."""
        self._connections.count(refused.code)
        self._ignores_input = True
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


def _response(refused: _RefusedError) -> bytes:
    body = orjson.dumps(InvalidRequestError(str(refused), code=refused.code).to_body())
    head = (
        "content-type: application/json\r\nconnection: close\r\n"
        f"x-request-id: {new_request_id()}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return STATUS_LINE[refused.status] + head.encode() + body


def _invalid_http() -> _RefusedError:
    message = "the request must be valid HTTP/1.1, got something else"
    return _RefusedError(400, message, code="invalid_http")


def _headers_too_large(max_bytes: int) -> _RefusedError:
    message = f"the request line and all headers must have at most {max_bytes} bytes (--max-header-bytes), got more"
    return _RefusedError(431, message, code="headers_too_large")


def _header_timeout(seconds: float) -> _RefusedError:
    message = f"all headers must arrive within {seconds:g} seconds (--header-timeout), and they have not"
    return _RefusedError(408, message, code="header_timeout")


def _idle_timeout(seconds: float) -> _RefusedError:
    message = f"the body must not pause for more than {seconds:g} seconds (--idle-timeout), and it has"
    return _RefusedError(408, message, code="idle_timeout")


def _slow_transfer(rate: int) -> _RefusedError:
    message = f"the body must arrive at {rate} bytes a second or more (--min-transfer-rate), and it has not"
    return _RefusedError(408, message, code="slow_transfer")


def _body_timeout(seconds: float) -> _RefusedError:
    message = f"the body must arrive within {seconds:g} seconds (--request-timeout), and it has not"
    return _RefusedError(408, message, code="idle_timeout")


class Connections:
    """All connections of one process: how many there may be, and for how long they may be idle. On the event loop.

    The limits are the server's: connections of its other processes count (`usage`). `max_connections` may be below the
    option's: the files that the process may open are a limit, too.
    """

    def __init__(
        self,
        options: ServerOptions,
        metrics: Metrics,
        max_connections: int | None = None,
        usage: Usage | None = None,
    ) -> None:
        self.options = options
        self._usage = usage or Usage()
        self._max = options.max_connections if max_connections is None else max_connections
        self._metrics = metrics
        self._addresses: dict[HttpProtocol, bytes] = {}  # of all connections within the limits
        self._per_address: collections.Counter[bytes] = collections.Counter()
        self._reserve: dict[HttpProtocol, None] = {}  # the oldest first
        self.waiting: dict[HttpProtocol, None] = {}  # within the limits, without a request; the longest first
        self._refused: collections.Counter[str] = collections.Counter()  # since the last line of the log
        self._last_logged = float("-inf")
        metrics.watch_connections(lambda: len(self._addresses) + len(self._reserve))

    def add(self, protocol: HttpProtocol) -> None:
        """A client has connected. Where all places are taken, the connection that waits longest is closed."""
        address = _network(protocol.client[0] if protocol.client else "")
        of_address = self._per_address[address] + self._usage.of_others(address_field(address))
        is_full = of_address >= self.options.max_connections_per_address
        if not is_full and self._has_no_place():
            is_full = not self._close_first(self.waiting)
        if not is_full:
            self._addresses[protocol] = address
            self._count_of(address, 1)
            self.waiting[protocol] = None
            return
        if len(self._reserve) >= RESERVE and not self._close_first(each for each in self._reserve if not each.is_busy):
            self.count("too_many_connections")
            protocol.transport.abort()
            return
        self._reserve[protocol] = None
        protocol.is_reserved = True
        protocol.app = _ReserveApp(self, protocol.app)

    def remove(self, protocol: HttpProtocol) -> None:
        """The connection is closed, or will be in a moment."""
        self.waiting.pop(protocol, None)
        self._reserve.pop(protocol, None)
        address = self._addresses.pop(protocol, None)
        if address is not None:
            self._count_of(address, -1)

    def _has_no_place(self) -> bool:
        return len(self._addresses) >= self._max or self._usage.total(CONNECTIONS) >= self.options.max_connections

    def _count_of(self, address: bytes, change: int) -> None:
        self._usage.add(CONNECTIONS, change)
        self._usage.add(address_field(address), change)
        self._per_address[address] += change
        if not self._per_address[address]:
            del self._per_address[address]

    def count(self, reason: str) -> None:
        """A connection was refused, or closed before its request had a response."""
        self._refused[reason] += 1
        self._metrics.count_refused(reason)

    def _close_first(self, protocols: Iterable[HttpProtocol]) -> bool:
        """Close one of them to make room; False if there is none."""
        protocol = next(iter(protocols), None)
        if protocol is None:
            return False
        self.count("too_many_connections")
        self.remove(protocol)
        protocol.transport.close()
        return True

    def sweep(self, protocols: Iterable[HttpProtocol], now: float) -> None:
        """Close the connections whose time is over. `launch.py` calls it once a second with all connections."""
        for protocol in protocols:
            self._check_idle(protocol, now)
        if self._refused and now - self._last_logged >= _LOG_SECONDS:
            counts = ", ".join(f"{number} {reason}" for reason, number in sorted(self._refused.items()))
            log.warning("connections refused or closed: %s; open: %d", counts, len(self._addresses))
            self._refused.clear()
            self._last_logged = now

    def _check_idle(self, protocol: HttpProtocol, now: float) -> None:
        options = self.options
        unsent = protocol.transport.get_write_buffer_size()
        if unsent != protocol.unsent[0]:
            protocol.unsent = (unsent, now)
        if unsent:
            self._check_unsent(protocol, unsent, now)
        elif protocol.transport.is_closing():
            return
        elif protocol.waits_for_body:
            if protocol.flow.read_paused:
                protocol.heard, protocol.body_mark = now, (protocol.body_bytes, now)  # the server does not listen
            elif now - protocol.heard > options.idle_timeout:
                protocol.refuse(_idle_timeout(options.idle_timeout))
            elif self._is_slow(protocol, now):
                protocol.refuse(_slow_transfer(options.min_transfer_rate))
            elif 0 < options.request_timeout < now - protocol.since - _ANSWER_SECONDS:
                protocol.refuse(_body_timeout(options.request_timeout))
        elif not protocol.is_busy:
            self._check_waiting(protocol, now)

    def _check_unsent(self, protocol: HttpProtocol, unsent: int, now: float) -> None:
        """The end of a response, when its handler is done, and what of a response the client does not read at all."""
        options = self.options
        if now - protocol.unsent[1] > options.idle_timeout:
            self.count("idle_timeout")
            protocol.transport.abort()  # `close` would wait for the client to read
        elif not protocol.is_busy:
            late = now - protocol.since - options.idle_timeout
            if options.min_transfer_rate and late > unsent / options.min_transfer_rate:
                protocol.cut()

    def _is_slow(self, protocol: HttpProtocol, now: float) -> bool:
        """Whether less of the body has arrived since its mark than must have. Moves the mark."""
        num_bytes, since = protocol.body_mark
        if now - since <= self.options.idle_timeout:
            return False
        protocol.body_mark = (protocol.body_bytes, now)
        return protocol.body_bytes - num_bytes < self.options.min_transfer_rate * (now - since)

    def _check_waiting(self, protocol: HttpProtocol, now: float) -> None:
        """For the first byte of a request, or for the end of its head."""
        if not protocol.is_head_due:
            if now - protocol.since > self.options.keep_alive_timeout:
                protocol.transport.close()
        elif now - protocol.since > self.options.header_timeout:
            if protocol.has_begun:
                protocol.refuse(_header_timeout(self.options.header_timeout))
            else:  # it never sent anything; a response would be one to its next request
                self.count("header_timeout")
                protocol.transport.close()


class _ReserveApp:
    """For connections beyond the limits: a probe still sees the server."""

    def __init__(self, connections: Connections, app: Any) -> None:
        self._connections = connections
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _RESERVE_PATHS:
            await self._app(scope, receive, send)
            return
        self._connections.count("too_many_connections")
        message = (
            "the server has as many connections as it may have (--max-connections, --max-connections-per-address); "
            "try again later, or use open connections again"
        )
        body = orjson.dumps(UnavailableError(message, code="too_many_connections").to_body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", new_request_id().encode()),
            (b"retry-after", b"1"),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": UnavailableError.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _network(address: str) -> bytes:
    """What counts as one address: an IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in address:
        return address.encode()
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    is_ipv4 = packed.startswith(b"\0" * 10 + b"\xff\xff")
    return socket.inet_ntoa(packed[12:]).encode() if is_ipv4 else packed[:8]
