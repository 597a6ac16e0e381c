"""HTTP as the clients speak it: one kept connection, and ways to use it badly."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import TypeVar

from prefixwise.bench.run.load_http import AnswerReader, BadAnswerError

Result = TypeVar("Result")

_READ_BYTES = 1 << 16
_SMALL_BUFFER = 4096  # of a slow reader's socket, so that the server feels it


class UnreachableError(Exception):
    """Nobody accepts connections."""


class LostError(Exception):
    """The server closed the connection without a whole response."""


def http_request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request."""
    fields = {"Host": "127.0.0.1", "Content-Length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


class Connection:
    """A connection that is opened when it is needed and kept while the server keeps it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body. Sends it again where the server had closed the kept connection before it.

        Raises UnreachableError, LostError.
        """
        was_kept = self._streams is not None
        reader, writer = self._streams or await open_streams(self._port)
        self._streams = None
        answer = AnswerReader()
        try:
            writer.write(request)
            await _read(reader, answer)
        except LostError:
            await close(writer)
            if was_kept and not answer.has_begun:
                return await self.ask(request)
            raise
        except BaseException:
            writer.transport.abort()
            raise
        if answer.may_be_followed:
            self._streams = reader, writer
        else:
            await close(writer)
        return answer.status, bytes(answer.body)

    async def close(self) -> None:
        """The next request opens another one."""
        if self._streams is not None:
            streams, self._streams = self._streams, None
            await close(streams[1])


async def open_streams(port: int, *, small: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """`small`: with little room for what the server sends. Raises UnreachableError."""
    connection = socket.socket()
    connection.setblocking(False)
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    except OSError as error:
        connection.close()
        raise UnreachableError(str(error)) from None
    except BaseException:
        connection.close()
        raise
    return await asyncio.open_connection(sock=connection, limit=_SMALL_BUFFER if small else _READ_BYTES)


async def ask_slowly(port: int, request: bytes, *, slow: str, pause: float) -> tuple[int, bytes]:
    """Send the request in ten pieces (`slow="writer"`), or read little by little (`slow="reader"`).

    Raises UnreachableError, LostError.
    """
    reader, writer = await open_streams(port, small=slow == "reader")
    answer = AnswerReader()
    try:
        size = len(request) if slow == "reader" else -(-len(request) // 10)
        for start in range(0, len(request), size):
            writer.write(request[start : start + size])
            await _lost_if_closed(writer.drain())
            await asyncio.sleep(pause)
        await _read(reader, answer, _SMALL_BUFFER if slow == "reader" else _READ_BYTES, pause)
    finally:
        await close(writer)
    return answer.status, bytes(answer.body)


async def hang_up(port: int, request: bytes, sent: int, seconds: float, *, reads: bool, aborts: bool) -> None:
    """Send the first bytes of a request, wait for the seconds or the first byte of the response, and go.

    Raises UnreachableError.
    """
    reader, writer = await open_streams(port)
    with suppress(LostError):
        writer.write(request[:sent])
        await _lost_if_closed(writer.drain())
        if reads:
            await _lost_if_closed(reader.read(1))
        await asyncio.sleep(seconds)
    if aborts:
        writer.transport.abort()
    await close(writer)


async def _read(reader: asyncio.StreamReader, answer: AnswerReader, size: int = _READ_BYTES, pause: float = 0) -> None:
    while not answer.is_complete:
        part = await _lost_if_closed(reader.read(size))
        try:
            if not part and not answer.end():
                raise LostError(f"closed after {len(answer.body)} bytes of a body with status {answer.status}")
            answer.feed(part)
        except BadAnswerError as error:
            raise LostError(str(error)) from None
        if pause:
            await asyncio.sleep(pause)


async def _lost_if_closed(waiting: Awaitable[Result]) -> Result:
    try:
        return await waiting
    except OSError as error:
        raise LostError(str(error) or type(error).__name__) from None


async def close(writer: asyncio.StreamWriter) -> None:
    """Also where the other side is gone."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
