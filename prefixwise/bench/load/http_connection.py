"""HTTP/1.1 for load: connections that are kept, as many as it takes, and nothing between a request and its socket.

A general client looks at every connection it has for each request; with hundreds in flight it then measures itself.
Here a request takes the connection that was used last, or opens one, and the clock of its answer stops as its last
byte is read. Proxies of the environment are not used: they would be measured, too.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from urllib.parse import urlsplit

from prefixwise.bench.load.http_answer import AnswerReader, BadAnswerError

_KEPT_SECONDS = 2.0  # less than servers keep an idle connection


class ExchangeError(Exception):
    """There is no answer: nobody to connect to, a connection that was lost, bytes that are no HTTP."""

    def __init__(self, message: str, *, had_begun: bool = True) -> None:
        super().__init__(message)
        self.had_begun = had_begun  # a byte of an answer had come: the request must not be sent again


@dataclass(frozen=True)
class HttpAnswer:
    """One, and when its last byte was read, by `perf_counter`."""

    status: int
    body: bytes
    read_at: float


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader()
        self._waiter: asyncio.Future[HttpAnswer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():  # nobody has asked
            self.close()
            return
        try:
            if self._reader.feed(data):
                self._answer()
        except BadAnswerError as error:
            self._fail(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiter is None or self._waiter.done():
            return
        if self._reader.end():
            self._answer()
        else:
            self._fail(f"the server closed the connection{'' if exc is None else f': {exc}'}")

    def _answer(self) -> None:
        assert self._waiter is not None
        self._waiter.set_result(HttpAnswer(self._reader.status, bytes(self._reader.body), perf_counter()))

    def _fail(self, message: str) -> None:
        assert self._waiter is not None
        self._waiter.set_exception(ExchangeError(message, had_begun=self._reader.has_begun))

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def may_be_kept(self) -> bool:
        """Not where the server answered before it had read all."""
        transport = self._transport
        return self.is_open and self._reader.may_be_followed and not (transport and transport.get_write_buffer_size())

    async def exchange(self, request: bytes) -> HttpAnswer:
        """Raises ExchangeError."""
        if self._transport is None:
            raise ExchangeError("the server closed the connection", had_begun=False)
        self._reader = AnswerReader()
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """At once: what is not sent yet is for nobody."""
        if self._transport is not None:
            self._transport.abort()


class ConnectionPool:
    """Connections to one server. Use it in one event loop, and close it there."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        """`base_url`: http or https, a host, perhaps a port and a path."""
        parts = urlsplit(base_url)
        assert parts.scheme in ("http", "https") and parts.hostname
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        common = {"Host": parts.netloc, "Accept": "application/json", "Accept-Encoding": "identity", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in common.items())
        self._idle: list[_Connection] = []
        self._is_closed = False

    def request(self, path: str, body: bytes) -> bytes:
        """A POST, ready to be sent."""
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    async def send(self, request: bytes) -> HttpAnswer:
        """Sends it once, or twice where the first connection was an old one that the server had just closed.

        Raises ExchangeError.
        """
        kept = self._take()
        if kept is not None:
            try:
                return await self._exchange(kept, request)
            except ExchangeError as error:
                if error.had_begun:
                    raise
        return await self._exchange(await self._open(), request)

    def _take(self) -> _Connection | None:
        """The one that was used last; those that are too old are closed."""
        newest = perf_counter() - _KEPT_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since > newest:
                return connection
            connection.close()
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise ExchangeError(str(error) or type(error).__name__) from None
        return connection

    async def _exchange(self, connection: _Connection, request: bytes) -> HttpAnswer:
        try:
            answer = await connection.exchange(request)
        except BaseException:  # a timeout, too: its answer would be taken for the next one's
            connection.close()
            raise
        if connection.may_be_kept and not self._is_closed:
            connection.idle_since = perf_counter()
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def close(self) -> None:
        """All that nobody uses; those in use when they have answered. A moment for the event loop to let go of them."""
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)
