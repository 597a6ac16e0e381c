"""What clients of Serve's proxy get where it has no answer of a front. (On a cluster: tests/hosts/test_cluster.py.)"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from prefixwise.cluster import proxy
from prefixwise.cluster.connection import PROXY_ENVIRONMENT
from prefixwise.cluster.proxy import middlewares

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def answer(app: App, method: str, path: str, **request: Any) -> httpx.Response:
    (middleware,) = middlewares()
    wrap: Any = middleware.cls

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(wrap(app)), base_url="http://proxy") as client:
            return await client.request(method, path, **request)

    return asyncio.run(ask())


def answers(response: Response) -> App:
    return response


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """As the proxy does for a front that has died."""


async def fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("of the proxy")


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("app", "status", "code"),
    [
        (nothing, 503, "replicas_gone"),
        (fails, 503, "replicas_gone"),
        (answers(PlainTextResponse("unavailable", 503)), 503, "not_ready"),
        (answers(PlainTextResponse("Request timed out after 20s.", 408)), 504, "deadline_exceeded"),
    ],
)
def test_what_is_no_answer_of_a_front_is_an_error_of_ours(app: App, status: int, code: str) -> None:
    found = answer(app, "POST", "/v1/score")
    assert (found.status_code, found.json()["error"]["code"]) == (status, code)
    assert found.headers.get("retry-after") == ("1" if status == 503 else None)


def test_a_front_that_does_not_answer_in_the_client_s_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "PROXY_GRACE", 0.1)
    found = answer(never, "POST", "/v1/score", headers={"x-request-timeout": "0.1"})
    assert (found.status_code, found.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("path", "response"),
    [
        ("/v1/score", JSONResponse({"error": {"code": "engine_failed"}}, 503)),
        ("/v1/score", JSONResponse({"scores": []})),
        ("/metrics", PlainTextResponse("a 1\n")),
        ("/-/healthz", PlainTextResponse("unhealthy", 503)),
    ],
)
def test_answers_pass_unchanged(path: str, response: Any) -> None:
    found = answer(response, "GET", path)
    assert (found.status_code, found.content) == (response.status_code, response.body)


def test_serve_finds_the_middleware_by_its_name() -> None:
    module, _, name = PROXY_ENVIRONMENT["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].rpartition(".")
    assert (module, name) == (middlewares.__module__, middlewares.__name__)
