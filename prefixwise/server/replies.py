"""What goes back: JSON responses, and errors as responses. The last step of every route."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.responses import Response

from prefixwise.contract.errors import QueueFullError, RequestError


class JsonBytes(Response):
    """A response whose JSON is already text."""

    media_type = "application/json"


def json_reply(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The body as JSON; numpy's numbers and arrays count as Python's."""
    content = orjson.dumps(body, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    return JsonBytes(content, status, headers)


def error_reply(error: RequestError, body: object) -> Response:
    """The error in the words of the caller's dialect, and when to come again where that is known."""
    headers = {"retry-after": str(error.retry_after)} if isinstance(error, QueueFullError) else None
    return json_reply(body, error.status, headers)
