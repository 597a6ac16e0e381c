"""vLLM's `/score`, at two paths, and `/generative_scoring`: its requests, its responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, fake_logits
from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.server.app_client import IDS_REQUEST, MODEL, AppClient, app_client, error_of
from tests.server.letters_profile import letters_choice

PATHS = ("/score", "/v1/score")


def raw(query: int, document: list[int]) -> float:
    """By hand: the profile's x, its instruction a, the query, b and the document, then c; y against z."""
    context = np.array([4, 1, query, 2, *document, 3], np.int32)
    yes, no = fake_logits(context, np.array([8, 9], np.int32)).astype(float)
    return float(yes - no)


def relevance(query: int, document: list[int]) -> float:
    return float(1 / (1 + np.exp(-raw(query, document))))


@pytest.fixture(scope="module")
def server() -> Iterator[AppClient]:
    with app_client(tokenizer=merging_tokenizer(), profiles=letters_choice()) as made:
        yield made


def scores(response: httpx.Response) -> list[float]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [(each["index"], each["object"]) for each in data] == [(index, "score") for index in range(len(data))]
    return [each["score"] for each in data]


@pytest.mark.parametrize("path", PATHS)
def test_one_to_many(server: AppClient, path: str) -> None:
    body = {"model": "any", "text_1": "z", "text_2": ["x", "", "y"]}
    response = server.post(path, body, headers={"X-Request-Id": "mine"})
    answer = response.json()
    assert scores(response) == pytest.approx([relevance(9, [4]), relevance(9, []), relevance(9, [8])])
    assert {name: answer[name] for name in ("id", "object", "model")} == {
        "id": "score-mine",
        "object": "list",
        "model": MODEL,
    }
    assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
    assert answer["usage"]["prompt_tokens"] == 4 + 2
    assert server.post(path, {"queries": "z", "documents": "x"}).json()["data"][0]["score"] == scores(response)[0]


def test_pairs_are_in_their_order_and_equal_queries_share_a_prefix(server: AppClient) -> None:
    body = {"queries": ["z", "y", "z"], "documents": ["x", "x", "y"], "request_id": "own"}
    response = server.post("/score", body)
    assert scores(response) == pytest.approx([relevance(9, [4]), relevance(8, [4]), relevance(9, [8])])
    assert response.json()["usage"]["prompt_tokens"] == (4 + 2) + (4 + 1)
    assert response.json()["id"] == "score-own"


def test_scores_without_activation_are_raw(server: AppClient) -> None:
    response = server.post("/score", {"text_1": "z", "text_2": ["x"], "use_activation": False})
    assert scores(response) == pytest.approx([raw(9, [4])])


def test_instruction_in_the_arguments_of_the_template(server: AppClient) -> None:
    body = {"text_1": "z", "text_2": ["x", "y"]}
    asked = scores(server.post("/score", {**body, "chat_template_kwargs": {"instruction": "c"}}))
    assert asked == scores(server.post("/score", {**body, "instruction": "c"}))
    assert asked != scores(server.post("/score", body))


def test_a_long_text_is_cut_to_the_prompt_tokens_asked_for_or_an_error() -> None:
    with app_client(
        backend=FakeBackend(max_context_len=10), tokenizer=merging_tokenizer(), profiles=letters_choice()
    ) as client:
        body = {"text_1": ["z", "y", "z"], "text_2": ["x", "x", "xyx" * 5]}
        refused = client.post("/score", body)
        assert error_of(refused) == (400, "invalid_value_error", "context_too_long", "text_2")
        assert refused.json()["message"].endswith("let it be cut (truncate_prompt_tokens: -1)")
        assert refused.json()["message"].startswith("text_2[2] must fit: expected at most 5 tokens, got 15")
        for limit, kept in ((-1, [4, 8, 4, 4, 8]), (7, [4, 8])):
            response = client.post("/score", {**body, "truncate_prompt_tokens": limit})
            assert scores(response)[2] == pytest.approx(relevance(9, kept))
            assert response.json()["truncated"] == [{"index": 2, "original_tokens": 15, "kept_tokens": len(kept)}]
            assert response.json()["warnings"] == response.headers.get_list("x-prefixwise-warning")
        short = client.post("/score", {**body, "truncate_prompt_tokens": 5})
        assert error_of(short)[2:] == ("context_too_long", "query")
        assert "truncate_prompt_tokens" in short.json()["message"]


def test_the_fields_decide_between_the_dialects_of_one_path(server: AppClient) -> None:
    for path in PATHS:
        assert "scores" in server.post(path, IDS_REQUEST).json()
        mixed = server.post(path, {**IDS_REQUEST, "text_1": "z"})
        assert error_of(mixed) == (400, "invalid_value_error", "unsupported_parameter", "query")
        rerank = server.post(path, {"query": "z", "documents": ["x"]})
        assert error_of(rerank)[2:] == ("unsupported_parameter", "query")
        assert "/v1/rerank" in rerank.json()["message"]


def test_unknown_fields_are_named(server: AppClient) -> None:
    response = server.post("/score", {"text_1": ["z", "y"], "text_2": ["x", "x"], "encoding_format": "float"})
    assert response.json()["warnings"] == ['the field "encoding_format" is unknown and was ignored']
    assert response.headers.get_list("x-prefixwise-warning") == response.json()["warnings"]


class TestGenerativeScoring:
    BODY: dict[str, Any] = {"query": [1, 2, 3], "items": [[4, 5], [6]], "label_token_ids": [7, 8]}  # noqa: RUF012

    def test_the_score_is_that_of_the_first_label(self, server: AppClient) -> None:
        for fields, same in (({}, {"apply_softmax": True}), ({"apply_softmax": False}, {})):
            response = server.post("/generative_scoring", {**self.BODY, **fields})
            expected = server.post("/v1/score", {**self.BODY, **same}).json()
            assert scores(response) == [row[0] for row in expected["scores"]]
            assert response.json()["usage"] == expected["usage"]
            assert response.json()["id"].startswith("generative-scoring-")

    def test_bos_is_left_out_on_request(self) -> None:
        body = {"query": "ab", "items": ["c", "x"], "label_token_ids": [7, 8]}
        ids = {**body, "query": [5], "items": [[3], [4]]}
        with app_client(tokenizer=merging_tokenizer(bos=True)) as client:
            with_bos = scores(client.post("/generative_scoring", body))
            without = scores(client.post("/generative_scoring", {**body, "add_special_tokens": False}))
            assert without == scores(client.post("/generative_scoring", ids))
            assert with_bos == scores(client.post("/generative_scoring", {**ids, "query": [0, 5]}))
            assert with_bos != without

    def test_its_errors(self, server: AppClient) -> None:
        for fields, code in (
            ({"labels": ["y"]}, "unsupported_parameter"),
            ({"label_token_ids": []}, "empty_label_token_ids"),
            ({"items": []}, "empty_items"),
            ({"label_token_ids": [600]}, "token_id_exceeds_vocab"),
        ):
            assert error_of(server.post("/generative_scoring", {**self.BODY, **fields}))[2] == code
