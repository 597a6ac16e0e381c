"""`/v1/prefix` (pin a prefix, list it, release it) and `/tokenize`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.prompts.merging_tokenizer import BOS, merging_tokenizer
from tests.server.app_client import IDS_REQUEST, MODEL, AppClient, app_client, error_of

QUERY = [7] * 300


@pytest.fixture
def fresh() -> Iterator[AppClient]:
    with app_client(tokenizer=merging_tokenizer()) as made:
        yield made


def test_a_pinned_prefix_serves_the_requests_to_come(fresh: AppClient) -> None:
    pinned = fresh.post("/v1/prefix", {"query": QUERY, "ttl_seconds": 60})
    assert pinned.status_code == 200
    answer = pinned.json()
    assert (answer["object"], answer["model"], answer["tokens"], answer["cached_tokens"]) == ("prefix", MODEL, 300, 0)
    assert answer["bytes"] > 0
    assert answer["ttl_seconds"] == 60
    scored = fresh.post("/v1/score", {**IDS_REQUEST, "query": QUERY, "algorithm": "prefill_extend"}).json()
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 300


def test_it_is_listed_until_it_is_released(fresh: AppClient) -> None:
    pinned = fresh.post("/v1/prefix", {"query": QUERY}).json()
    assert pinned["ttl_seconds"] == 300
    assert fresh.get("/v1/prefix").json() == {"object": "list", "data": [pinned]}
    path = f"/v1/prefix/{pinned['id']}"
    released = fresh.request("DELETE", path)
    assert released.json() == {"object": "prefix", "id": pinned["id"], "deleted": True}
    assert fresh.get("/v1/prefix").json()["data"] == []
    assert error_of(fresh.request("DELETE", path)) == (404, "invalid_request_error", "not_found", "id")
    # Released pins go before the next step, so after one there are none.
    fresh.post("/v1/score", IDS_REQUEST)
    assert fresh.engine.scheduler.stats().pinned_blocks == 0


def test_text_may_be_pinned(fresh: AppClient) -> None:
    assert fresh.post("/v1/prefix", {"query": "abcx"}).json()["tokens"] == 2


BAD, VALUE = "invalid_request_error", "invalid_value_error"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (400, "missing_parameter_error", "missing_query", "query")),
        ({"query": None}, (400, "missing_parameter_error", "missing_query", "query")),
        ({"query": 5}, (400, BAD, "invalid_query_type", "query")),
        ({"query": []}, (400, VALUE, "empty_query", "query")),
        ({"query": "?"}, (400, VALUE, "empty_query", "query")),
        ({"query": [1.0]}, (400, BAD, "invalid_token_id_type", "query")),
        ({"query": [512]}, (422, VALUE, "token_id_exceeds_vocab", "query")),
        ({"query": [1] * 5000}, (400, VALUE, "context_too_long", "query")),
        ({"query": [1], "ttl_seconds": 0}, (400, VALUE, "invalid_ttl_seconds", "ttl_seconds")),
        ({"query": [1], "ttl_seconds": -5}, (400, VALUE, "invalid_ttl_seconds", "ttl_seconds")),
        ({"query": [1], "ttl_seconds": 86_401}, (400, VALUE, "invalid_ttl_seconds", "ttl_seconds")),
        ({"query": [1], "ttl_seconds": True}, (400, VALUE, "invalid_ttl_seconds", "ttl_seconds")),
        ({"query": [1], "ttl_seconds": "60"}, (400, VALUE, "invalid_ttl_seconds", "ttl_seconds")),
        ({"query": [1], "model": "other"}, (404, "model_error", "model_not_found", "model")),
        ({"query": [1], "cache_salt": "tenant"}, (400, VALUE, "unsupported_parameter", "cache_salt")),
        ({"query": [1], "lora_path": "adapter"}, (400, VALUE, "unsupported_parameter", "lora_path")),
    ],
)
def test_faults(fresh: AppClient, body: dict[str, Any], expected: tuple[object, ...]) -> None:
    assert error_of(fresh.post("/v1/prefix", body)) == expected


def test_without_a_prefix_cache_there_are_no_pins() -> None:
    with app_client(prefix_cache=False) as client:
        assert error_of(client.post("/v1/prefix", {"query": [1]}))[2] == "prefix_cache_disabled"


def test_text_needs_a_tokenizer(client: AppClient) -> None:
    assert error_of(client.post("/v1/prefix", {"query": "a"})) == (400, BAD, "no_tokenizer", None)


def test_a_fixed_number_can_be_pinned(fresh: AppClient) -> None:
    """Pins leave room for the longest prefix, so the next one is refused before the cache is full."""
    codes = set()
    for number in range(60):
        response = fresh.post("/v1/prefix", {"query": [number] * 4096})
        if response.status_code != 200:
            codes.add(error_of(response)[2])
            break
    assert codes == {"prefix_cache_full"}
    assert fresh.post("/v1/score", IDS_REQUEST).status_code == 200


@pytest.fixture(scope="module")
def text_client() -> Iterator[AppClient]:
    with app_client(tokenizer=merging_tokenizer(bos=True)) as made:
        yield made


class TestTokenize:
    @pytest.mark.parametrize("field", ["text", "prompt"])
    def test_one_text(self, text_client: AppClient, field: str) -> None:
        answer = text_client.post("/tokenize", {field: "abcx"})
        assert answer.json() == {"model": MODEL, "tokens": [7, 4], "count": 2, "max_model_len": 4096}

    def test_many_texts(self, text_client: AppClient) -> None:
        answer = text_client.post("/tokenize", {"text": ["ab", "", "xyz"]}).json()
        assert (answer["tokens"], answer["count"]) == ([[5], [], [4, 8, 9]], [1, 0, 3])

    def test_special_tokens_are_added_when_asked_for(self, text_client: AppClient) -> None:
        answer = text_client.post("/tokenize", {"text": "ab", "add_special_tokens": True}).json()
        assert answer["tokens"] == [BOS, 5]

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            ({}, (400, "missing_parameter_error", "missing_text", "text")),
            ({"text": None}, (400, "missing_parameter_error", "missing_text", "text")),
            ({"text": 5}, (400, "invalid_request_error", "invalid_text_type", "text")),
            ({"text": ["a", 5]}, (400, "invalid_request_error", "invalid_text_type", "text")),
            ({"text": "a", "prompt": "b"}, (400, "invalid_value_error", "conflicting_parameters", "text")),
            ({"text": []}, (400, "invalid_value_error", "empty_text", "text")),
            (
                {"text": "a", "add_special_tokens": 1},
                (400, "invalid_request_error", "invalid_add_special_tokens_type", "add_special_tokens"),
            ),
            ({"text": "a", "model": "other"}, (404, "model_error", "model_not_found", "model")),
            ({"text": "a", "model": 5}, (400, "invalid_request_error", "invalid_model_type", "model")),
        ],
    )
    def test_faults(self, text_client: AppClient, body: dict[str, Any], expected: tuple[object, ...]) -> None:
        assert error_of(text_client.post("/tokenize", body)) == expected

    def test_a_response_has_so_many_tokens(self, text_client: AppClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("prefixwise.server.routes.tokens.MAX_TOKENIZED", 4)
        assert text_client.post("/tokenize", {"text": ["ab", "xyz"]}).json()["count"] == [1, 3]
        refused = text_client.post("/tokenize", {"text": ["ab", "xyz"], "add_special_tokens": True})
        assert error_of(refused) == (400, "invalid_value_error", "too_many_tokens", "text")

    def test_a_large_body_is_answered_as_a_small_one(self, text_client: AppClient) -> None:
        """Its JSON is parsed in pieces, on a thread."""
        answer = text_client.post("/tokenize", {"text": ["ab"] * 200_000}).json()
        assert len(answer["tokens"]) == len(answer["count"]) == 200_000
        assert (answer["tokens"][-1], answer["count"][-1]) == ([5], 1)

    def test_a_model_without_tokenizer_says_so(self, client: AppClient) -> None:
        assert error_of(client.post("/tokenize", {"text": "a"}))[2] == "no_tokenizer"
