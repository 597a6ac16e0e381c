"""HTTP requests and responses as values, and the server's application as a function from one to the other.

A front reads a request from Ray Serve's proxy and sends it unchanged to a replica. The replica puts it through the ASGI
application that `prefixwise serve` runs, so every route, error and header is that of a single server. `merge_metrics`
joins the metrics pages of all replicas.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from starlette.types import ASGIApp, Message, Scope

from prefixwise.contract.errors import describe

Headers = tuple[tuple[bytes, bytes], ...]

_LINE_ENDS = re.compile(rb"[\r\n\0]")
REPLICA_HEADER = b"x-prefixwise-replica"  # on every response: the replica that made it


@dataclass(frozen=True)
class HttpRequest:
    """A request, as far as the server reads it."""

    method: str
    path: str
    query_string: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    client: tuple[str, int] | None = None

    def header(self, name: bytes) -> bytes | None:
        return _value(self.headers, name)

    def with_header(self, name: bytes, value: bytes) -> HttpRequest:
        """Replaces headers of the same name."""
        return replace(self, headers=_with(self.headers, name, value))


@dataclass(frozen=True)
class HttpResponse:
    """A response, as the client gets it."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        return _value(self.headers, name)

    def with_header(self, name: bytes, value: bytes) -> HttpResponse:
        """Replaces headers of the same name."""
        return replace(self, headers=_with(self.headers, name, value))

    @property
    def replica(self) -> str:
        """The replica that made it; empty for a front's own response."""
        return (self.header(REPLICA_HEADER) or b"").decode()

    def with_body(self, body: bytes) -> HttpResponse:
        """The same response with another body, and without a replica's name."""
        headers = tuple((key, value) for key, value in self.headers if key != REPLICA_HEADER)
        return HttpResponse(self.status, _with(headers, b"content-length", str(len(body)).encode()), body)


def checked_response(found: object) -> HttpResponse:
    """What a replica returned, if it can be sent to a client. Raises ValueError."""
    if not isinstance(found, HttpResponse):
        raise ValueError(f"expected a response, got {type(found).__name__}")
    status, headers, body = found.status, found.headers, found.body
    if not (isinstance(status, int) and 200 <= status <= 599 and isinstance(body, bytes)):
        raise ValueError(f"expected a status and bytes, got {describe(status)} and {type(body).__name__}")
    for pair in headers if isinstance(headers, tuple) else (None,):
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_header_text, pair))):
            raise ValueError(f"expected headers of bytes without line ends, got {describe(pair)}")
    return found


def _is_header_text(part: object) -> bool:
    return isinstance(part, bytes) and not _LINE_ENDS.search(part)


def _value(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def _with(headers: Headers, name: bytes, value: bytes) -> Headers:
    return (*((key, each) for key, each in headers if key != name), (name, value))


async def answer(app: ASGIApp, request: HttpRequest) -> HttpResponse:
    """Put the request through the application. Cancelling is like a client that disconnects."""
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
        self.gone = asyncio.Event()  # the client has its response, or has disconnected
        self._body: bytes | None = request.body
        self._start: Message | None = None
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        """The whole body at once; then `http.disconnect`, which waits for the client unless a response has begun."""
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
        assert self._start is not None, "the middleware always responds"
        headers = tuple((bytes(name), bytes(value)) for name, value in self._start["headers"])
        body = b"".join(self._parts)
        if body:  # a long one was made in pieces, without its length
            headers = _with(headers, b"content-length", str(len(body)).encode())
        return HttpResponse(self._start["status"], headers, body)


_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<rest>.+)")
_LABEL = "replica"


def merge_metrics(pages: Mapping[str, str]) -> str:
    """One Prometheus page from a page per replica; every sample gets a label with its replica. Families are in the
    order of the first page, each with one HELP and TYPE."""
    families: dict[str, list[str]] = {}
    heads: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                families.setdefault(family, []).append(_labelled(line, replica))
    lines = [line for family in heads for line in (*heads[family], *families.get(family, ()))]
    return "\n".join(lines) + "\n"


def _labelled(sample: str, replica: str) -> str:
    found = _SAMPLE.fullmatch(sample)
    if found is None:
        return sample
    own = f'{_LABEL}="{replica}"'
    labels = f"{own},{found['labels']}" if found["labels"] else own
    return f"{found['name']}{{{labels}}} {found['rest']}"
