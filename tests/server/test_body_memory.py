"""The budget of all bodies and responses, and what a request does where it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from prefixwise.contract.errors import UnavailableError
from prefixwise.server.body_memory import FREE_BYTES, BodyMemory
from prefixwise.server.config import ServerOptions
from tests.server.app_client import IDS_REQUEST, AppClient, HeldBackend, app_client, error_of

FULL = (503, "server_error", "body_memory_full", None)
MEMORY = 2_000_000
OPTIONS = ServerOptions(max_request_bytes=1_000_000, max_response_bytes=1_000_000, max_body_memory=MEMORY)


class TestShare:
    def test_the_first_bytes_of_a_request_are_free(self) -> None:
        memory = BodyMemory(0)
        memory.share().take(FREE_BYTES)
        with pytest.raises(UnavailableError, match=r"may take 0 bytes .*--max-body-memory.* this request needs 1;"):
            memory.share().take(FREE_BYTES + 1)

    def test_what_is_taken_is_given_back_once(self) -> None:
        memory = BodyMemory(1000)
        first, second = memory.share(), memory.share()
        for size in (10, FREE_BYTES, 490):
            first.take(size)
        second.take(FREE_BYTES + 500)
        assert memory.taken == 1000
        with pytest.raises(UnavailableError) as caught:
            second.take(1)
        assert caught.value.retry_after == 1
        assert memory.taken == 1000  # a refusal takes nothing
        first.give_back()
        first.give_back()
        assert memory.taken == 500
        second.check(500)
        assert memory.taken == 500  # nor does a check
        second.give_back()
        assert memory.taken == 0


async def with_a_held_request(client: AppClient, backend: HeldBackend, more: AsyncIterator[bytes]) -> Any:
    """The response to a body that arrives while a request of 900,000 bytes is on the device."""
    content = b" " * 900_000 + orjson.dumps(IDS_REQUEST)
    large = asyncio.create_task(client.send("POST", "/v1/score", content=content))
    assert await asyncio.to_thread(backend.has_begun.wait, 60)
    taken = client.service.body_memory.taken
    response = await client.send("POST", "/v1/score", content=more)
    backend.let_go.set()
    assert (await large).status_code == 200
    return response, taken


class TestRequests:
    @pytest.fixture
    def backend(self) -> HeldBackend:
        return HeldBackend()

    def test_a_body_that_does_not_fit_beside_others_is_refused_as_it_arrives(self, backend: HeldBackend) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(9):
                yield b" " * 100_000
            yield b"{}"

        options = ServerOptions(max_request_bytes=1_000_000, max_response_bytes=100_000, max_body_memory=1_500_000)
        with app_client(options, backend=backend) as client:
            response, taken = asyncio.run(with_a_held_request(client, backend, parts()))
            assert error_of(response) == FULL
            assert response.headers["retry-after"] == "1"
            assert response.headers["connection"] == "close"
            assert 900_000 - FREE_BYTES < taken < 910_000
            assert client.service.body_memory.taken == 0

    def test_one_that_says_so_is_not_read(self) -> None:
        with app_client(OPTIONS) as client:
            client.service.body_memory.take(MEMORY - 100_000)  # others have it
            asked = []

            async def receive() -> dict[str, object]:
                asked.append(len(sent))
                return {"type": "http.request", "body": b"", "more_body": False}

            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            headers = [(b"content-length", b"200000")]
            scope = {"type": "http", "method": "POST", "path": "/v1/score", "headers": headers, "root_path": ""}
            asyncio.run(client.app(scope, receive, send))
            assert sent[0]["status"] == 503
            assert asked == [2]  # after status and body were sent

    def test_small_requests_are_served_while_the_memory_is_full(self) -> None:
        with app_client(OPTIONS) as client:
            client.service.body_memory.take(MEMORY)
            assert client.post("/v1/score", IDS_REQUEST).status_code == 200
            assert "prefixwise:body_bytes 2e+06" in client.get("/metrics").text

    def test_an_error_needs_no_memory(self) -> None:
        """A body that takes all that is left, and is wrong."""
        with app_client(OPTIONS) as client:
            client.service.body_memory.take(MEMORY - (900_000 - FREE_BYTES))
            response = client.post("/v1/score", content=b" " * 900_000)
            assert error_of(response) == (400, "invalid_request_error", "invalid_json", None)
            assert client.service.body_memory.taken == MEMORY - (900_000 - FREE_BYTES)

    def test_a_response_that_does_not_fit_is_refused_before_it_is_scored(self, backend: HeldBackend) -> None:
        request = IDS_REQUEST | {"items": [[1]] * 10, "label_token_ids": list(range(300))}
        with app_client(OPTIONS, backend=backend) as client:
            client.service.body_memory.take(MEMORY)
            assert error_of(client.post("/v1/score", request)) == FULL
            assert not backend.has_begun.is_set()
            assert client.service.body_memory.taken == MEMORY
