"""Responses in pieces: the same JSON, at the speed of the reader, and their size before anything is scored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prefixwise.contract.scores import ScoreRows
from prefixwise.server.answers import PIECE_BYTES, StreamedJson, json_pieces, send_response, whole_json
from prefixwise.server.body_memory import BodyMemory
from prefixwise.server.config import ServerOptions
from prefixwise.server.context import CONNECTION_KEY, RequestContext
from prefixwise.server.dialects.base import Call
from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.server.app_client import IDS_REQUEST, AppClient, app_client, error_of
from tests.server.letters_profile import letters_choice
from tests.server.test_connections import GET, Server, settle, transport_of

TOO_LARGE = (400, "invalid_value_error", "response_too_large", None)


def rows(num_items: int, num_labels: int, missing: tuple[int, ...] = ()) -> ScoreRows:
    good = np.array([item for item in range(num_items) if item not in missing], np.int64)
    values = np.random.default_rng(1).normal(size=(len(good), num_labels))
    return ScoreRows(values, good, num_items)


class TestRows:
    def test_they_read_as_lists(self) -> None:
        found = rows(5, 2, missing=(0, 3))
        listed = list(found)
        assert [row is None for row in listed] == [True, False, False, True, False]
        assert found[1:4] == listed[1:4]
        assert np.array(found).tolist() == [row for row in listed if row is not None]
        assert rows(3, 2)[:] == list(rows(3, 2))
        assert len(rows(3, 2)) == 3


class TestPieces:
    @pytest.mark.parametrize(
        "make",
        [
            dict,
            lambda: {"scores": rows(0, 3), "none": iter([])},
            lambda: {"a": 1, "scores": rows(7000, 3), "b": {"c": [None, "é\n"]}},
            lambda: {"scores": rows(3000, 2, missing=(0, 1, 2999))},
            lambda: {"scores": rows(3, 9000, missing=(1,))},
            lambda: {"data": iter([{"scores": rows(2000, 2)}, {"error": {"code": "x"}}, {"scores": rows(1, 5000)}])},
            lambda: ({"index": index, "document": "é" * index} for index in range(900)),
            lambda: {"one": "x" * (3 * PIECE_BYTES)},
        ],
    )
    def test_they_are_the_whole(self, make: Any) -> None:
        whole = whole_json(make())
        assert b"".join(json_pieces(make())) == whole
        assert json.loads(whole) == orjson.loads(whole)

    def test_none_is_large(self) -> None:
        sizes = [len(piece) for piece in json_pieces({"a": rows(100_000, 2), "b": rows(3, 100_000)})]
        assert len(sizes) > 100
        assert max(sizes) < 3 * PIECE_BYTES

    def test_what_has_no_json_is_an_error(self) -> None:
        with pytest.raises(TypeError):
            whole_json({"a": object()})


class Reader:
    """A client that takes so many messages, and then none; `connection` as the server sees it."""

    def __init__(self, takes: int | None = None, *, http_version: str = "1.1", memory: int = 10**9) -> None:
        self.messages: list[Any] = []
        self.cuts = 0
        self.is_gone = False
        self._takes = takes
        scope = {
            "type": "http",
            "method": "POST",
            "headers": [],
            "http_version": http_version,
            CONNECTION_KEY: self,
        }
        self.context = RequestContext(scope, self._receive, self._send, BodyMemory(memory).share())

    async def _receive(self) -> Any:
        raise AssertionError("nothing is read")

    async def _send(self, message: Any) -> None:
        if len(self.messages) == self._takes:
            await asyncio.Event().wait()
        self.messages.append(message)

    def leave(self) -> None:
        pass

    def cut(self) -> None:
        self.cuts += 1

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def send(reader: Reader, response: Response, **options: Any) -> None:
    asyncio.run(send_response(reader.context, response, ServerOptions(**options)))


class TestSending:
    def test_a_large_response_has_many_messages_and_no_length(self) -> None:
        reader = Reader()
        send(reader, StreamedJson({"scores": rows(20_000, 2)}))
        assert len(reader.messages) > 10
        assert [message["more_body"] for message in reader.messages[1:-1]] == [True] * (len(reader.messages) - 2)
        assert not reader.messages[-1].get("more_body", False)
        assert reader.body == whole_json({"scores": rows(20_000, 2)})
        assert b"content-length" not in reader.headers
        assert reader.headers[b"content-type"] == b"application/json"

    @pytest.mark.parametrize(("version", "num_rows"), [("1.1", 10), ("1.0", 20_000)])
    def test_a_short_one_and_one_of_http_1_0_have_a_length(self, version: str, num_rows: int) -> None:
        reader = Reader(http_version=version)
        send(reader, StreamedJson({"scores": rows(num_rows, 2)}))
        assert reader.body == whole_json({"scores": rows(num_rows, 2)})
        assert reader.headers[b"content-length"] == str(len(reader.body)).encode()

    def test_entries_are_made_as_the_client_reads(self) -> None:
        made = []

        def entries() -> Iterator[str]:
            for number in range(1000):
                made.append(number)
                yield "x" * PIECE_BYTES

        reader = Reader(takes=10)
        send(reader, StreamedJson({"data": entries()}), idle_timeout=0.1, min_transfer_rate=2**40)
        assert 8 <= len(made) <= 14

    @pytest.mark.parametrize("rate", [0, 2**60])
    def test_a_client_that_does_not_read_is_cut(self, rate: int) -> None:
        reader = Reader(takes=3)
        send(reader, StreamedJson({"scores": rows(20_000, 2)}), idle_timeout=0.05, min_transfer_rate=rate)
        assert (reader.cuts, reader.context.status) == (1, 499)

    def test_nothing_is_made_for_a_client_that_is_gone(self) -> None:
        reader = Reader()
        reader.is_gone = True
        send(reader, StreamedJson({"scores": rows(20_000, 2)}))
        assert (len(reader.messages), reader.context.status) == (2, 499)

    def test_a_client_that_goes_in_the_middle_is_no_error_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        """uvicorn hears of it a moment later than the transport."""
        statuses: list[int | None] = []

        async def run() -> None:
            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                context = RequestContext(scope, receive, send, BodyMemory(10**9).share())
                transport_of(protocol).close()
                await send_response(context, StreamedJson({"scores": rows(20_000, 2)}), ServerOptions())
                statuses.append(context.status)

            protocol = Server().connect()
            protocol.app = app
            protocol.data_received(GET)
            await settle()

        asyncio.run(run())
        assert (statuses, caplog.messages) == ([499], [])

    def test_a_body_that_is_whole_takes_memory(self) -> None:
        reader = Reader(memory=200_000)
        send(reader, Response(b"x" * 150_000))
        assert (len(reader.messages), reader.body) == (4, b"x" * 150_000)
        assert reader.context.body_share.bytes == 150_000


@pytest.fixture(scope="module")
def client() -> Iterator[AppClient]:
    with app_client(tokenizer=merging_tokenizer(), profiles=letters_choice()) as made:
        yield made


class TestSize:
    """A response must not be larger than its estimate, nor the estimate much larger than what may come."""

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/score", IDS_REQUEST | {"items": [[1]] * 300, "label_token_ids": [5] * 30, "score_mode": "logprob"}),
            ("/v1/score", IDS_REQUEST | {"items": [[1]] * 300, "return_pooled_hidden_states": True}),
            ("/v1/score", IDS_REQUEST | {"items": [[1], None, [10**6]] * 200, "on_item_error": "report"}),
            ("/v1/score", IDS_REQUEST | {"items": [[1] * 9] * 500, "max_tokens_per_item": 3}),
            ("/v1/score", IDS_REQUEST | {"items": [[1]], "return_debug": True, "debug_top_k": 500}),
            ("/v1/score", {"requests": [IDS_REQUEST, {"query": 5}, {**IDS_REQUEST, "bogus": "é" * 50}] * 50}),
            ("/v1/rerank", {"query": "a", "documents": ['é\n"' * 100] * 200, "return_documents": True}),
            ("/v1/rerank", {"query": "a", "documents": ["b" * 9] * 900, "max_tokens_per_doc": 2, "return_debug": True}),
            ("/v1/rerank", {"query": "a", "documents": ["b c"] * 500, "instruct": "x"}),
            ("/v1/reranking", {"query": "a", "input": [{"text": "b", "more": "y" * 50}] * 300, "return_input": True}),
            ("/rerank", {"query": "a", "texts": ["b"] * 900, "return_text": True}),
            ("/score", {"text_1": "a", "text_2": ["b"] * 900}),
            ("/generative_scoring", {"query": "a", "items": ["b"] * 900, "label_token_ids": [1, 2]}),
        ],
    )
    def test_no_response_is_larger_than_its_estimate(
        self, client: AppClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
    ) -> None:
        estimate = Call.max_response_bytes
        estimates: list[int] = []

        def watched(call: Call, sent_bytes: int) -> int:
            estimates.append(estimate(call, sent_bytes))
            return estimates[-1]

        monkeypatch.setattr(Call, "max_response_bytes", watched)
        response = client.post(path, body)
        assert response.status_code == 200, response.text[:300]
        assert len(response.content) <= estimates[0] < 10 * len(response.content)

    def test_one_that_could_be_too_large_is_refused_before_it_is_scored(self) -> None:
        """Before: 36 KB asked, 188 MB answered."""
        request = IDS_REQUEST | {"items": [[1]] * 500, "label_token_ids": [5] * 9000}
        with app_client() as client:
            assert len(orjson.dumps(request)) < 36_000
            response = client.post("/v1/score", request | {"items": [[1]] * 1000})
            assert error_of(response) == TOO_LARGE
            assert "at most 134217728 bytes (--max-response-bytes), got a request whose" in response.json()["message"]
            assert client.engine.backend.forwards == []  # type: ignore[attr-defined]

    def test_the_limit_is_an_option(self) -> None:
        with app_client(ServerOptions(max_response_bytes=2000)) as client:
            assert client.post("/v1/score", IDS_REQUEST).status_code == 200
            assert error_of(client.post("/v1/score", IDS_REQUEST | {"items": [[1]] * 20})) == TOO_LARGE
