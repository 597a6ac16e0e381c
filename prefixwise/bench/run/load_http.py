"""HTTP/1.1 for load: persistent connections, as many as it takes, and nothing between a request and its socket.

A general client looks at every connection it has for each request; with hundreds in flight it then measures itself.
Here a request takes the connection that was used last, or opens one, and the clock of its answer stops as its last
byte is read. Proxies of the environment are not used: they would be measured, too.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import NamedTuple, cast
from urllib.parse import urlsplit

_MOST_HEAD_BYTES = 64 * 1024


_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?")


_LENGTH = re.compile(r"\d{1,18}")


_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")


_NO_BODY = (204, 304)


class BadAnswerError(Exception):
    """Bytes that are no HTTP answer; the connection they came over is of no more use."""


class AnswerReader:
    """For one answer. What it has of it: `status`, `body`, and whether the connection may be used again."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.has_begun = False  # some byte of the answer has come
        self.is_complete = False
        self._keeps = True
        self._buffer = bytearray()
        self._missing = 0  # bytes of the body, or of the chunk
        self._read_more: Callable[[], bool] = self._read_head

    @property
    def may_be_followed(self) -> bool:
        """Is the connection ready for another request? Not where more came than the answer."""
        return self.is_complete and self._keeps and not self._buffer

    def feed(self, data: bytes | memoryview) -> bool:
        """Is the answer complete? Raises BadAnswerError."""
        self.has_begun = True
        self._buffer += data
        while not self.is_complete and self._read_more():
            pass
        return self.is_complete

    def end(self) -> bool:
        """The server has closed. Is the answer complete?"""
        if self._read_more == self._read_until_closed:
            self.is_complete = True
        return self.is_complete

    # Each step reads what it can, names the one after it, and says whether that may go on at once.

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEAD_BYTES or not b"HTTP/1."[: len(self._buffer)] == self._buffer[:7]:
                raise BadAnswerError(f"expected the head of an HTTP answer, got {bytes(self._buffer[:80])!r}")
            return False
        first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        found = _STATUS_LINE.fullmatch(first)
        if found is None:
            raise BadAnswerError(f"expected an HTTP status line, got {first[:80]!r}")
        self.status = int(found[2])
        if self.status >= 200:  # else a word in between: the answer is still to come
            self._choose_body(_headers(lines), is_old=found[1] == b"0")
        return True

    def _choose_body(self, headers: dict[str, str], *, is_old: bool) -> None:
        wish = headers.get("connection", "").lower()
        self._keeps = "keep-alive" in wish if is_old else "close" not in wish
        coding = headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if self.status in _NO_BODY:
            self.is_complete = True
        elif coding:
            if coding != "chunked":
                raise BadAnswerError(f"expected a chunked body, got Transfer-Encoding: {coding}")
            self._read_more = self._read_chunk_size
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise BadAnswerError(f"expected a number as Content-Length, got {length!r}")
            self._missing = int(length)
            self._read_more = self._read_sized
        else:
            self._keeps = False
            self._read_more = self._read_until_closed

    def _read_sized(self) -> bool:
        if len(self._buffer) < self._missing:
            return False
        self.body = self._buffer[: self._missing]
        del self._buffer[: self._missing]
        self.is_complete = True
        return False

    def _read_until_closed(self) -> bool:
        self.body += self._buffer
        self._buffer.clear()
        return False

    def _read_chunk_size(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        found = _CHUNK_SIZE.fullmatch(line)
        if found is None:
            raise BadAnswerError(f"expected the size of a chunk, got {line[:80]!r}")
        self._missing = int(found[1], 16)
        self._read_more = self._read_chunk if self._missing else self._read_trailer
        return True

    def _read_chunk(self) -> bool:
        if len(self._buffer) < self._missing + 2:
            return False
        if self._buffer[self._missing : self._missing + 2] != b"\r\n":
            raise BadAnswerError("expected the end of a line behind a chunk")
        self.body += self._buffer[: self._missing]
        del self._buffer[: self._missing + 2]
        self._read_more = self._read_chunk_size
        return True

    def _read_trailer(self) -> bool:
        line = self._take_line()
        self.is_complete = line == b""
        return line is not None

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEAD_BYTES:
                raise BadAnswerError(f"expected a line, got {len(self._buffer)} bytes without an end")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line


def _headers(lines: list[bytes]) -> dict[str, str]:
    """By their names in small letters; of one that comes twice, the values with a comma between them."""
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon:
            raise BadAnswerError(f"expected a header, got {line[:80]!r}")
        key, value = name.strip().lower(), value.strip()
        found[key] = f"{found[key]}, {value}" if key in found and found[key] != value else value
    return found


_KEPT_SECONDS = 2.0  # less than servers keep an idle connection


_READ_BYTES = 256 * 1024  # at once


class ExchangeError(Exception):
    """No answer: no server, a lost connection, or bytes that are not HTTP."""

    def __init__(self, message: str, *, had_begun: bool = True) -> None:
        super().__init__(message)
        self.had_begun = had_begun  # a byte of an answer had come: the request must not be sent again


class HttpAnswer(NamedTuple):
    """One, and when its last byte was read, by `perf_counter`."""

    status: int
    body: bytes
    read_at: float


OnEnd = Callable[[HttpAnswer | ExchangeError], None]


class _Connection(asyncio.BufferedProtocol):
    """One request at a time; all connections of a pool read into one buffer."""

    def __init__(self, buffer: memoryview) -> None:
        self.idle_since = 0.0
        self._buffer = buffer
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader()
        self._on_end: OnEnd | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._on_end is None:  # bytes without a request
            self.close()
            return
        try:
            if self._reader.feed(self._buffer[:nbytes]):
                self._answer()
        except BadAnswerError as error:
            self._fail(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._on_end is None:
            return
        if self._reader.end():
            self._answer()
        else:
            self._fail(f"the server closed the connection{'' if exc is None else f': {exc}'}")

    def _answer(self) -> None:
        self._end(HttpAnswer(self._reader.status, bytes(self._reader.body), perf_counter()))

    def _fail(self, message: str) -> None:
        self._end(ExchangeError(message, had_begun=self._reader.has_begun))

    def _end(self, found: HttpAnswer | ExchangeError) -> None:
        on_end, self._on_end = self._on_end, None
        assert on_end is not None
        on_end(found)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def may_be_kept(self) -> bool:
        """Not where the server answered before it had read all."""
        transport = self._transport
        return self.is_open and self._reader.may_be_followed and not (transport and transport.get_write_buffer_size())

    def begin(self, request: bytes, on_end: OnEnd) -> None:
        """Send it now; `on_end` is called later, once, unless the connection is closed before."""
        self._reader = AnswerReader()
        self._on_end = on_end
        if self._transport is None:
            asyncio.get_running_loop().call_soon(self.connection_lost, None)
        else:
            self._transport.write(request)

    def close(self) -> None:
        """Close at once; unsent bytes are dropped, and nobody is called."""
        self._on_end = None
        if self._transport is not None:
            self._transport.abort()


class Exchange:
    """A request under way. No task of its own: the answer's last byte calls `on_end`."""

    __slots__ = ("_connection", "_is_cancelled", "_is_kept", "_on_end", "_opening", "_pool", "_request")

    def __init__(self, pool: ConnectionPool, request: bytes, on_end: OnEnd) -> None:
        self._pool = pool
        self._request = request
        self._on_end = on_end
        self._opening: asyncio.Task[_Connection] | None = None
        self._is_cancelled = False
        self._connection = pool.take()
        self._is_kept = self._connection is not None
        if self._connection is None:
            self._open()
        else:
            self._connection.begin(request, self._end)

    def _open(self) -> None:
        self._connection = None
        self._opening = asyncio.get_running_loop().create_task(self._pool.open())
        self._opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[_Connection]) -> None:
        if opening.cancelled():
            return
        error = opening.exception()
        if error is not None:
            if not self._is_cancelled:
                self._on_end(ExchangeError(str(error) or type(error).__name__))
            return
        self._connection = opening.result()
        if self._is_cancelled:
            self._connection.close()
        else:
            self._connection.begin(self._request, self._end)

    def _end(self, found: HttpAnswer | ExchangeError) -> None:
        """Sends it a second time where the connection was an old one that the server had just closed."""
        assert self._connection is not None
        self._pool.give_back(self._connection, is_usable=isinstance(found, HttpAnswer))
        if self._is_kept and isinstance(found, ExchangeError) and not found.had_begun:
            self._is_kept = False
            self._open()
        else:
            self._on_end(found)

    def cancel(self) -> None:
        """`on_end` is not called any more. The connection is closed: its answer would be taken for the next one's."""
        self._is_cancelled = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.close()

    async def cancelled(self) -> None:
        """After `cancel`: until nothing of it is left in the event loop."""
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)


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
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._is_closed = False

    def request(self, path: str, body: bytes) -> bytes:
        """A POST, ready to be sent."""
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    def begin(self, request: bytes, on_end: OnEnd) -> Exchange:
        """Sends it now, or as soon as a connection is open. `on_end` is called later, once."""
        return Exchange(self, request, on_end)

    async def send(self, request: bytes) -> HttpAnswer:
        """The same for whom waits for the answer. Raises ExchangeError."""
        waiter: asyncio.Future[HttpAnswer | ExchangeError] = asyncio.get_running_loop().create_future()
        exchange = self.begin(request, lambda found: None if waiter.done() else waiter.set_result(found))
        try:
            found = await waiter
        except BaseException:  # a timeout
            exchange.cancel()
            await exchange.cancelled()
            raise
        if isinstance(found, ExchangeError):
            raise found
        return found

    def take(self) -> _Connection | None:
        """The one that was used last; those that are too old are closed."""
        newest = perf_counter() - _KEPT_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since > newest:
                return connection
            connection.close()
        return None

    async def open(self) -> _Connection:
        """A new one. Raises OSError."""
        loop = asyncio.get_running_loop()
        made = partial(_Connection, self._buffer)
        _, connection = await loop.create_connection(made, self._host, self._port, ssl=self._ssl)
        return connection

    def give_back(self, connection: _Connection, *, is_usable: bool) -> None:
        """Keep it for the next request, or close it."""
        if is_usable and connection.may_be_kept and not self._is_closed:
            connection.idle_since = perf_counter()
            self._idle.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        """Close idle connections now and busy ones after their answer; lets the event loop finish."""
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)
