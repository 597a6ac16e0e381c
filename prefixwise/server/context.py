"""`RequestContext`: one HTTP request on its way through the server. Also its body (bounded in size) and its replies."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from prefixwise.contract.errors import (
    CancelledError,
    InvalidRequestError,
    RequestError,
    RequestTooLargeError,
    ServiceError,
    describe,
    quote,
)
from prefixwise.engine.request_state import RequestState
from prefixwise.server.body_memory import BodyShare
from prefixwise.server.json_body import parse_json

# Load balancers ask for these every few seconds, under any host name and without a key. `/ping` is SageMaker's.
HEALTH_PATHS = ("/health", "/ping")
CONNECTION_KEY = "prefixwise.connection"  # in the scope; absent where no socket is ours, as in a cluster

_PRINTABLE_ID = re.compile(rb"[\x20-\x7e]{1,128}")
_SCOPE_KEY = "prefixwise.context"
# A client that is still sending must be able to read the refusal, so the server reads and drops its body for a while.
_DRAIN_SECONDS = 5.0


@dataclass(slots=True)
class RequestStats:
    """The size and cost of a scoring request, for the log and the metrics. `scoring.py` fills it in."""

    requests: int | None = None  # in one call
    items: int | None = None
    prompt_tokens: int | None = None
    labels: int | None = None
    algorithm: str | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    device_seconds: float | None = None


class Connection(Protocol):
    """What a response may know of the connection that it goes to (`connections.py`)."""

    @property
    def is_gone(self) -> bool:
        """Whether nobody reads the response any more."""

    def leave(self) -> None:
        """The rest of the response is not sent: its client is gone."""

    def cut(self) -> None:
        """End the connection: its client reads too slowly."""


class Trace(Protocol):
    """The trace of a request (`tracing.py`)."""

    @property
    def ids(self) -> Mapping[str, str]:
        """For the log."""

    def end_stage(self, name: str) -> None:
        """A stage has ended now."""

    def end_steps(self, states: Sequence[RequestState]) -> None:
        """The requests of the call are done, or were given up."""

    def end(self, context: RequestContext, route: str, status: int, model: str) -> None:
        """The request has ended."""


class RequestContext:
    """The middleware makes one per request; every handler gets it."""

    __slots__ = (
        "_ends_connection",
        "_headers_to_add",
        "_send",
        "arrival",
        "body_share",
        "error_body",
        "error_code",
        "has_whole_body",
        "headers",
        "id",
        "is_aborted",
        "receive",
        "route",
        "scope",
        "stats",
        "status",
        "trace",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, body_share: BodyShare) -> None:
        self.arrival = time.monotonic()
        self.body_share = body_share  # the memory that its body and its response take
        self.has_whole_body = False  # nothing of its body is still to come
        self.scope = scope
        self.receive = receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.id = _request_id(self.headers.get(b"x-request-id"))
        self.status: int | None = None  # None: no response has started
        self.stats: RequestStats | None = None
        self.route: str | None = None  # the path with its parameters' names; None: no route matches
        self.trace: Trace | None = None  # None: there are no traces, or it is not sampled
        self.error_body: Callable[[RequestError], object] = RequestError.to_body  # a dialect may set its own
        self.error_code: str | None = None  # of the error that was sent
        self.is_aborted = False  # the server cancelled it after the grace period
        self._ends_connection = False
        self._send = send
        self._headers_to_add = [(b"x-request-id", self.id.encode())]
        scope[_SCOPE_KEY] = self

    @staticmethod
    def of(scope: Scope) -> RequestContext:
        """The context that the middleware made for this scope."""
        context: RequestContext = scope[_SCOPE_KEY]
        return context

    def leave_scope(self) -> None:
        """Break the reference cycle between scope and context, so that neither waits for the garbage collector."""
        del self.scope[_SCOPE_KEY]

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def path_params(self) -> dict[str, str]:
        params: dict[str, str] = self.scope["path_params"]
        return params

    @property
    def connection(self) -> Connection | None:
        connection: Connection | None = self.scope.get(CONNECTION_KEY)
        return connection

    def end_stage(self, name: str) -> None:
        """A stage of the request's path has ended now: a span of its trace, if it has one."""
        if self.trace is not None:
            self.trace.end_stage(name)

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the response, also where it is an error."""
        self._headers_to_add.append((name, value))

    def end_connection(self) -> None:
        """The connection is closed behind the response, and the response says so, if it has not started yet."""
        if not self._ends_connection:
            self._ends_connection = True
            self.add_header(b"connection", b"close")

    @property
    def ends_connection(self) -> bool:
        """Whether the connection is closed behind the response, by the server's will or the client's."""
        return (
            self._ends_connection
            or self.scope.get("http_version") == "1.0"
            or b"close" in self.headers.get(b"connection", b"").lower()
        )

    async def send(self, message: Message) -> None:
        """Send a message to the client. The start of the response gets the added headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._headers_to_add]
        await self._send(message)

    async def next_body_message(self) -> Message:
        """The next part of the body. Raises CancelledError if the client has disconnected."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise CancelledError
        self.has_whole_body = not message.get("more_body", False)
        return message

    async def until_disconnected(self) -> None:
        """Return when the client has disconnected or has its response. Call it after the whole body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


