"""The server's application without a socket: a fake engine, and a client that talks ASGI to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np

from prefixwise.backends.fake import FakeBackend, fake_logits
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.forward.backend import PROBE, Backend
from prefixwise.forward.batch import ForwardBatch, RunningForward
from prefixwise.prompts.tokenizer import TextTokenizer
from prefixwise.server.app import make_app
from prefixwise.server.config import ReportSource, ServerOptions
from prefixwise.server.service import Service

MODEL = "fake-model"
IDS_REQUEST: dict[str, Any] = {
    "query": [1, 2, 3],
    "items": [[4, 5], [6], []],
    "label_token_ids": [7, 8],
    "score_mode": "logit",
}


class HeldBackend(FakeBackend):
    """Its forward passes end when `let_go` is set; `has_begun` is set while one is running."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.let_go = threading.Event()
        self.has_begun = threading.Event()

    def start(self, batch: ForwardBatch) -> RunningForward:
        running = super().start(batch)

        def wait() -> Any:
            self.has_begun.set()
            assert self.let_go.wait(30), "the test has not set `let_go`"
            return running.wait()

        return replace(running, wait=wait)

    def close(self) -> None:
        self.let_go.set()
        super().close()


class BrokenBackend(FakeBackend):
    """Every forward of a request fails, with a message that must not leave the server. The device itself works."""

    def start(self, batch: ForwardBatch) -> RunningForward:
        if batch is PROBE:
            return super().start(batch)
        raise RuntimeError("secret of the device")


def expected_logits(query: list[int], items: list[list[int]], labels: list[int]) -> list[list[float]]:
    """By hand: what a request with score_mode "logit" must answer."""
    contexts = [np.array(query + item, np.int32) for item in items]
    rows: list[list[float]] = [fake_logits(context, np.array(labels, np.int32)).tolist() for context in contexts]
    return rows


class AppClient:
    """One application; every request runs on an event loop of its own."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.app = make_app(service)

    @property
    def engine(self) -> ScoringEngine:
        return self.service.engine

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, body: object = None, **more: Any) -> httpx.Response:
        if body is not None:
            more["json"] = body
        return self.request("POST", path, **more)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return asyncio.run(self.send(method, path, **more))

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **more)


@contextmanager
def app_client(
    options: ServerOptions | None = None,
    *,
    backend: Backend | None = None,
    tokenizer: TextTokenizer | None = None,
    is_ready: bool = True,
    max_queued_tokens: int | None = None,
    prefix_cache: bool = True,
    watchdog_timeout: float = 0.0,
    reports: ReportSource | None = None,
    **config: Any,
) -> Iterator[AppClient]:
    options_of_scheduler = SchedulerOptions(
        max_queued_tokens=max_queued_tokens, prefix_cache=prefix_cache, watchdog_timeout=watchdog_timeout
    )
    scheduler = Scheduler(backend or FakeBackend(), options_of_scheduler)
    engine = ScoringEngine(EngineConfig(MODEL, **config), scheduler, tokenizer)
    service = Service(options or ServerOptions(), reports)
    if is_ready:
        service.open(engine)
    try:
        yield AppClient(service)
    finally:
        service.close()
        if isinstance(backend, HeldBackend):
            backend.let_go.set()
        engine.close()


async def go_away(client: AppClient, backend: HeldBackend, request: object) -> None:
    """A request whose client disconnects while its first forward is on the device; nothing is sent to it."""
    body = httpx.Request("POST", "http://server", json=request).content
    messages = iter([{"type": "http.request", "body": body}])
    gone = asyncio.Event()
    sent: list[Any] = []

    async def receive() -> Any:
        message = next(messages, None)
        if message is None:
            await gone.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/score", "headers": [], "root_path": ""}
    answer = asyncio.create_task(client.app(scope, receive, send))
    await asyncio.to_thread(backend.has_begun.wait, 10)
    gone.set()
    for _ in range(5):  # turns of the event loop, for the news to get through
        await asyncio.sleep(0)
    backend.let_go.set()
    await answer
    assert sent == []


def error_of(response: httpx.Response) -> tuple[int, str, str, str | None]:
    """Status, type, code and param of an error, whose body has exactly the shape of all errors."""
    body = response.json()
    assert set(body) == {"error", "detail", "message"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["detail"] == body["message"] == body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return response.status_code, body["error"]["type"], body["error"]["code"], body["error"]["param"]
