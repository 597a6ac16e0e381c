"""The rerank APIs of SGLang, Infinity, Voyage, Mixedbread and NVIDIA: which body is whose, and its response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.server.app import ROUTES
from prefixwise.server.config import ServerOptions
from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.server.app_client import MODEL, AppClient, app_client, error_of
from tests.server.letters_profile import letters_choice
from tests.server.test_rerank import CONTEXTS, DOCUMENTS, ORDER, RAW, REQUEST, TEXTS, ranking, relevance

BAD, VALUE, MISSING = "invalid_request_error", "invalid_value_error", "missing_parameter_error"
SCORES = [pytest.approx(relevance(CONTEXTS[index])) for index in ORDER]
LOGITS = [pytest.approx(RAW[index]) for index in ORDER]
INPUT: dict[str, Any] = {"query": "z", "input": DOCUMENTS}
PASSAGES: dict[str, Any] = {"query": {"text": "z"}, "passages": [{"text": text} for text in DOCUMENTS]}


@pytest.fixture(scope="module")
def reranker() -> Iterator[AppClient]:
    with app_client(tokenizer=merging_tokenizer(), profiles=letters_choice()) as made:
        yield made


class TestSglang:
    def test_instruct_asks_for_its_list(self, reranker: AppClient) -> None:
        answer = reranker.post("/v1/rerank", {**REQUEST, "instruct": "a"}).json()
        assert answer == [
            {"score": score, "document": DOCUMENTS[index], "index": index, "meta_info": None}
            for score, index in zip(SCORES, ORDER, strict=True)
        ]
        other = reranker.post("/v1/rerank", {**REQUEST, "instruct": "yy", "return_documents": False, "top_n": 4}).json()
        assert all("document" not in each for each in other)
        assert {each["index"]: each["score"] for each in other}[0] == pytest.approx(relevance([4, 8, 8, 9, 2, 4, 3]))

    def test_a_flag_makes_it_the_answer_to_all_that_could_be_its_own(self, reranker: AppClient) -> None:
        options = ServerOptions(rerank_format="sglang")
        with app_client(options, tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
            answer = client.post("/v1/rerank", {**REQUEST, "top_n": 2}).json()
            assert [(each["index"], each["score"]) for each in answer] == list(zip(ORDER, SCORES, strict=True))[:2]
            assert "data" in client.post("/v1/rerank", {**REQUEST, "top_k": 2}).json()
            assert "results" in client.post("/rerank", REQUEST).json()  # a route that SGLang does not have
        assert "results" in reranker.post("/v1/rerank", {**REQUEST, "instruct": None}).json()

    def test_its_errors(self, reranker: AppClient) -> None:
        response = reranker.post("/v1/rerank", {**REQUEST, "instruct": "a", "top_n": 0})
        assert response.status_code == 400
        assert response.json() == {
            "object": "error",
            "message": "top_n must be an integer of 1 or more, got 0 (integer)",
            "type": VALUE,
            "param": "top_n",
            "code": 400,
        }


@pytest.mark.parametrize("route", ["/v1/rerank", "/rerank"])
class TestInfinity:
    def test_raw_scores_tell_it(self, reranker: AppClient, route: str) -> None:
        answer = reranker.post(route, {**REQUEST, "raw_scores": False}, headers={"X-Request-Id": "mine"}).json()
        assert answer.pop("created") > 1.7e9
        assert answer == {
            "object": "rerank",
            "results": [{"relevance_score": score, "index": index} for score, index in zip(SCORES, ORDER, strict=True)],
            "model": MODEL,
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
            "id": "mine",
        }

    def test_raw_scores_and_documents(self, reranker: AppClient, route: str) -> None:
        asked = {**REQUEST, "raw_scores": True, "return_documents": True, "top_n": 2}
        results = reranker.post(route, asked).json()["results"]
        assert [each["relevance_score"] for each in results] == LOGITS[:2]
        assert [each["document"] for each in results] == [DOCUMENTS[index] for index in ORDER[:2]]


@pytest.mark.parametrize("route", ["/v1/rerank", "/rerank"])
class TestVoyage:
    @pytest.mark.parametrize("own", [{"top_k": 2}, {"top_k": 2, "truncation": True}])
    def test_the_answer(self, reranker: AppClient, route: str, own: dict[str, Any]) -> None:
        assert reranker.post(route, {**REQUEST, **own}).json() == {
            "object": "list",
            "data": [
                {"index": index, "relevance_score": score} for score, index in list(zip(SCORES, ORDER, strict=True))[:2]
            ],
            "model": MODEL,
            "usage": {"total_tokens": 7},
        }

    def test_truncation_and_documents(self, route: str) -> None:
        backend = FakeBackend(max_context_len=8)
        with app_client(backend=backend, tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
            body = {"query": "z", "documents": ["yyyyx"], "return_documents": True}
            cut = client.post(route, {**body, "truncation": True}).json()["data"]
            assert cut == [{"index": 0, "relevance_score": pytest.approx(relevance([4, 1, 9, 2, 8, 8, 8, 3])),
                            "document": "yyyyx"}]  # fmt: skip
            refused = client.post(route, {**body, "truncation": False})
            assert error_of(refused)[2] == "context_too_long"
            assert refused.json()["message"].endswith("shorten it, or let it be cut (truncation)")


class TestMixedbread:
    @pytest.mark.parametrize("route", ["/v1/rerank", "/v1/reranking"])
    def test_the_answer(self, reranker: AppClient, route: str) -> None:
        inputs = [{"text": text, "more": 1} for text in DOCUMENTS]
        body = {**INPUT, "input": inputs, "top_k": 2, "return_input": True, "rewrite_query": False}
        assert reranker.post(route, body).json() == {
            "object": "list",
            "model": MODEL,
            "data": [
                {"index": index, "score": score, "input": inputs[index], "object": "rank_result"}
                for score, index in list(zip(SCORES, ORDER, strict=True))[:2]
            ],
            "usage": {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0},
            "top_k": 2,
            "return_input": True,
        }

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"input": None}, (400, MISSING, "missing_input", "input")),
            ({"input": []}, (400, VALUE, "empty_input", "input")),
            ({"top_k": 0}, (400, VALUE, "invalid_top_k", "top_k")),
            ({"rewrite_query": True}, (400, VALUE, "invalid_rewrite_query", "rewrite_query")),
            ({"rank_fields": ["title"]}, (400, VALUE, "invalid_rank_fields", "rank_fields")),
        ],
    )
    def test_errors(self, reranker: AppClient, change: dict[str, Any], expected: tuple[int, str, str, str]) -> None:
        assert error_of(reranker.post("/v1/reranking", {**INPUT, **change})) == expected


class TestNvidia:
    def test_the_answer(self, reranker: AppClient) -> None:
        assert reranker.post("/v1/ranking", {**PASSAGES, "model": "nvidia/any", "truncate": "END"}).json() == {
            "rankings": [{"index": index, "logit": logit} for logit, index in zip(LOGITS, ORDER, strict=True)],
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
        }

    def test_a_passage_is_cut_only_where_that_is_asked_for(self) -> None:
        backend = FakeBackend(max_context_len=8)
        with app_client(backend=backend, tokenizer=merging_tokenizer(), profiles=letters_choice()) as client:
            body = {"query": {"text": "z"}, "passages": [{"text": "yyyyx"}]}
            for truncate in ({}, {"truncate": "NONE"}):
                response = client.post("/v1/ranking", {**body, **truncate})
                assert error_of(response)[2] == "context_too_long"
                assert response.json()["message"].endswith('shorten it, or let it be cut (truncate: "END")')
            assert client.post("/v1/ranking", {**body, "truncate": "END"}).status_code == 200

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"query": "z"}, (400, BAD, "invalid_query_type", "query")),
            ({"query": {}}, (400, MISSING, "missing_query", "query")),
            ({"query": {"text": ""}}, (400, VALUE, "empty_query", "query")),
            ({"passages": None}, (400, MISSING, "missing_passages", "passages")),
            ({"passages": [{"title": "x"}]}, (400, BAD, "invalid_passages_type", "passages")),
            ({"truncate": "START"}, (400, VALUE, "invalid_truncate", "truncate")),
        ],
    )
    def test_errors(self, reranker: AppClient, change: dict[str, Any], expected: tuple[int, str, str, str]) -> None:
        assert error_of(reranker.post("/v1/ranking", {**PASSAGES, **change})) == expected


class TestFieldsOfDocuments:
    DOCUMENTS: ClassVar = [{"text": "x", "id": 1}, "y", {"text": "z", "meta": {"a": [None]}, "id": 2}]
    WARNING = 'only "text" is read of objects in {}: "id", "meta" will be neither scored nor returned'

    @pytest.mark.parametrize("route", ["/v1/rerank", "/v2/rerank", "/rerank"])
    def test_coheres_format_returns_them(self, reranker: AppClient, route: str) -> None:
        response = reranker.post(route, {"query": "z", "documents": self.DOCUMENTS, "return_documents": True})
        found = {each["index"]: each["document"] for each in response.json()["results"]}
        assert found == {0: self.DOCUMENTS[0], 1: {"text": "y"}, 2: self.DOCUMENTS[2]}
        assert "x-prefixwise-warning" not in response.headers

    @pytest.mark.parametrize(
        ("route", "name", "more"),
        [
            ("/rerank", "texts", {"return_text": True}),
            ("/v1/rerank", "documents", {"instruct": "a"}),
            ("/v1/rerank", "documents", {"top_k": 3, "return_documents": True}),
            ("/v1/rerank", "documents", {"raw_scores": False}),
            ("/v1/ranking", "passages", {"query": {"text": "z"}}),
            ("/score", "text_2", {"query": None, "text_1": ["x", "y", "z"]}),
        ],
    )
    def test_formats_of_texts_name_them_once(
        self, reranker: AppClient, route: str, name: str, more: dict[str, Any]
    ) -> None:
        response = reranker.post(route, {"query": "z", name: self.DOCUMENTS, **more})
        assert response.status_code == 200, response.text
        assert response.headers.get_list("x-prefixwise-warning") == [self.WARNING.format(name)]
        texts = reranker.post(route, {"query": "z", name: ["x", "y", {"text": "z"}], **more})
        assert "x-prefixwise-warning" not in texts.headers

    def test_a_warning_names_five_of_them(self, reranker: AppClient) -> None:
        many = [{"text": "x", **dict.fromkeys("abcdefg", 1)}]
        (warning,) = reranker.post("/rerank", {"query": "z", "texts": many}).headers.get_list("x-prefixwise-warning")
        assert '"d", "e", ... will be' in warning

    @pytest.mark.parametrize(
        ("route", "name", "returned"),
        [("/v1/rerank", "documents", "return_documents"), ("/v1/reranking", "input", "return_input")],
    )
    @pytest.mark.parametrize("value", ["[" * 252 + "]" * 252, '"\\ud800"'])
    def test_what_json_cannot_return_is_refused(
        self, reranker: AppClient, route: str, name: str, returned: str, value: str
    ) -> None:
        body = f'{{"query": "z", "{name}": ["y", {{"text": "x", "more": {value}}}], "{returned}": true}}'
        expected = (400, BAD, f"invalid_{name}_type", name)
        assert error_of(reranker.post(route, content=body.encode())) == expected
        assert reranker.post(route, content=body.replace("true", "false").encode()).status_code == 200

    @pytest.mark.parametrize("levels", range(235, 253))
    def test_no_depth_fails_on_the_way_out(self, reranker: AppClient, levels: int) -> None:
        body = f'{{"query": "z", "documents": [{{"text": "x", "more": {"[" * levels}{"]" * levels}}}]'
        response = reranker.post("/v1/rerank", content=f'{body}, "return_documents": true}}'.encode())
        assert response.status_code in (200, 400), response.text


class TestTrailingSlash:
    @pytest.mark.parametrize(
        ("path", "body"),
        [("/v1/rerank", REQUEST), ("/v2/rerank", REQUEST), ("/rerank", TEXTS), ("/v1/ranking", PASSAGES)],
    )
    def test_the_answer_is_the_same(self, reranker: AppClient, path: str, body: dict[str, Any]) -> None:
        same = {"X-Request-Id": "same"}
        slashed = reranker.post(f"{path}/", body, headers=same)
        assert (slashed.status_code, slashed.json()) == (200, reranker.post(path, body, headers=same).json())

    @pytest.mark.parametrize("path", [each.path for each in ROUTES if each.path != "/"])
    def test_no_route_redirects_or_is_missing(self, reranker: AppClient, path: str) -> None:
        plain, slashed = (reranker.request("GET", path.replace("{", "").replace("}", "") + end) for end in ("", "/"))
        assert (slashed.status_code, slashed.headers.get("allow")) == (plain.status_code, plain.headers.get("allow"))
        assert slashed.status_code == 405 or not slashed.is_redirect

    def test_one_slash_and_not_two(self, reranker: AppClient) -> None:
        assert reranker.get("/health/").status_code == 200
        assert reranker.get("/health//").status_code == 404

    def test_health_needs_no_key_with_a_slash_either(self) -> None:
        with app_client(ServerOptions(api_key="secret")) as client:
            assert client.get("/health/").status_code == 200
            assert client.get("/v1/models/").status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {**REQUEST, "raw_scores": False}),
        ("/v1/rerank", {**REQUEST, "top_k": 1}),
        ("/v1/reranking", INPUT),
        ("/v1/ranking", {**PASSAGES, "truncate": "END"}),
    ],
)
def test_warnings_are_in_the_body_and_in_headers(reranker: AppClient, path: str, body: dict[str, Any]) -> None:
    response = reranker.post(path, {**body, "max_tokens_per_doc": 1, "unheard_of": 1})
    warnings = response.json()["warnings"]
    assert warnings == response.headers.get_list("x-prefixwise-warning")
    assert "unheard_of" in warnings[0]
    cut = reranker.post(path, {**body, "max_tokens_per_doc": 2, **_with_long_document(body)})
    assert "1 document(s)" in cut.json()["warnings"][0]
    assert "warnings" not in reranker.post(path, body).json()


def _with_long_document(body: dict[str, Any]) -> dict[str, Any]:
    name = next(name for name in ("documents", "input", "passages") if name in body)
    return {name: ["xyxy"]}


def test_the_cohere_dialect_answers_all_other_bodies(reranker: AppClient) -> None:
    """Fields of the other dialects that are null are absent, and leave the dialect as it is."""
    nothing = dict.fromkeys(("instruct", "raw_scores", "top_k", "truncation", "input"))
    found = reranker.post("/v1/rerank", {**REQUEST, **nothing})
    assert ranking(found) == ranking(reranker.post("/v1/rerank", REQUEST))
