"""More clients than there is room for, and clients that go: every request ends, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.app_client import AppClient, HeldBackend, app_client, error_of, expected_logits
from tests.server.real_requests import ask, async_client, leftovers
from tests.server.server_process import Form, ServerProcess, server_process


def make_request(seed: int, num_items: int = 10) -> tuple[dict[str, object], list[list[float]]]:
    """A body, and its scores."""
    rng = random.Random(seed)
    # Long enough to be kept; some share their beginning, some all of it.
    query = [*range(150), *(rng.randrange(512) for _ in range(seed % 3 * 60))]
    items = [[rng.randrange(512) for _ in range(10)] for _ in range(num_items)]
    body: dict[str, object] = {"query": query, "items": items, "label_token_ids": [3, 5], "score_mode": "logit"}
    return body, expected_logits(query, items, [3, 5])


async def score(client: httpx.AsyncClient, seed: int, timeout: str | None = None) -> int:
    """The status, once the answer was found to be right."""
    body, scores = make_request(seed)
    headers = {} if timeout is None else {"X-Request-Timeout": timeout}
    response = await client.post("/v1/score", json=body, headers=headers)
    if response.status_code == 200:
        assert response.json()["scores"] == scores
    if response.status_code == 429:
        assert 1 <= int(response.headers["retry-after"]) <= 60
    return response.status_code


async def ask_for_health(client: httpx.AsyncClient, is_over: asyncio.Event) -> int:
    """How often it was fine; anything else fails."""
    asked = 0
    while not is_over.is_set():
        assert (await client.get("/health")).status_code == 200
        asked += 1
        await asyncio.sleep(0.01)  # often enough, and no load of its own
    return asked


async def overload(server: ServerProcess, let_go: Path) -> tuple[list[int], int]:
    """The device is let go when some were refused; then there is room again, for some of those that still come."""
    async with async_client(server) as client:
        is_over = asyncio.Event()
        health = asyncio.create_task(ask_for_health(client, is_over))
        # Every tenth client disconnects early.
        timeouts = ["0.02" if seed % 10 == 0 else None for seed in range(200)]
        clients = [asyncio.create_task(score(client, seed, timeout)) for seed, timeout in enumerate(timeouts)]
        statuses = []
        for ended in asyncio.as_completed(clients):
            statuses.append(await ended)
            if statuses.count(429) == 10:
                let_go.touch()
        is_over.set()
        return statuses, await health


def test_too_many_clients_get_right_answers_or_clear_refusals(form: Form, tmp_path: Path) -> None:
    held = f"--hold-until={tmp_path / 'let-go'}"
    with server_process(*form, held, "--delay=0.02", "--step-tokens=512", "--max-queued-tokens=9000") as server:
        statuses, num_health = asyncio.run(overload(server, tmp_path / "let-go"))
        assert set(statuses) <= {200, 413, 429, 504}
        assert statuses.count(200) >= 10
        assert statuses.count(429) >= 10
        assert num_health >= 1
        assert leftovers(server) == (0, 0, 0)


async def disconnect(server: ServerProcess, seed: int) -> None:
    """Send a request, and go: before all of it is sent, or some time after."""
    rng = random.Random(seed)
    body = httpx.Request("POST", server.url, json=make_request(seed, num_items=40)[0]).content
    head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write((head + body)[: rng.choice([10, len(head) + 5, None])])
    await writer.drain()
    await asyncio.sleep(rng.uniform(0, 0.1))
    writer.close()


async def disconnect_and_score(server: ServerProcess) -> list[int]:
    """100 clients that go, among ten that stay."""
    async with async_client(server) as client:
        staying = [score(client, seed) for seed in range(10)]
        statuses = asyncio.gather(*staying)
        await asyncio.gather(*(disconnect(server, seed) for seed in range(100)))
        return list(await statuses)


def test_clients_that_go_leave_nothing_behind(form: Form) -> None:
    with server_process(*form, "--delay=0.02", "--step-tokens=512") as server:
        assert asyncio.run(disconnect_and_score(server)) == [200] * 10
        assert leftovers(server) == (0, 0, 0)
        body, scores = make_request(1)
        assert ask(server, body)["scores"] == scores


@pytest.mark.parametrize("num_items", [20_000])
def test_health_answers_while_a_large_request_is_taken_in(num_items: int) -> None:
    """Parsing it, scoring it and writing its answer all happen beside the event loop."""

    async def run(server: ServerProcess) -> tuple[httpx.Response, int]:
        async with async_client(server) as client:
            is_over = asyncio.Event()
            health = asyncio.create_task(ask_for_health(client, is_over))
            response = await client.post("/v1/score", json=body)
            is_over.set()
            return response, await health

    body, scores = make_request(0, num_items)
    with server_process("--max-queued-tokens=100000000") as server:
        response, num_health = asyncio.run(run(server))
    assert response.json()["scores"] == scores
    assert num_health >= 5


class TestDeadlines:
    """A device of at most 1,000 tokens per second, as it has measured itself."""

    @pytest.fixture
    def backend(self) -> HeldBackend:
        backend = HeldBackend(step_tokens=64, seconds_per_token=0.001)
        backend.let_go.set()
        return backend

    @pytest.fixture
    def client(self, backend: HeldBackend) -> Iterator[AppClient]:
        with app_client(backend=backend) as client:
            assert client.post("/v1/score", self.body_of(100)).status_code == 200
            yield client

    def body_of(self, num_items: int, **fields: object) -> dict[str, object]:
        items = {"query": [1], "items": [[2]] * num_items, "label_token_ids": [3, 5], "algorithm": "prefill_extend"}
        return {**items, **fields}

    def test_a_request_that_is_too_large_for_its_deadline_is_not_to_be_retried(self, client: AppClient) -> None:
        response = client.post("/v1/score", self.body_of(10_000), headers={"X-Request-Timeout": "5"})
        assert error_of(response) == (413, "invalid_request_error", "deadline_too_short", None)
        assert "10000 tokens at " in response.json()["message"]
        assert "retry-after" not in response.headers
        assert 'prefixwise:requests_refused_total{code="deadline_too_short"} 1.0' in client.get("/metrics").text

    def test_a_queue_that_is_too_long_for_a_deadline_refuses(self, client: AppClient, backend: HeldBackend) -> None:
        async def overload() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
            backend.let_go.clear()
            backend.has_begun.clear()
            first = asyncio.create_task(client.send("POST", "/v1/score", json=self.body_of(3000)))
            await asyncio.to_thread(backend.has_begun.wait, 60)
            late, timeout = self.body_of(10, priority=1), {"X-Request-Timeout": "5"}
            refused = await client.send("POST", "/v1/score", json=late, headers=timeout)
            metrics = await client.send("GET", "/metrics")
            first.cancel()
            return refused, metrics, await client.send("GET", "/health")

        refused, metrics, health = asyncio.run(overload())
        assert error_of(refused) == (429, "rate_limit_error", "queue_too_long", None)
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert 'prefixwise:requests_refused_total{code="queue_too_long"} 1.0' in metrics.text
        rate = float(re.search(r"^prefixwise:tokens_per_second (\S+)", metrics.text, re.MULTILINE)[1])  # type: ignore[index]
        assert 0 < rate <= 1000
        assert health.status_code == 200
