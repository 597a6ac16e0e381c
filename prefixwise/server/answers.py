"""Responses on their way out: JSON that is made while it is sent, in pieces, at the speed of its reader.

A dialect's JSON may hold iterators and `ScoreRows` in place of long lists. Their entries are made when they are sent,
so a response that waits for its reader is an array of numbers, not their text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import orjson
from starlette.responses import Response

from prefixwise.contract.errors import CancelledError
from prefixwise.contract.scores import ScoreRows
from prefixwise.server.config import ServerOptions
from prefixwise.server.context import JsonResponse, RequestContext

PIECE_BYTES = 64 * 2**10  # sent at a time; the transport holds about as many for a slow reader
_NUMBERS_PER_DUMP = 4096


# JSON in pieces


def whole_json(value: object) -> bytes:
    """The JSON in one."""
    return orjson.dumps(value, default=_entries)


def _entries(lazy: object) -> Sequence[object]:
    if isinstance(lazy, ScoreRows):
        return lazy[:]
    if isinstance(lazy, Iterator):
        return list(lazy)
    raise TypeError(f"{type(lazy).__name__} has no JSON")


def json_pieces(value: object) -> Iterator[bytes]:
    """The same JSON in pieces of about PIECE_BYTES; larger where one entry is."""
    parts: list[bytes] = []
    size = 0
    for fragment in _fragments(value):
        parts.append(fragment)
        size += len(fragment)
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


def _fragments(value: object) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield b"{"
        for number, (name, each) in enumerate(value.items()):
            yield (b"," if number else b"") + orjson.dumps(name) + b":"
            yield from _fragments(each)
        yield b"}"
    elif isinstance(value, ScoreRows):
        yield from _listed(_row_fragments(value))
    elif isinstance(value, Iterator):
        yield from _listed(_entry_fragments(value))
    else:
        yield orjson.dumps(value)


def _listed(entries: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    yield b"["
    for number, fragments in enumerate(entries):
        if number:
            yield b","
        yield from fragments
    yield b"]"


def _entry_fragments(entries: Iterator[object]) -> Iterator[Iterable[bytes]]:
    for entry in entries:
        is_lazy = isinstance(entry, dict) and any(isinstance(each, Iterator | ScoreRows) for each in entry.values())
        yield _fragments(entry) if is_lazy else (orjson.dumps(entry),)


def _row_fragments(rows: ScoreRows) -> Iterator[Iterable[bytes]]:
    """Many short rows at a time, or a part of a long one."""
    step = max(1, _NUMBERS_PER_DUMP // max(1, rows.num_labels))
    for first in range(0, len(rows), step):
        if rows.num_labels <= _NUMBERS_PER_DUMP:
            yield (orjson.dumps(rows[first : first + step])[1:-1],)
        else:
            yield _long_row(rows[first])


def _long_row(row: list[float] | None) -> Iterator[bytes]:
    if row is None:
        yield b"null"
        return
    parts = range(0, len(row), _NUMBERS_PER_DUMP)
    yield from _listed((orjson.dumps(row[first : first + _NUMBERS_PER_DUMP])[1:-1],) for first in parts)


# Responses


class SharedResponse(Response):
    """A response whose body all requests share, as files of the page: it takes no memory of its own."""


class StreamedJson(Response):
    """JSON that is made while it is sent. Whoever returns it has taken the memory for it."""

    media_type = "application/json"

    def __init__(self, value: object) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.value = value


async def send_response(context: RequestContext, response: Response, options: ServerOptions) -> None:
    """Send it in pieces, each when the client has read most of the one before. Cuts a client that reads too slowly.

    The client has `idle_timeout` seconds, and more as it reads: a second for each `min_transfer_rate` bytes.
    Raises body_memory_full before anything is sent.
    """
    if isinstance(response, StreamedJson):
        response, pieces = await _streamed(context, response)
    else:
        if len(response.body) > PIECE_BYTES and not isinstance(response, SharedResponse):
            context.body_share.take(len(response.body))
        pieces = _sliced((bytes(response.body),))
    start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    try:
        async with asyncio.timeout(options.idle_timeout) as limit:
            await context.send(start)
            await _send_pieces(context, pieces, limit, options)
    except TimeoutError:
        if not limit.expired():
            raise
        if context.connection is not None:
            context.connection.cut()
        context.status = CancelledError.status  # for the log: the client has not read it


async def _send_pieces(
    context: RequestContext, pieces: Iterator[bytes], limit: asyncio.Timeout, options: ServerOptions
) -> None:
    clock, sent = asyncio.get_running_loop().time, 0
    begin = clock()
    piece = next(pieces, b"")
    for following in pieces:
        await context.send({"type": "http.response.body", "body": piece, "more_body": True})
        if context.connection is not None and context.connection.is_gone:
            context.connection.leave()
            context.status = CancelledError.status
            return
        sent += len(piece)
        earned = begin + sent / options.min_transfer_rate if options.min_transfer_rate else clock()
        limit.reschedule(earned + options.idle_timeout)
        await asyncio.sleep(0)  # a client that reads at once would keep the event loop
        piece = following
    await context.send({"type": "http.response.body", "body": piece})


async def _streamed(context: RequestContext, response: StreamedJson) -> tuple[Response, Iterator[bytes]]:
    """With a Content-Length where it is short, and for HTTP/1.0, which knows no other way."""
    pieces = json_pieces(response.value)
    start = (next(pieces), next(pieces, b""))
    if start[1] and context.scope.get("http_version") != "1.0":
        return response, _sliced(chain(start, pieces))
    whole = JsonResponse(await asyncio.to_thread(b"".join, chain(start, pieces)) if start[1] else start[0])
    return whole, _sliced((bytes(whole.body),))


def _sliced(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """No piece is much larger than PIECE_BYTES; none is empty."""
    for piece in pieces:
        if len(piece) <= 2 * PIECE_BYTES:
            if piece:
                yield piece
            continue
        for first in range(0, len(piece), PIECE_BYTES):
            yield piece[first : first + PIECE_BYTES]
