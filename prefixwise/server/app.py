"""The ASGI application: gate -> router -> endpoint -> route. Made before the engine is there."""

from __future__ import annotations

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from prefixwise.contract.describe import quote
from prefixwise.contract.errors import NotFoundError
from prefixwise.server.call import Call
from prefixwise.server.endpoint import route
from prefixwise.server.gate import Gate
from prefixwise.server.routes.docs import docs, openapi
from prefixwise.server.routes.health import health, health_generate
from prefixwise.server.routes.info import metrics, models, server_info, tei_info
from prefixwise.server.routes.page import home, page_file
from prefixwise.server.routes.prefix import list_prefixes, pin_prefix, release_prefix
from prefixwise.server.routes.reports import list_reports, reports, view_report, view_sent_report
from prefixwise.server.routes.rerank import rerank, rerank_v1, rerank_v2
from prefixwise.server.routes.score import score
from prefixwise.server.routes.tokenize import tokenize
from prefixwise.server.service import Service


def make_app(service: Service) -> Gate:
    """For any ASGI server. `service.open(engine)` makes it ready."""
    return Gate(service, Router(_routes(service), redirect_slashes=False, default=_not_found))


def _routes(service: Service) -> list[Route]:
    """The busiest first: they are tried in this order."""
    return [
        route(service, "/v1/score", {"POST": score}),
        route(service, "/v1/rerank", {"POST": rerank_v1}),
        route(service, "/v2/rerank", {"POST": rerank_v2}),
        route(service, "/rerank", {"POST": rerank}),
        route(service, "/health", {"GET": health}),
        route(service, "/metrics", {"GET": metrics}, needs_engine=False),
        route(service, "/tokenize", {"POST": tokenize}),
        route(service, "/v1/prefix", {"GET": list_prefixes, "POST": pin_prefix}),
        route(service, "/v1/prefix/{prefix_id}", {"DELETE": release_prefix}),
        route(service, "/v1/models", {"GET": models}, needs_engine=False),
        route(service, "/health_generate", {"GET": health_generate}),
        route(service, "/info", {"GET": tei_info}),
        route(service, "/server_info", {"GET": server_info}, needs_engine=False),
        route(service, "/openapi.json", {"GET": openapi}, needs_engine=False),
        route(service, "/docs", {"GET": docs}, needs_engine=False),
        route(service, "/", {"GET": home}, needs_engine=False),
        route(service, "/reports", {"GET": reports}, needs_engine=False),
        route(service, "/reports/list", {"GET": list_reports}, needs_engine=False),
        route(service, "/reports/view", {"GET": view_report, "POST": view_sent_report}, needs_engine=False),
        route(service, "/page/{name}", {"GET": page_file}, needs_engine=False),
    ]


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    path = Call.of(scope).path
    raise NotFoundError(f"there is nothing at {quote(path)}; /docs lists all routes", code="not_found")
