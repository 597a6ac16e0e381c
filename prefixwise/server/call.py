"""`Call`: one HTTP request on its way through the server, and what the log will say about it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from prefixwise.contract.errors import CancelledError, RequestError

_SANE_ID = re.compile(rb"[\x20-\x7e]{1,128}")
_KEY = "prefixwise.call"  # where in the scope it stands


@dataclass(slots=True)
class Geometry:
    """What a scoring request was and cost; a route fills in what it learns."""

    items: int | None = None
    prompt_tokens: int | None = None
    labels: int | None = None
    algorithm: str | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    device_seconds: float | None = None


class Call:
    """Made by the gate for every request; routes get it as their one argument."""

    __slots__ = (
        "_headers_to_add",
        "_send",
        "arrival",
        "error_body",
        "geometry",
        "headers",
        "id",
        "is_aborted",
        "receive",
        "scope",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.arrival = time.monotonic()
        self.scope = scope
        self.receive = receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.id = _request_id(self.headers.get(b"x-request-id"))
        self.status: int | None = None  # None: no response has begun
        self.geometry: Geometry | None = None
        self.error_body: Callable[[RequestError], object] = RequestError.to_body  # a dialect may have another one
        self.is_aborted = False  # the server's grace period is over
        self._send = send
        self._headers_to_add = [(b"x-request-id", self.id.encode())]
        scope[_KEY] = self

    @staticmethod
    def of(scope: Scope) -> Call:
        """The call that the gate made for this scope."""
        call: Call = scope[_KEY]
        return call

    def leave_scope(self) -> None:
        """It is over. The two hold each other, and would wait for the garbage collector with all that they hold."""
        del self.scope[_KEY]

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

    def add_header(self, name: bytes, value: bytes) -> None:
        """To whatever response there will be."""
        self._headers_to_add.append((name, value))

    async def send(self, message: Message) -> None:
        """To the client; the response's start gets the headers that every response has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._headers_to_add]
        await self._send(message)

    async def next_body_message(self) -> Message:
        """Part of the body. Raises CancelledError where the client has gone."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise CancelledError
        return message

    async def until_disconnected(self) -> None:
        """Returns when the client has gone, or has its answer. Only after the whole body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


def _request_id(sent: bytes | None) -> str:
    if sent is not None and _SANE_ID.fullmatch(sent):
        return sent.decode("ascii")
    return new_request_id()


def new_request_id() -> str:
    """Not from the system's randomness: asking for it gives up the interpreter lock, perhaps for milliseconds."""
    return f"{random.getrandbits(64):016x}"