def _request_id(sent: bytes | None) -> str:
    if sent is not None and _PRINTABLE_ID.fullmatch(sent):
        return sent.decode("ascii")
    return new_request_id()


def new_request_id() -> str:
    """A random id. Not from `os.urandom`, which releases the interpreter lock, perhaps for milliseconds."""
    return f"{random.getrandbits(64):016x}"


async def read_body(context: RequestContext, max_bytes: int) -> bytes:
    """The whole body. Raises unsupported_encoding, and request_too_large or body_memory_full once the size is known.

    A body takes memory as it arrives, not as it is announced: a client that only announces takes nothing from others.
    """
    _check_encoding(context.headers.get(b"content-encoding", b"identity"))
    announced = context.headers.get(b"content-length", b"")
    if announced.isdigit():
        _check_size(int(announced), max_bytes)
        context.body_share.check(int(announced))
    parts: list[bytes] = []
    size = 0
    while not context.has_whole_body:
        message = await context.next_body_message()
        part: bytes = message.get("body", b"")
        size += len(part)
        _check_size(size, max_bytes)
        context.body_share.take(len(part))
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_encoding(encoding: bytes) -> None:
    """A small compressed body may be of any size, so none is taken."""
    if encoding.strip().lower() not in (b"identity", b""):
        got = quote(encoding.decode("latin-1"))
        message = f"the body must be sent as it is, without Content-Encoding, got Content-Encoding: {got}"
        raise InvalidRequestError(message, code="unsupported_encoding")


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        message = f"the body must have at most {max_bytes} bytes (--max-request-bytes), got {size} or more"
        raise RequestTooLargeError(message, code="request_too_large")


def decode_object(content: bytes) -> dict[str, object]:
    """The body as a JSON object. Raises invalid_json, and too_many_values. Large bodies are work for a thread."""
    try:
        value = parse_json(content)
    except orjson.JSONDecodeError as error:
        got = f"{len(content)} bytes that are not" if content else "nothing"
        message = f"the body must be a JSON object in UTF-8, got {got}: {error}"
        raise InvalidRequestError(message, code="invalid_json") from None
    if not isinstance(value, dict):
        message = f"the body must be a JSON object, got {describe(value)}"
        raise InvalidRequestError(message, code="invalid_json")
    return value


class JsonResponse(Response):
    """A response whose content is encoded JSON."""

    media_type = "application/json"


def json_reply(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The body as JSON. NumPy's numbers and arrays are encoded as Python's."""
    content = orjson.dumps(body, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    return JsonResponse(content, status, headers)


def error_reply(error: RequestError, body: object) -> Response:
    """The error with the body that the dialect made for it, and `Retry-After` where it is known."""
    seconds = error.retry_after if isinstance(error, ServiceError) else None
    return json_reply(body, error.status, None if seconds is None else {"retry-after": str(seconds)})


async def send_and_drain(context: RequestContext, response: Response) -> None:
    """Answer a client that may still be sending, then close the connection without cutting the answer off."""
    context.end_connection()
    start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    await context.send(start)
    await context.send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(CancelledError, TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while (await context.next_body_message()).get("more_body", False):
                pass
    await context.send({"type": "http.response.body", "body": b""})
