"""A route's place in the router: which functions answer which methods, and whether they need the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from prefixwise.contract.errors import MethodNotAllowedError
from prefixwise.server.call import Call
from prefixwise.server.service import Service

Handler = Callable[[Service, Call], Awaitable[Response]]


class Endpoint:
    """One path. `needs_engine`: before the engine is warm, and while the server stops, it answers 503."""

    def __init__(self, service: Service, handlers: Mapping[str, Handler], *, needs_engine: bool) -> None:
        self._service = service
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]
        self._needs_engine = needs_engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call.of(scope)
        handler = self._handlers.get(call.method)
        if handler is None:
            raise self._not_allowed(call)
        if self._needs_engine:
            self._service.lifecycle.check_ready()
        response = await handler(self._service, call)
        await response(scope, receive, send)

    def _not_allowed(self, call: Call) -> MethodNotAllowedError:
        allowed = ", ".join(self._handlers)
        call.add_header(b"allow", allowed.encode())
        message = f"{call.path} takes {allowed}, got {call.method}"
        return MethodNotAllowedError(message, code="method_not_allowed")


def route(service: Service, path: str, handlers: Mapping[str, Handler], *, needs_engine: bool = True) -> Route:
    """For the router, which gives it every method, so that the refusal is ours."""
    return Route(path, Endpoint(service, handlers, needs_engine=needs_engine))
