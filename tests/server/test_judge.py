"""`POST /v1/judge` on the fake model's formula; with HTTP workers, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema_rs
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.judge import parse_judge_request
from prefixwise.engine.judge import Judge
from prefixwise.server.config import ServerOptions
from prefixwise.server.openapi import openapi_document
from tests.prompts.merging_tokenizer import CHAT_TEMPLATE, merging_tokenizer
from tests.server.app_client import MODEL, AppClient, app_client, error_of
from tests.server.server_process import server_process

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "xa{item}"}],
    "items": ["b", "bc", "zz"],
    "answers": ["y", "yz", "x"],
    "values": [1, 2, 3],
}


@pytest.fixture(scope="module")
def server() -> Iterator[AppClient]:
    with app_client(tokenizer=merging_tokenizer(chat_template=CHAT_TEMPLATE)) as made:
        yield made


def test_the_response_has_a_judgement_for_each_item(server: AppClient) -> None:
    answer = server.post("/v1/judge", {**BODY, "model": "default"})
    found = answer.json()
    assert answer.status_code == 200
    assert (found["object"], found["model"], found["answers"]) == ("judge", MODEL, ["y", "yz", "x"])
    expected = Judge(server.engine).judge(parse_judge_request(BODY))
    assert found["results"] == [
        {
            "index": each.index,
            "answer": each.answer,
            "probs": each.probs,
            "expected_value": each.expected_value,
            "entropy": each.entropy,
            "mass": each.mass,
        }
        for each in expected
    ]
    assert found["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert set(found) == {"object", "model", "answers", "results", "usage"}


def test_it_is_what_the_document_says(server: AppClient) -> None:
    document = openapi_document()
    schema = {"$ref": "#/components/schemas/JudgeResponse", "components": document["components"]}
    more = {"max_tokens_per_item": 1, "return_debug": True, "answrs": 1}
    found = server.post("/v1/judge", {**BODY, **more}).json()
    assert {"truncated", "debug", "warnings"} < set(found)
    assert jsonschema_rs.validator_for(schema).is_valid(found)
    plain = server.post("/v1/judge", {"messages": [{"role": "user", "content": "x"}], "answers": "y/z"}).json()
    assert jsonschema_rs.validator_for(schema).is_valid(plain)
    assert [each["expected_value"] for each in plain["results"]] == [None]


def test_warnings_are_in_the_body_and_in_a_header(server: AppClient) -> None:
    answer = server.post("/v1/judge", {**BODY, "answrs": 1})
    (warning,) = answer.json()["warnings"]
    assert answer.headers.get_list("x-prefixwise-warning") == [warning]
    assert "did you mean answers?" in warning


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"answers": None}, (400, "missing_parameter_error", "missing_answers", "answers")),
        ({"answers": "1-3"}, (400, "invalid_value_error", "empty_answers", "answers")),  # digits have no token here
        (
            {"messages": [{"role": "user", "content": "x"}]},
            (400, "invalid_value_error", "invalid_messages", "messages"),
        ),
        ({"items": ["b", 3]}, (400, "invalid_request_error", "invalid_items_type", "items")),
        ({"model": "another"}, (404, "model_error", "model_not_found", "model")),
        ({"max_tokens": 1}, (400, "invalid_value_error", "unsupported_parameter", "max_tokens")),
    ],
)
def test_wrong_requests(server: AppClient, changes: dict[str, Any], error: tuple[object, ...]) -> None:
    assert error_of(server.post("/v1/judge", {**BODY, **changes})) == error


def test_models_that_cannot_judge() -> None:
    with app_client() as client:
        assert error_of(client.post("/v1/judge", BODY))[2] == "no_tokenizer"
    with app_client(tokenizer=merging_tokenizer()) as client:
        refused = client.post("/v1/judge", BODY)
        assert error_of(refused) == (400, "invalid_request_error", "no_chat_template", "messages")
    backend = FakeBackend()
    backend.config = replace(backend.config, num_classes=3)
    with app_client(backend=backend, tokenizer=merging_tokenizer(chat_template=CHAT_TEMPLATE)) as client:
        assert error_of(client.post("/v1/judge", BODY))[2] == "no_label_logits"


def test_a_response_is_never_larger_than_was_reckoned_with() -> None:
    """Long answers, escaped characters and many items: what is refused would have been larger, or nearly."""
    body = {**BODY, "items": ["b"] * 500, "answers": ["y" + "\x01" * 300, "z" + "\x02" * 300], "values": None}
    tokenizer = merging_tokenizer(chat_template=CHAT_TEMPLATE)
    with app_client(tokenizer=tokenizer) as client:
        size = len(client.post("/v1/judge", body).content)
    assert size > 500 * 1800
    with app_client(ServerOptions(max_response_bytes=size - 1), tokenizer=tokenizer) as client:
        assert error_of(client.post("/v1/judge", body))[2] == "response_too_large"
    with app_client(ServerOptions(max_response_bytes=2 * size), tokenizer=tokenizer) as client:
        assert client.post("/v1/judge", body).status_code == 200


def test_requests_are_counted_and_measured(server: AppClient) -> None:
    server.post("/v1/judge", BODY)
    counted = [line for line in server.get("/metrics").text.splitlines() if "/v1/judge" in line]
    assert any(line.startswith("prefixwise:requests_total{") for line in counted)


def test_http_workers_give_the_same_bits(server: AppClient) -> None:
    expected = server.post("/v1/judge", BODY).json()["results"]
    with server_process("--tokenizer", "--http-workers=2") as running:
        found = httpx.post(f"{running.url}/v1/judge", json=BODY, timeout=60).json()
        streamed = httpx.post(f"{running.url}/v1/judge", json={**BODY, "items": ["b"] * 3000}, timeout=60).json()
    assert found["results"] == expected
    assert len(streamed["results"]) == 3000
    assert streamed["results"][2999] == {**expected[0], "index": 2999}
