"""The rerank routes: right answers in every dialect, and errors in its own shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, fake_logits
from prefixwise.prompts.profile_choice import ProfileChoice, builtin_profile, builtin_profiles
from prefixwise.server.config import ServerOptions
from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.server.app_client import MODEL, AppClient, BrokenBackend, HeldBackend, app_client, error_of
from tests.server.letters_profile import letters_choice

DOCUMENTS = ["x", "", "abc", "x"]
REQUEST: dict[str, Any] = {"query": "z", "documents": DOCUMENTS}
TEXTS: dict[str, Any] = {"query": "z", "texts": DOCUMENTS}
ROUTES = ("/v1/rerank", "/v2/rerank", "/rerank")

# By hand: x, then the instruction a, the query z, then b + document as one text, then c.
CONTEXTS = [[4, 1, 9, 2, 4, 3], [4, 1, 9, 2, 3], [4, 1, 9, 2, 7, 3], [4, 1, 9, 2, 4, 3]]


def raw(context: list[int]) -> float:
    """The logit of y minus that of z."""
    yes, no = fake_logits(np.array(context, np.int32), np.array([8, 9], np.int32)).astype(float)
    return float(yes - no)


def relevance(context: list[int]) -> float:
    return float(1 / (1 + np.exp(-raw(context))))


RAW = [raw(context) for context in CONTEXTS]
ORDER = sorted(range(4), key=lambda index: -RAW[index])  # ties in the order of the request


@pytest.fixture(scope="module")
def reranker() -> Iterator[AppClient]:
    with app_client(tokenizer=merging_tokenizer(), profiles=letters_choice()) as made:
        yield made


def ranking(response: httpx.Response) -> list[tuple[int, float]]:
    assert response.status_code == 200, response.text
    return [(each["index"], each["relevance_score"]) for each in response.json()["results"]]


def tei_error_of(response: httpx.Response) -> tuple[int, str]:
    body = response.json()
    assert set(body) == {"error", "error_type"}, body
    assert isinstance(body["error"], str)
    assert response.headers["x-request-id"]
    return response.status_code, body["error_type"]


class TestCohereV1:
    def test_the_answer(self, reranker: AppClient) -> None:
        response = reranker.post("/v1/rerank", REQUEST, headers={"X-Request-Id": "mine"})
        assert response.json() == {
            "id": "mine",
            "object": "list",
            "model": MODEL,
            "results": [
                {"index": index, "relevance_score": pytest.approx(relevance(CONTEXTS[index]))} for index in ORDER
            ],
            "usage": {"prompt_tokens": 7, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}},
            "meta": {
                "api_version": {"version": "1"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": 7, "output_tokens": 0},
                "cached_tokens": 0,
                "profile": "letters",
            },
        }

    def test_the_best_come_first_and_ties_stay_in_order(self, reranker: AppClient) -> None:
        ranked = ranking(reranker.post("/v1/rerank", REQUEST))
        assert [index for index, _ in ranked] == ORDER
        assert ORDER.index(0) < ORDER.index(3)
        scores = dict(ranked)
        assert scores[0] == scores[3]

    @pytest.mark.parametrize("top_n", [1, 3, 4, 100])
    def test_top_n(self, reranker: AppClient, top_n: int) -> None:
        ranked = ranking(reranker.post("/v1/rerank", {**REQUEST, "top_n": top_n}))
        assert [index for index, _ in ranked] == ORDER[:top_n]

    def test_documents_come_back_where_they_are_asked_for(self, reranker: AppClient) -> None:
        results = reranker.post("/v1/rerank", {**REQUEST, "return_documents": True}).json()["results"]
        assert [each["document"] for each in results] == [{"text": DOCUMENTS[index]} for index in ORDER]

    def test_documents_may_be_objects(self, reranker: AppClient) -> None:
        objects = [{"text": text, "more": 1} for text in DOCUMENTS]
        mixed: list[object] = [objects[0], *DOCUMENTS[1:]]
        for documents in (objects, mixed):
            body = {**REQUEST, "documents": documents, "rank_fields": ["text"]}
            assert ranking(reranker.post("/v1/rerank", body)) == ranking(reranker.post("/v1/rerank", REQUEST))

    def test_null_is_absent(self, reranker: AppClient) -> None:
        nothing = dict.fromkeys(
            ("model", "top_n", "return_documents", "max_chunks_per_doc", "max_tokens_per_doc", "instruction",
             "profile", "rank_fields", "truncate", "truncation_side", "priority", "algorithm", "return_debug")
        )  # fmt: skip
        answer = reranker.post("/v1/rerank", {**REQUEST, **nothing}).json()
        assert {**answer, "id": ""} == {**reranker.post("/v1/rerank", REQUEST).json(), "id": ""}

    def test_the_instruction_is_in_the_prompt(self, reranker: AppClient) -> None:
        ranked = dict(ranking(reranker.post("/v1/rerank", {**REQUEST, "instruction": "yy"})))
        assert ranked[0] == pytest.approx(relevance([4, 8, 8, 9, 2, 4, 3]))

    def test_long_documents_are_cut_and_the_rest_of_the_prompt_is_not(self, reranker: AppClient) -> None:
        body = {"query": "z", "documents": ["xyxy", "x"], "max_tokens_per_doc": 2}
        answer = reranker.post("/v1/rerank", body).json()
        assert dict(ranking(reranker.post("/v1/rerank", body)))[0] == pytest.approx(relevance([4, 1, 9, 2, 4, 8, 3]))
        assert answer["meta"]["truncated"] == [{"index": 0, "original_tokens": 4, "kept_tokens": 2}]
        assert "cut" in answer["meta"]["warnings"][0]
        left = reranker.post("/v1/rerank", {**body, "documents": ["yyxy"], "truncation_side": "left"})
        assert dict(ranking(left))[0] == pytest.approx(relevance([4, 1, 9, 2, 4, 8, 3]))

    def test_debug_says_how_it_was_done(self, reranker: AppClient) -> None:
        body = {**REQUEST, "return_debug": True, "algorithm": "packed"}
        assert reranker.post("/v1/rerank", body).json()["meta"]["debug"]["algorithm"] == "packed"

    def test_a_profile_may_be_named(self, reranker: AppClient) -> None:
        body = {**REQUEST, "profile": "letters"}
        assert ranking(reranker.post("/v1/rerank", body)) == ranking(reranker.post("/v1/rerank", REQUEST))
        body["profile"] = "default"
        assert ranking(reranker.post("/v1/rerank", body)) == ranking(reranker.post("/v1/rerank", REQUEST))

    def test_a_guessed_profile_is_a_warning_unless_the_request_names_it(self) -> None:
        with app_client(tokenizer=merging_tokenizer(), profiles=letters_choice("a guess")) as client:
            assert client.post("/v1/rerank", REQUEST).json()["meta"]["warnings"] == ["a guess"]
            asked = client.post("/v1/rerank", {**REQUEST, "profile": "letters"}).json()
            assert "warnings" not in asked["meta"]

    def test_warnings_are_headers_too_and_in_the_log_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with app_client(tokenizer=merging_tokenizer(), profiles=letters_choice("a guess")) as client:
            body = {**TEXTS, "max_tokens_per_doc": 1}
            answers = [client.post("/rerank", body), client.post("/v1/rerank", REQUEST)]
        assert [answer.headers.get_list("x-prefixwise-warning") for answer in answers] == [["a guess"]] * 2
        assert [record.message for record in caplog.records].count("a guess") == 1

    def test_a_cut_is_in_a_header_too(self, reranker: AppClient) -> None:
        answer = reranker.post("/rerank", {"query": "z", "texts": ["xyxy"], "max_tokens_per_doc": 2})
        assert "1 document(s)" in answer.headers["x-prefixwise-warning"]

    @pytest.mark.parametrize("name", ["max_tokens_per_doc", "max_chunks_per_doc", "top_n"])
    @pytest.mark.parametrize("number", [2**31, 2**53, 2**60 // 1000, 2**63, 2**64 - 1])
    def test_huge_numbers_mean_all(self, reranker: AppClient, name: str, number: int) -> None:
        asked = {**REQUEST, "documents": [*DOCUMENTS[:3], "xy" * 3000]}
        plain = ranking(reranker.post("/v1/rerank", {**asked, "max_chunks_per_doc": 50}))
        found = ranking(reranker.post("/v1/rerank", {"max_chunks_per_doc": 50, **asked, name: number}))
        assert found == plain

    def test_many_documents_in_many_bytes(self, reranker: AppClient) -> None:
        """They are parsed and answered on other threads than a few."""
        documents = ["xyz"[number % 3] * (number % 40) for number in range(12_000)]
        body = {"query": "z", "documents": documents}
        answer = reranker.post("/v1/rerank", body).json()
        assert answer["meta"]["billed_units"] == {"search_units": 120}
        assert sorted(each["index"] for each in answer["results"]) == list(range(12_000))
        scores = [each["relevance_score"] for each in answer["results"]]
        assert scores == sorted(scores, reverse=True)
        alone = ranking(reranker.post("/v1/rerank", {**body, "documents": documents[41:42]}))
        assert alone[0][1] == next(each["relevance_score"] for each in answer["results"] if each["index"] == 41)


class TestCohereV2:
    def test_the_answer(self, reranker: AppClient) -> None:
        body = {**REQUEST, "model": "rerank-v4.0", "top_n": 2, "max_tokens_per_doc": 4096, "priority": 3}
        response = reranker.post("/v2/rerank", body, headers={"X-Request-Id": "mine"})
        assert response.json() == {
            "id": "mine",
            "results": [
                {"index": index, "relevance_score": pytest.approx(relevance(CONTEXTS[index]))} for index in ORDER[:2]
            ],
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": 7, "output_tokens": 0},
                "cached_tokens": 0,
                "profile": "letters",
            },
        }


class TestTei:
    def test_the_answer(self, reranker: AppClient) -> None:
        assert reranker.post("/rerank", TEXTS).json() == [
            {"index": index, "score": pytest.approx(relevance(CONTEXTS[index]))} for index in ORDER
        ]

    def test_text_and_raw_scores_where_they_are_asked_for(self, reranker: AppClient) -> None:
        body = {**TEXTS, "raw_scores": True, "return_text": True, "truncate": None}
        assert reranker.post("/rerank", body).json() == [
            {"index": index, "score": pytest.approx(RAW[index]), "text": DOCUMENTS[index]} for index in ORDER
        ]

    def test_with_documents_it_is_version_1(self, reranker: AppClient) -> None:
        for body in (REQUEST, {**REQUEST, "texts": None}):
            answer = reranker.post("/rerank", body, headers={"X-Request-Id": "same"}).json()
            assert answer == reranker.post("/v1/rerank", REQUEST, headers={"X-Request-Id": "same"}).json()

    @pytest.mark.parametrize("auto_truncate", [True, False])
    def test_what_does_not_fit_is_cut_as_the_request_says_else_the_server(self, auto_truncate: bool) -> None:
        options = ServerOptions(auto_truncate=auto_truncate)
        backend = FakeBackend(max_context_len=8)
        with app_client(options, backend=backend, tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
            assert client.get("/info").json()["auto_truncate"] is auto_truncate
            body: dict[str, Any] = {"query": "z", "texts": ["x", "yyyyx"]}
            refused: list[dict[str, Any]] = [{"truncate": False}, *([] if auto_truncate else [{}, {"truncate": None}])]
            for sent in refused:
                response = client.post("/rerank", {**body, **sent})
                assert tei_error_of(response) == (400, "Validation")
                assert "texts[1] must fit: expected at most 3 tokens, got 5" in response.json()["error"]
            if auto_truncate:
                asked = client.post("/rerank", {**body, "truncate": True}).json()
                assert client.post("/rerank", body).json() == asked
            kept = {"Right": [8, 8, 8], "Left": [8, 8, 4]}
            for direction, tokens in kept.items():
                answer = client.post("/rerank", {**body, "truncate": True, "truncation_direction": direction}).json()
                scores = {each["index"]: each["score"] for each in answer}
                assert scores[1] == pytest.approx(relevance([4, 1, 9, 2, *tokens, 3]))
            # In the other dialects it is cut, and told.
            answer = client.post("/v1/rerank", {"query": "z", "documents": body["texts"]}).json()
            assert answer["meta"]["truncated"] == [{"index": 1, "original_tokens": 5, "kept_tokens": 3}]

    def test_its_clients_learn_what_is_served(self, reranker: AppClient) -> None:
        info = reranker.get("/info").json()
        assert (info["model_id"], info["served_model_name"], info["max_client_batch_size"]) == (MODEL, MODEL, 100_000)
        assert "reranker" in info["model_type"]


BAD, VALUE, MISSING = "invalid_request_error", "invalid_value_error", "missing_parameter_error"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"query": None}, (400, MISSING, "missing_query", "query")),
        ({"query": ""}, (400, VALUE, "empty_query", "query")),
        ({"query": [1, 2]}, (400, BAD, "invalid_query_type", "query")),
        ({"documents": []}, (400, VALUE, "empty_documents", "documents")),
        ({"documents": "x"}, (400, BAD, "invalid_documents_type", "documents")),
        ({"documents": ["x", 5]}, (400, BAD, "invalid_documents_type", "documents")),
        ({"documents": [{"title": "x"}]}, (400, BAD, "invalid_documents_type", "documents")),
        ({"top_n": 0}, (400, VALUE, "invalid_top_n", "top_n")),
        ({"top_n": True}, (400, VALUE, "invalid_top_n", "top_n")),
        ({"max_tokens_per_doc": -1}, (400, VALUE, "invalid_max_tokens_per_doc", "max_tokens_per_doc")),
        ({"max_chunks_per_doc": 1.5}, (400, VALUE, "invalid_max_chunks_per_doc", "max_chunks_per_doc")),
        ({"instruction": 5}, (400, BAD, "invalid_instruction_type", "instruction")),
        ({"priority": 1000}, (400, VALUE, "invalid_priority", "priority")),
        ({"rank_fields": ["title"]}, (400, VALUE, "invalid_rank_fields", "rank_fields")),
        ({"profile": "nothing"}, (400, VALUE, "invalid_profile", "profile")),
        ({"profile": "plain"}, (400, VALUE, "invalid_profile", "profile")),
        ({"profile": "qwen3-reranker"}, (400, VALUE, "invalid_profile", "profile")),  # the tokenizer is not its own
        ({"model": 7}, (400, BAD, "invalid_model_type", "model")),
    ],
)
def test_errors_of_the_cohere_dialects(
    reranker: AppClient, route: str, change: dict[str, Any], expected: tuple[int, str, str, str]
) -> None:
    assert error_of(reranker.post(route, {**REQUEST, **change})) == expected


@pytest.mark.parametrize("route", ROUTES)
def test_no_documents_at_all(reranker: AppClient, route: str) -> None:
    response = reranker.post(route, {"query": "z"})
    if route == "/rerank":
        assert tei_error_of(response) == (400, "Validation")
        assert "texts is required" in response.json()["error"]
    else:
        assert error_of(response) == (400, MISSING, "missing_documents", "documents")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": 5}, "texts must be a list of strings, or of objects like"),
        ({"query": None}, "query is required"),
        ({"truncate": "yes"}, "truncate must be true or false"),
        ({"raw_scores": 1}, "raw_scores must be true or false"),
        ({"return_text": 1}, "return_text must be true or false"),
        ({"truncation_direction": "up"}, "truncation_direction must be one of Right, Left"),
        ({"profile": "nothing"}, "profile must be one of"),
    ],
)
def test_errors_of_the_tei_dialect(reranker: AppClient, change: dict[str, Any], message: str) -> None:
    response = reranker.post("/rerank", {**TEXTS, **change})
    assert tei_error_of(response) == (400, "Validation")
    assert message in response.json()["error"]


def test_no_texts_are_empty_for_tei(reranker: AppClient) -> None:
    response = reranker.post("/rerank", {**TEXTS, "texts": []})
    assert tei_error_of(response) == (400, "Empty")
    assert "texts must hold at least one document" in response.json()["error"]


def test_a_query_that_leaves_no_room_fails_before_any_work() -> None:
    backend = FakeBackend(max_context_len=8)
    with app_client(backend=backend, tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
        assert error_of(client.post("/v1/rerank", {"query": "zzzzzz", "documents": ["x"]})) == (
            400, VALUE, "context_too_long", "query"
        )  # fmt: skip


def test_too_many_documents() -> None:
    options: dict[str, Any] = {"profiles": letters_choice(), "max_items_per_request": 3}
    with app_client(tokenizer=merging_tokenizer(), **options) as client:
        assert error_of(client.post("/v1/rerank", REQUEST)) == (400, VALUE, "too_many_items", "documents")
        assert tei_error_of(client.post("/rerank", TEXTS)) == (400, "Validation")


def test_chunks_count_as_items() -> None:
    options: dict[str, Any] = {"profiles": letters_choice(), "max_items_per_request": 3}
    with app_client(backend=FakeBackend(max_context_len=8), tokenizer=merging_tokenizer(), **options) as client:
        body = {"query": "z", "documents": ["x" * 12]}
        assert client.post("/v1/rerank", {**body, "max_chunks_per_doc": 3}).status_code == 200
        refused = client.post("/v1/rerank", {**body, "max_chunks_per_doc": 4})
        assert error_of(refused) == (400, VALUE, "too_many_items", "max_chunks_per_doc")


def test_a_document_of_nothing_fits_where_nothing_else_does() -> None:
    with app_client(
        backend=FakeBackend(max_context_len=8), tokenizer=merging_tokenizer(), profiles=letters_choice()
    ) as client:
        body = {"query": "zzzz", "documents": [""]}  # x, a, four of z, b, c
        assert client.post("/v1/rerank", body).status_code == 200
        refused = client.post("/v1/rerank", {**body, "documents": ["", "x"]})
        assert error_of(refused) == (400, VALUE, "context_too_long", "query")
        assert "got 7 tokens before it and 1 after it" in refused.json()["message"]
        assert "has room for 8 in all" in refused.json()["message"]


def test_a_classifier_reranks_and_does_not_score() -> None:
    backend = FakeBackend()
    backend.config = replace(backend.config, num_classes=2)
    with app_client(backend=backend, tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
        assert client.post("/v1/rerank", REQUEST).status_code == 200
        assert client.get("/health_generate").status_code == 200
        refused = client.post("/v1/score", {"query": "z", "items": ["x"], "labels": ["y"]})
        assert error_of(refused) == (400, VALUE, "no_label_logits", None)


class TestModelName:
    def test_any_will_do(self, reranker: AppClient) -> None:
        for name in ("rerank-v4.0", "default", MODEL, None):
            answer = reranker.post("/v1/rerank", {**REQUEST, "model": name})
            assert answer.json()["model"] == MODEL

    def test_unless_the_server_is_strict(self) -> None:
        options = ServerOptions(strict_model=True)
        with app_client(options, tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
            assert client.post("/v1/rerank", {**REQUEST, "model": MODEL}).status_code == 200
            assert client.post("/v1/rerank", REQUEST).status_code == 200
            refused = client.post("/v1/rerank", {**REQUEST, "model": "rerank-v4.0"})
            assert error_of(refused) == (404, "model_error", "model_not_found", "model")
            assert tei_error_of(client.post("/rerank", {**TEXTS, "model": "other"})) == (404, "Validation")


class TestServiceErrors:
    def test_a_full_queue(self) -> None:
        options: dict[str, Any] = {"profiles": letters_choice(), "max_queued_tokens": 5}
        with app_client(tokenizer=merging_tokenizer(), **options) as client:
            client.engine.scheduler.admission.restore(5)  # of another request
            for route in ROUTES:
                refused = client.post(route, REQUEST)
                assert error_of(refused) == (429, "rate_limit_error", "queue_full", None)
                assert int(refused.headers["retry-after"]) >= 1
            refused = client.post("/rerank", TEXTS)
            assert tei_error_of(refused) == (429, "Overloaded")
            assert int(refused.headers["retry-after"]) >= 1

    def test_a_failure(self) -> None:
        with app_client(backend=BrokenBackend(), tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
            assert error_of(client.post("/v1/rerank", REQUEST))[:3] == (500, "server_error", "internal_error")
            response = client.post("/rerank", TEXTS)
            assert tei_error_of(response) == (500, "Backend")
            assert "secret" not in response.text

    def test_a_deadline(self) -> None:
        with app_client(backend=HeldBackend(), tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
            response = client.post("/rerank", TEXTS, headers={"X-Request-Timeout": "0.1"})
            assert tei_error_of(response) == (504, "Backend")

    def test_no_tokenizer(self, client: AppClient) -> None:
        assert error_of(client.post("/v1/rerank", REQUEST)) == (400, BAD, "no_tokenizer", None)
        assert tei_error_of(client.post("/rerank", TEXTS)) == (400, "Tokenizer")


class TestPrefix:
    def test_a_profile_warms_what_rerank_requests_share(self) -> None:
        with app_client(tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
            query = "z" * 300
            pinned = client.post("/v1/prefix", {"query": query, "profile": "letters", "instruction": "y"}).json()
            assert (pinned["tokens"], pinned["cached_tokens"]) == (303, 0)  # x, y, the query, b
            body = {"query": query, "documents": ["x"], "instruction": "y", "algorithm": "prefill_extend"}
            assert client.post("/v1/rerank", body).json()["meta"]["cached_tokens"] == 303
            assert client.post("/v1/prefix", {"query": query, "profile": "default"}).json()["tokens"] == 303

    def test_plain_is_what_requests_to_score_share(self, reranker: AppClient) -> None:
        for body in ({"query": "zzz"}, {"query": "zzz", "profile": "plain"}):
            assert reranker.post("/v1/prefix", body).json()["tokens"] == 3

    def test_any_model_name_will_do_with_a_profile(self, reranker: AppClient) -> None:
        body = {"query": "z", "model": "any"}
        assert reranker.post("/v1/prefix", {**body, "profile": "default"}).status_code == 200
        assert reranker.post("/v1/prefix", body).status_code == 404

    def test_a_server_that_only_scores(self) -> None:
        choice = ProfileChoice(builtin_profile("plain"), "it was asked for", dict(builtin_profiles()))
        with app_client(tokenizer=merging_tokenizer(), profiles=choice) as client:
            assert client.post("/v1/prefix", {"query": "zzz", "profile": "default"}).json()["tokens"] == 3
            assert error_of(client.post("/v1/rerank", REQUEST)) == (400, VALUE, "invalid_profile", "profile")

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            ({"query": "z", "profile": "nothing"}, (400, VALUE, "invalid_profile", "profile")),
            ({"query": "z", "profile": 5}, (400, BAD, "invalid_profile_type", "profile")),
            ({"query": [1], "profile": "letters"}, (400, BAD, "invalid_query_type", "query")),
            ({"query": "z", "instruction": "y"}, (400, VALUE, "conflicting_parameters", "instruction")),
        ],
    )
    def test_errors(self, reranker: AppClient, body: dict[str, Any], expected: tuple[int, str, str, str]) -> None:
        assert error_of(reranker.post("/v1/prefix", body)) == expected
