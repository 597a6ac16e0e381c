"""Fields that a route does not have: known ones are errors, unknown ones are served and named. And vLLM's on rerank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.server.app_client import IDS_REQUEST, AppClient, app_client, error_of
from tests.server.letters_profile import letters_choice

RERANK: dict[str, Any] = {"query": "z", "documents": ["x", "xyx", "y"]}
TEXTS: dict[str, Any] = {"query": "z", "texts": ["x", "y"]}
PAIRS: dict[str, Any] = {"text_1": "z", "text_2": ["x", "y"]}
PREFIX: dict[str, Any] = {"query": [1, 2, 3]}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
EVERY_ROUTE: dict[str, dict[str, Any]] = {
    "/v1/score": IDS_REQUEST,
    "/v1/rerank": RERANK,
    "/score": PAIRS,
    "/v1/embeddings": {"input": [1]},
    "/v1/judge": {**CHAT, "answers": "yes/no"},
    "/v1/completions": {"prompt": [1], "max_tokens": 1},
    "/v1/chat/completions": {**CHAT, "max_tokens": 1},
}
TOKENIZE: dict[str, Any] = {"text": "abc"}
WARNING = 'the field "unheard_of" is unknown and was ignored'


@pytest.fixture(scope="module")
def server() -> Iterator[AppClient]:
    with app_client(tokenizer=merging_tokenizer(), profiles=letters_choice()) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/score", IDS_REQUEST, ("warnings",)),
        ("/v1/rerank", RERANK, ("meta", "warnings")),
        ("/v2/rerank", RERANK, ("meta", "warnings")),
        ("/rerank", TEXTS, None),
        ("/v1/prefix", PREFIX, ("warnings",)),
        ("/tokenize", {"text": "abc"}, ("warnings",)),
    ],
)
def test_an_unknown_field_is_served_and_named(
    server: AppClient, path: str, body: dict[str, Any], place: tuple[str, ...] | None
) -> None:
    assert "x-prefixwise-warning" not in server.post(path, body).headers
    response = server.post(path, {**body, "unheard_of": 0.5})
    assert response.status_code == 200, response.text
    assert response.headers.get_list("x-prefixwise-warning") == [WARNING]
    if place is not None:
        found = response.json()
        for name in place:
            found = found[name]
        assert found == [WARNING]


def test_the_log_quotes_no_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    labels = {"query": "c", "items": ["a"], "labels": ["abc", "abc"]}
    calls = {"/v1/score": labels, "/v1/rerank": RERANK, "/score": PAIRS, "/tokenize": {"text": "a"}}
    with app_client(tokenizer=merging_tokenizer(), profiles=letters_choice("a guess")) as client:
        for path, body in [*calls.items()] * 2:
            response = client.post(path, {**body, "John Doe": 1})
            assert "John Doe" in response.headers["x-prefixwise-warning"], response.text
            assert ("abc" in response.headers["x-prefixwise-warning"]) == (path == "/v1/score")
    assert not any(text in caplog.text for text in ("John", "abc"))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == ["a guess"]


def test_names_cannot_break_a_header(client: AppClient) -> None:
    response = client.post("/v1/score", {**IDS_REQUEST, "a\r\nb\x00\x7fé": 1})
    (value,) = response.headers.get_list("x-prefixwise-warning")
    assert value == r'the field "a\r\nb\u0000\x7f\xe9" is unknown and was ignored'


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/score", {**IDS_REQUEST, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/score", {**IDS_REQUEST, "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/v1/rerank", {**RERANK, "max_tokens_per_query": 3}, "max_tokens_per_query"),
        ("/v1/rerank", {**RERANK, "cache_salt": "x"}, "cache_salt"),
        *((path, {**body, "lora_path": "x"}, "lora_path") for path, body in EVERY_ROUTE.items()),
        *((path, {**body, "cache_salt": "x"}, "cache_salt") for path, body in EVERY_ROUTE.items()),
        *(
            ("/v1/rerank", {**RERANK, name: value}, name)
            for name, value in (("activation", False), ("chat_template", "x"))
        ),
        *(
            (path, {**EVERY_ROUTE[path], name: value}, name)
            for path in ("/v1/score", "/v1/rerank", "/score", "/v1/embeddings", "/v1/judge")
            for name, value in (("stream", True), ("temperature", 0.5), ("max_tokens", 5), ("dimensions", 64))
        ),
        *(
            (path, {**EVERY_ROUTE[path], name: value}, name)
            for path in ("/v1/score", "/v1/rerank", "/score", "/v1/embeddings")
            for name, value in (("guided_choice", ["a"]), ("logit_bias", {"5": 1}), ("repetition_penalty", 1.1))
        ),
        ("/v2/rerank", {**RERANK, "stream": True}, "stream"),
        ("/rerank", {**RERANK, "tools": [{}]}, "tools"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 1, "top_logprobs": 1}, "top_logprobs"),
        ("/v1/completions", {"prompt": [1], "max_completion_tokens": 1}, "max_completion_tokens"),
        *(
            (path, {**RERANK, name: value}, name)
            for path in ("/v1/rerank", "/rerank")
            for name, value in (("max_doc_length", 5), ("return_embeddings", True))
        ),
        ("/tokenize", CHAT, "messages"),
        ("/tokenize", {"text": "abc", "return_token_strs": True}, "return_token_strs"),
        ("/v1/embeddings", {"input": [1], "normalize": True}, "normalize"),
        ("/v1/embeddings", {"input": [1], "embed_dtype": "float16"}, "embed_dtype"),
        ("/v1/embeddings", {"input": [1], "endianness": "big"}, "endianness"),
        ("/v2/rerank", {**RERANK, "top_k": 3}, "top_k"),
        ("/v2/rerank", {**RERANK, "instruct": "x"}, "instruct"),
    ],
)
def test_a_known_field_that_is_not_served_is_an_error(
    server: AppClient, path: str, body: dict[str, Any], field: str
) -> None:
    assert error_of(server.post(path, body)) == (400, "invalid_value_error", "unsupported_parameter", field)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/rerank", {"activation": True}),
        ("/v1/rerank", {"return_embeddings": False, "max_doc_length": None}),
        *(
            (path, {"stream": False, "temperature": 1.0, "max_tokens": None, "tools": [], "tool_choice": "none"})
            for path in ("/v1/score", "/v1/rerank", "/score", "/v1/embeddings")
        ),
        ("/v1/score", {"logit_bias": {}, "bad_words": [], "guided_json": None, "presence_penalty": 0}),
        ("/v1/rerank", {"max_tokens": 0, "top_logprobs": 0, "tool_choice": "auto", "stop": "", "regex": ""}),
        ("/v1/completions", {"tool_choice": "auto", "stop": ""}),
        ("/tokenize", {"return_token_strs": False, "messages": None}),
        ("/v1/embeddings", {"normalize": False, "embed_dtype": "float32", "endianness": "little"}),
    ],
)
def test_a_known_value_that_changes_nothing_is_served(server: AppClient, path: str, fields: dict[str, Any]) -> None:
    response = server.post(path, {**EVERY_ROUTE.get(path, TOKENIZE), **fields})
    assert response.status_code == 200, response.text
    assert "x-prefixwise-warning" not in response.headers


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/rerank", {**TEXTS}, "texts is not served here: its name is `documents` in Cohere's format; "),
        ("/v2/rerank", {**TEXTS}, "texts is not served here: its name is `documents` in Cohere's format; "),
        (
            "/v1/rerank",
            {**RERANK, "top_k": 1, "top_n": 1},
            "top_n is not served here: its name is `top_k` in Voyage's format, which `top_k` and `truncation` ask",
        ),
        (
            "/rerank",
            {**TEXTS, "use_activation": False},
            "use_activation is not served here: it is no field of TEI's format, which `texts` asks for; ",
        ),
        ("/score", {**PAIRS, "top_n": 1}, "top_n is not served here: it is no field of the format of vLLM's /score; "),
        ("/v1/score", {**IDS_REQUEST, "top_n": 1}, "top_n is not served here: it is a field of other requests, "),
    ],
)
def test_a_rerank_request_hears_the_name_in_its_own_format(
    server: AppClient, path: str, body: dict[str, Any], expected: str
) -> None:
    assert server.post(path, body).text.count(expected), server.post(path, body).text


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_vllms_fields_on_the_rerank_routes(server: AppClient, path: str) -> None:
    def results(**fields: object) -> list[dict[str, Any]]:
        response = server.post(path, {**RERANK, **fields})
        assert response.status_code == 200, response.text
        found: list[dict[str, Any]] = response.json()["results"]
        return found

    mapped, unmapped = results(), results(use_activation=False)
    for one, other in zip(mapped, unmapped, strict=True):
        assert one["index"] == other["index"]
        assert one["relevance_score"] == pytest.approx(1 / (1 + np.exp(-other["relevance_score"])))
    assert max(each["relevance_score"] for each in unmapped) > 1
    asked = results(chat_template_kwargs={"instruction": "c"})
    assert asked == results(instruction="c") != mapped
    # x, the instruction, the query, b, c: five tokens around a document.
    assert results(truncate_prompt_tokens=6) == results(max_tokens_per_doc=1) != mapped
    assert results(truncate_prompt_tokens=-1) == mapped
