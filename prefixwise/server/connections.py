"""Limits on the connections of a server, in all and in time.

connections   in all and per address; beyond them a small reserve answers `/health` and `/metrics` alone
head          the seconds until it is complete
idle          seconds between requests, and seconds without a byte while the server waits for the client
rate          bytes a second of a body that takes longer; `answers.py` has the same for responses

What needs a clock is done once a second (`sweep`). `http_protocol.py` is one connection.
"""

from __future__ import annotations

import collections
import logging
import socket
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from prefixwise.contract.errors import UnavailableError
from prefixwise.server.config import ServerOptions
from prefixwise.server.context import HEALTH_PATHS, new_request_id
from prefixwise.server.http_protocol import HttpProtocol, RefusedError
from prefixwise.server.metrics import Metrics
from prefixwise.server.usage import CONNECTIONS, Usage, address_field

log = logging.getLogger("prefixwise")

RESERVE = 16  # connections beyond the limits
_RESERVE_PATHS = (*HEALTH_PATHS, "/metrics")
_ANSWER_SECONDS = 5.0  # for a handler to answer a request whose time is over
_LOG_SECONDS = 10.0  # between two lines about refused connections


def _header_timeout(seconds: float) -> RefusedError:
    message = f"all headers must arrive within {seconds:g} seconds (--header-timeout), and they have not"
    return RefusedError(408, message, code="header_timeout")


def _idle_timeout(seconds: float) -> RefusedError:
    message = f"the body must not pause for more than {seconds:g} seconds (--idle-timeout), and it has"
    return RefusedError(408, message, code="idle_timeout")


def _slow_transfer(rate: int) -> RefusedError:
    message = f"the body must arrive at {rate} bytes a second or more (--min-transfer-rate), and it has not"
    return RefusedError(408, message, code="slow_transfer")


def _body_timeout(seconds: float) -> RefusedError:
    message = f"the body must arrive within {seconds:g} seconds (--request-timeout), and it has not"
    return RefusedError(408, message, code="idle_timeout")


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
