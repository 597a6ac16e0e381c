"""The body of a request: its size, and that it is a JSON object."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator

import pytest

from prefixwise.server.config import ServerOptions
from tests.server.app_client import AppClient, app_client, error_of

TOO_LARGE = (413, "invalid_request_error", "request_too_large", None)
NOT_JSON = (400, "invalid_request_error", "invalid_json", None)
REQUEST = b'{"query": [1], "items": [[2]], "label_token_ids": [3]}'


@pytest.fixture(scope="module")
def small() -> Iterator[AppClient]:
    with app_client(ServerOptions(max_request_bytes=100)) as made:
        yield made


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


class TestSize:
    def test_a_body_that_says_that_it_is_too_large_is_not_read(self, small: AppClient) -> None:
        """Nothing of it has come when it is refused."""
        asked = []

        async def receive() -> dict[str, object]:
            asked.append(len(sent))
            return {"type": "http.request", "body": b"", "more_body": False}

        sent: list[dict[str, object]] = []

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        headers = [(b"content-length", b"101")]
        scope = {"type": "http", "method": "POST", "path": "/v1/score", "headers": headers, "root_path": ""}
        asyncio.run(small.app(scope, receive, send))  # type: ignore[arg-type]
        assert sent[0]["status"] == 413
        assert (b"connection", b"close") in sent[0]["headers"]  # type: ignore[operator]
        assert sent[-1].get("more_body", False) is False
        assert asked == [2]  # after status and body were sent: the rest of the request is let in, and thrown away

    def test_a_body_that_does_not_say_so_is_refused_when_it_is(self, small: AppClient) -> None:
        response = small.post("/v1/score", content=chunks(b" " * 60, b" " * 60, b"{}"))
        assert error_of(response) == TOO_LARGE
        assert response.headers["connection"] == "close"

    def test_one_chunk_may_be_too_large(self, small: AppClient) -> None:
        assert error_of(small.post("/v1/score", content=chunks(b" " * 101))) == TOO_LARGE

    @pytest.mark.parametrize("path", ["/v1/prefix", "/tokenize"])
    def test_it_holds_for_all_routes(self, small: AppClient, path: str) -> None:
        assert error_of(small.post(path, content=b" " * 101)) == TOO_LARGE

    def test_the_largest_is_taken(self, small: AppClient) -> None:
        assert small.post("/v1/score", content=REQUEST.ljust(100)).status_code == 200
        parts = chunks(REQUEST[:20], REQUEST[20:].ljust(80))
        assert small.post("/v1/score", content=parts).status_code == 200


@pytest.mark.parametrize("path", ["/v1/score", "/v1/prefix", "/tokenize"])
def test_a_compressed_body_is_refused_by_name(client: AppClient, path: str) -> None:
    body = gzip.compress(REQUEST)
    response = client.post(path, content=body, headers={"Content-Encoding": "gzip"})
    assert error_of(response) == (400, "invalid_request_error", "unsupported_encoding", None)
    assert 'got Content-Encoding: "gzip"' in response.json()["message"]
    assert client.post("/v1/score", content=REQUEST, headers={"Content-Encoding": "Identity"}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"no json",
        b"[]",
        b"null",
        b'"text"',
        b"5",
        b'{"query": NaN}',
        b'{"query": [1], }',
        b'{"query": "\xff"}',
        b'{"query": "\\ud800", "items": NaN}',
        b'\xef\xbb\xbf{"query": [1]}',
        b'{"query": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 1_000_000,
    ],
    ids=lambda content: repr(content[:20]),
)
@pytest.mark.parametrize("path", ["/v1/score", "/v1/prefix", "/tokenize"])
def test_anything_but_a_json_object_is_refused(client: AppClient, path: str, content: bytes) -> None:
    assert error_of(client.post(path, content=content)) == NOT_JSON
