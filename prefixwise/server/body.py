"""A request's body, from the socket to a JSON object: bounded in size, whatever the client claims."""

from __future__ import annotations

import asyncio
import contextlib

import orjson
from starlette.responses import Response

from prefixwise.contract.describe import describe
from prefixwise.contract.errors import CancelledError, InvalidRequestError, RequestTooLargeError
from prefixwise.server.call import Call

# A client that is still sending must be able to read the refusal: what it sends is read and thrown away for a while.
_DRAIN_SECONDS = 5.0


async def read_body(call: Call, max_bytes: int) -> bytes:
    """All of it. Raises request_too_large as soon as that is known."""
    _check_announced(call, max_bytes)
    message = await call.next_body_message()
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        _check_size(len(body), max_bytes)
        return body
    parts, size = [body], len(body)
    while message.get("more_body", False):
        _check_size(size, max_bytes)
        message = await call.next_body_message()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    _check_size(size, max_bytes)
    return b"".join(parts)


def decode_object(body: bytes) -> dict[str, object]:
    """The body as a JSON object. Raises invalid_json."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        message = f"the body must be a JSON object in UTF-8, got {_what(body)}: {error}"
        raise InvalidRequestError(message, code="invalid_json") from None
    if not isinstance(value, dict):
        message = f"the body must be a JSON object, got {describe(value)}"
        raise InvalidRequestError(message, code="invalid_json")
    return value


async def send_and_drain(call: Call, response: Response) -> None:
    """Answer a client that may still be sending, then close the connection without cutting its answer off."""
    headers = [*response.raw_headers, (b"connection", b"close")]
    await call.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await call.send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(CancelledError, TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while (await call.next_body_message()).get("more_body", False):
                pass
    await call.send({"type": "http.response.body", "body": b""})


def _check_announced(call: Call, max_bytes: int) -> None:
    announced = call.headers.get(b"content-length", b"")
    if announced.isdigit():
        _check_size(int(announced), max_bytes)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        message = f"the body must have at most {max_bytes} bytes (--max-request-bytes), got {size} or more"
        raise RequestTooLargeError(message, code="request_too_large")


def _what(body: bytes) -> str:
    return f"{len(body)} bytes that are not" if body else "nothing"
