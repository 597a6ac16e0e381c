"""Draining, without a process: what is in flight ends, or is cut off. Work on threads, which ends when nobody waits."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import httpx
import pytest

from prefixwise.contract.cancellation import check_cancelled
from prefixwise.contract.errors import CancelledError, UnavailableError
from prefixwise.prompts.tokenizer import TextTokenizer
from prefixwise.server import service as service_module
from prefixwise.server.context import RequestContext
from prefixwise.server.launch import HttpServer, bind
from prefixwise.server.service import Lifecycle, Phase, Service
from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.server.app_client import IDS_REQUEST, AppClient, HeldBackend, app_client, error_of, go_away


def test_only_the_ready_phase_takes_work() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(UnavailableError) as caught:
        lifecycle.check_ready()
    assert caught.value.code == "not_ready"
    lifecycle.become_ready()
    lifecycle.check_ready()
    asyncio.run(lifecycle.drain(0))
    assert lifecycle.phase is Phase.STOPPED
    with pytest.raises(UnavailableError) as caught:
        lifecycle.check_ready()
    assert caught.value.code == "shutting_down"


async def drain(client: AppClient, backend: HeldBackend, grace: float, *, let_go: bool) -> list[httpx.Response]:
    """Two requests in flight and one that comes while the server drains, whose answer is the last."""
    requests = [asyncio.create_task(client.send("POST", "/v1/score", json=IDS_REQUEST)) for _ in range(2)]
    await asyncio.to_thread(backend.has_begun.wait, 10)
    draining = asyncio.create_task(client.service.lifecycle.drain(grace))
    await asyncio.sleep(0)
    late = await client.send("POST", "/v1/score", json=IDS_REQUEST)
    if let_go:
        backend.let_go.set()
    await draining
    backend.let_go.set()
    assert client.service.lifecycle.num_in_flight == 0
    return [*(await asyncio.gather(*requests)), late]


def test_requests_in_flight_finish_and_new_ones_get_503() -> None:
    backend = HeldBackend()
    with app_client(backend=backend) as client:
        first, second, late = asyncio.run(drain(client, backend, 30, let_go=True))
    assert (first.status_code, second.status_code) == (200, 200)
    assert error_of(late)[2] == "shutting_down"
    assert [answer.headers["connection"] for answer in (first, second, late)] == ["close"] * 3


def test_requests_longer_than_the_grace_period_get_503() -> None:
    backend = HeldBackend()
    with app_client(backend=backend) as client:
        answers = asyncio.run(drain(client, backend, 0.05, let_go=False))
    assert [error_of(answer) for answer in answers] == [(503, "server_error", "shutting_down", None)] * 3


async def ask_as_it_closes(service: Service) -> bytes:
    """The answer to a request on a connection that was kept, sent when the server listens no more."""
    listener = bind(service.options, port=0)
    server = HttpServer.of(service)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    await service.lifecycle.drain(0)
    server.should_exit = True
    while server.servers[0].is_serving():
        await asyncio.sleep(0.01)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await serving
    return answer


def test_a_request_on_its_way_when_the_server_closes_gets_503() -> None:
    with app_client() as client:
        answer = asyncio.run(ask_as_it_closes(client.service))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in answer
    assert b"shutting_down" in answer


class Endless:
    """Work that ends when it is cancelled."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        try:
            while True:
                check_cancelled()
                self.has_ended.wait(0.001)
        except CancelledError:
            self.has_ended.set()


async def cancel(client: AppClient, work: Endless, *, is_large: bool) -> None:
    task = asyncio.create_task(client.service.in_pool(work, is_large=is_large))
    await asyncio.to_thread(work.has_begun.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("is_large", [False, True])
def test_work_that_nobody_waits_for_ends(client: AppClient, is_large: bool) -> None:
    work = Endless()
    asyncio.run(cancel(client, work, is_large=is_large))
    assert work.has_ended.wait(60)


def test_small_requests_do_not_wait_for_large_ones(client: AppClient) -> None:
    let_go = threading.Event()

    async def small_behind_large() -> str:
        large = [asyncio.create_task(client.service.in_pool(let_go.wait, is_large=True)) for _ in range(10)]
        found = await asyncio.wait_for(client.service.in_pool(lambda: "done"), 60)
        let_go.set()
        await asyncio.gather(*large)
        return found

    assert asyncio.run(small_behind_large()) == "done"


class HeldTokenizer:
    """Stands in the way of a tokenizer until it is let go."""

    def __init__(self, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.let_go = threading.Event(), threading.Event()
        encode_many = tokenizer.encode_many

        def held(*args: Any, **options: Any) -> Any:
            self.has_begun.set()
            assert self.let_go.wait(60)
            return encode_many(*args, **options)

        monkeypatch.setattr(tokenizer, "encode_many", held)


LARGE_TEXT = {"query": "ab", "items": ["abc" * 50_000], "labels": ["a"]}


def test_a_deadline_is_answered_while_the_tokenizer_works(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = merging_tokenizer()
    held = HeldTokenizer(tokenizer, monkeypatch)
    with app_client(tokenizer=tokenizer) as client:
        answer = client.post("/v1/score", LARGE_TEXT, headers={"X-Request-Timeout": "0.2"})
        held.let_go.set()
    assert error_of(answer) == (504, "server_error", "deadline_exceeded", None)


def test_a_client_that_goes_away_while_the_tokenizer_works_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = merging_tokenizer()
    held = HeldTokenizer(tokenizer, monkeypatch)
    with app_client(tokenizer=tokenizer) as client:
        asyncio.run(go_away(client, held, LARGE_TEXT))  # type: ignore[arg-type]


def test_what_a_large_request_has_freed_is_given_back_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = threading.Semaphore(0)
    monkeypatch.setattr(service_module, "give_back_free_memory", given_back.release)
    monkeypatch.setattr(service_module, "TRIM_SECONDS", 0.01)

    async def end(service: Service, *sizes: int) -> None:
        for size in sizes:
            share = service.body_memory.share()
            share.take(size)
            service.end_share(share)
        await asyncio.sleep(0.05)

    with app_client() as client:
        asyncio.run(end(client.service, 1000, service_module.LARGE_BODY_BYTES - 1))
        assert not given_back.acquire(blocking=False)
        asyncio.run(end(client.service, *[service_module.LARGE_BODY_BYTES] * 2))
        assert given_back.acquire(timeout=60)
        assert not given_back.acquire(blocking=False)
        assert client.service.body_memory.taken == 0


def test_a_refused_request_leaves_nothing_for_the_garbage_collector() -> None:
    """Its text would be held until the collector's next full run, after millions of objects."""
    body = {**IDS_REQUEST, "items": [[1] * 100_000], "labels": ["a", "b"]}
    with app_client() as client:
        asyncio.run(client.send("POST", "/v1/score", json=body))
        gc.collect()
        gc.disable()
        try:
            assert asyncio.run(client.send("POST", "/v1/score", json=body)).status_code == 400
            until = time.monotonic() + 60  # the thread that prepared it may not have let go yet
            while any(isinstance(each, RequestContext) for each in gc.get_objects()):
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            gc.enable()
