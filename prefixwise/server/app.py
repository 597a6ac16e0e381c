"""The ASGI application: middleware -> router -> handler. It runs before the engine is there, and answers 503."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from prefixwise.contract.errors import MethodNotAllowedError, NotFoundError, quote
from prefixwise.server.answers import send_response
from prefixwise.server.context import RequestContext
from prefixwise.server.dialects.base import Dialect
from prefixwise.server.dialects.classify import Classify, Embeddings
from prefixwise.server.dialects.cohere import CohereV1, CohereV2
from prefixwise.server.dialects.completions import ChatCompletions, Completions
from prefixwise.server.dialects.infinity import Infinity
from prefixwise.server.dialects.judge import Judging
from prefixwise.server.dialects.mixedbread import Mixedbread
from prefixwise.server.dialects.nvidia import Nvidia
from prefixwise.server.dialects.score import Score, ScoreMany
from prefixwise.server.dialects.sglang import Sglang
from prefixwise.server.dialects.tei import Tei
from prefixwise.server.dialects.vllm import GenerativeScoring, VllmScore
from prefixwise.server.dialects.voyage import Voyage
from prefixwise.server.middleware import Middleware
from prefixwise.server.routes.info import health, health_generate, metrics, model, models, server_info, tei_info
from prefixwise.server.routes.loras import load_lora, load_lora_sglang, unload_lora, unload_lora_sglang
from prefixwise.server.routes.pages import (
    docs,
    home,
    list_reports,
    openapi,
    page_file,
    reports,
    view_report,
    view_sent_report,
)
from prefixwise.server.routes.tokens import (
    detokenize,
    list_prefixes,
    pin_prefix,
    release_prefix,
    tokenize,
    tokenizer_info,
)
from prefixwise.server.scoring import score
from prefixwise.server.service import Service

Handler = Callable[[Service, RequestContext], Awaitable[Response]]


class PathHandlers(NamedTuple):
    """One path, and its handler for each method."""

    path: str
    handlers: Mapping[str, Handler]
    needs_engine: bool = True  # 503 until the engine is warm, and while the server stops


# Where a path has several dialects, the first that matches the body applies, else the last.
_SCORE: tuple[Dialect, ...] = (VllmScore(), ScoreMany(), Score())
_OTHERS: tuple[Dialect, ...] = (Voyage(), Infinity())
_V1_RERANK: Mapping[str, tuple[Dialect, ...]] = {
    "cohere": (Mixedbread(), *_OTHERS, Sglang(), CohereV1()),
    "sglang": (Mixedbread(), *_OTHERS, Sglang()),
}
_RERANK: Mapping[bool, tuple[Dialect, ...]] = {
    auto_truncate: (Tei(auto_truncate=auto_truncate), *_OTHERS, CohereV1()) for auto_truncate in (True, False)
}


async def _v1_rerank(service: Service, context: RequestContext) -> Response:
    return await score(service, context, dialects=_V1_RERANK[service.options.rerank_format])


async def _rerank(service: Service, context: RequestContext) -> Response:
    return await score(service, context, dialects=_RERANK[service.options.auto_truncate])


# The router tries them in this order: the busiest first.
ROUTES = (
    PathHandlers("/v1/score", {"POST": partial(score, dialects=_SCORE)}),
    PathHandlers("/v1/rerank", {"POST": _v1_rerank}),
    PathHandlers("/v2/rerank", {"POST": partial(score, dialects=(CohereV2(),))}),
    PathHandlers("/rerank", {"POST": _rerank}),
    PathHandlers("/v1/ranking", {"POST": partial(score, dialects=(Nvidia(),))}),
    PathHandlers("/v1/reranking", {"POST": partial(score, dialects=(Mixedbread(),))}),
    PathHandlers("/score", {"POST": partial(score, dialects=_SCORE)}),
    PathHandlers("/generative_scoring", {"POST": partial(score, dialects=(GenerativeScoring(),))}),
    PathHandlers("/v1/judge", {"POST": partial(score, dialects=(Judging(),))}),
    PathHandlers("/classify", {"POST": partial(score, dialects=(Classify(),))}),
    PathHandlers("/v1/embeddings", {"POST": partial(score, dialects=(Embeddings(),))}),
    PathHandlers("/v1/completions", {"POST": partial(score, dialects=(Completions(),))}),
    PathHandlers("/v1/chat/completions", {"POST": partial(score, dialects=(ChatCompletions(),))}),
    PathHandlers("/health", {"GET": health}),
    PathHandlers("/ping", {"GET": health, "POST": health}),
    PathHandlers("/metrics", {"GET": metrics}, needs_engine=False),
    PathHandlers("/tokenize", {"POST": tokenize}),
    PathHandlers("/detokenize", {"POST": detokenize}),
    PathHandlers("/tokenizer_info", {"GET": tokenizer_info}),
    PathHandlers("/v1/prefix", {"GET": list_prefixes, "POST": pin_prefix}),
    PathHandlers("/v1/prefix/{prefix_id}", {"DELETE": release_prefix}),
    PathHandlers("/v1/models", {"GET": models}, needs_engine=False),
    PathHandlers("/v1/models/{model}", {"GET": model}, needs_engine=False),
    PathHandlers("/v1/load_lora_adapter", {"POST": load_lora}),
    PathHandlers("/v1/unload_lora_adapter", {"POST": unload_lora}),
    PathHandlers("/load_lora_adapter", {"POST": load_lora_sglang}),
    PathHandlers("/unload_lora_adapter", {"POST": unload_lora_sglang}),
    PathHandlers("/health_generate", {"GET": health_generate}),
    PathHandlers("/info", {"GET": tei_info}),
    PathHandlers("/server_info", {"GET": server_info}, needs_engine=False),
    PathHandlers("/openapi.json", {"GET": openapi}, needs_engine=False),
    PathHandlers("/docs", {"GET": docs}, needs_engine=False),
    PathHandlers("/", {"GET": home}, needs_engine=False),
    PathHandlers("/reports", {"GET": reports}, needs_engine=False),
    PathHandlers("/reports/list", {"GET": list_reports}, needs_engine=False),
    PathHandlers("/reports/view", {"GET": view_report, "POST": view_sent_report}, needs_engine=False),
    PathHandlers("/page/{name}", {"GET": page_file}, needs_engine=False),
)


def make_app(service: Service) -> Middleware:
    """The application, for any ASGI server. `service.open(engine)` makes it ready."""
    # Each path gets all methods, so that the 405 is ours. The name of a model may hold slashes.
    routes = [Route(each.path.replace("{model}", "{model:path}"), _Endpoint(service, each)) for each in ROUTES]
    return Middleware(service, Router(routes, redirect_slashes=False, default=_not_found), partial(_route_of, routes))


def _route_of(routes: Sequence[Route], path: str) -> str | None:
    """The route that takes the path; None if none does."""
    return next((each.path_format for each in routes if each.path_regex.match(path)), None)


class _Endpoint:
    """The ASGI application of one path."""

    def __init__(self, service: Service, route: PathHandlers) -> None:
        self._service = service
        self._path = route.path
        self._handlers = dict(route.handlers)
        if "GET" in route.handlers:
            self._handlers["HEAD"] = route.handlers["GET"]
        self._needs_engine = route.needs_engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        context.route = self._path
        handler = self._handlers.get(context.method)
        if handler is None:
            allowed = ", ".join(self._handlers)
            context.add_header(b"allow", allowed.encode())
            message = f"{context.path} takes {allowed}, got {context.method}"
            raise MethodNotAllowedError(message, code="method_not_allowed")
        if self._needs_engine:
            self._service.check_ready()
        response = await handler(self._service, context)
        await send_response(context, response, self._service.options)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    path = RequestContext.of(scope).path
    raise NotFoundError(f"there is nothing at {quote(path)}; /docs lists all routes", code="not_found")
