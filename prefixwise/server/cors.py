"""Which web pages may read our responses. Part of the gate: every response gets its headers, errors too."""

from __future__ import annotations

import re

from starlette.responses import Response

from prefixwise.server.call import Call

_METHODS = "GET, POST, DELETE"
_EXPOSED = b"X-Request-Id, Retry-After"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2000}")


class Cors:
    """The origins that are allowed; with none, nothing is added and no preflight is answered."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def add_headers(self, call: Call) -> None:
        """Say to the browser that the page may read this response."""
        if not self._origins:
            return
        if not self._any:
            call.add_header(b"vary", b"Origin")
        origin = call.headers.get(b"origin")
        if origin is not None and self._allows(origin):
            call.add_header(b"access-control-allow-origin", b"*" if self._any else origin)
            call.add_header(b"access-control-expose-headers", _EXPOSED)

    def preflight(self, call: Call) -> Response | None:
        """The answer to a browser that asks before it sends; None where this is no such question, or not allowed."""
        origin = call.headers.get(b"origin")
        is_question = call.method == "OPTIONS" and b"access-control-request-method" in call.headers
        if not is_question or origin is None or not self._allows(origin):
            return None
        headers = {"access-control-allow-methods": _METHODS, "access-control-max-age": "600"}
        wanted = call.headers.get(b"access-control-request-headers", b"")
        if _HEADER_NAMES.fullmatch(wanted):
            headers["access-control-allow-headers"] = wanted.decode("ascii")
        return Response(status_code=204, headers=headers)

    def _allows(self, origin: bytes) -> bool:
        return self._any or origin in self._origins
