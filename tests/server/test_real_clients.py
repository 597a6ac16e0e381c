"""The clients that people already have, against a server on a real port: their own objects, their own errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.real_requests import fetch, wait_for_requests
from tests.server.server_process import ServerProcess, server_process

KEY = "a key of mine"
QUERY = "What is the capital of France?"
DOCUMENTS = ["Berlin is in Germany.", "Paris is the capital of France.", "", "Berlin is in Germany."]

# What their packages warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Its scores are arithmetic; texts become tokens as the embedded model has them."""
    with server_process("--backend=fake", f"--api-key={KEY}", program=("prefixwise", "serve")) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[tuple[int, float]]:
    """What the server says to no client in particular."""
    answer = fetch(
        "POST",
        f"{server.url}/v1/rerank",
        json={"query": QUERY, "documents": DOCUMENTS},
        headers={"Authorization": f"Bearer {KEY}"},
    ).json()
    ranked = [(each["index"], each["relevance_score"]) for each in answer["results"]]
    scores = dict(ranked)
    assert sorted(scores) == [0, 1, 2, 3]
    assert scores[0] == scores[3]
    assert all(0 < score < 1 for score in scores.values())
    return ranked


@pytest.fixture(scope="module")
def full_queue() -> Iterator[ServerProcess]:
    """A server that is busy with one request until it is killed, and has no room for another."""
    with server_process("--tokenizer", "--delay=3600", "--max-queued-tokens=10") as server:
        busy = threading.Thread(target=_send_and_forget, args=(server,))
        busy.start()
        wait_for_requests(server, 1)
        yield server
    busy.join()


def _send_and_forget(server: ServerProcess) -> None:
    try:
        httpx.post(f"{server.url}/v1/rerank", json={"query": "a", "documents": ["b"] * 4}, timeout=None)
    except httpx.HTTPError:  # the server ends before it has answered
        return


class TestCohere:
    def test_client(self, server: ServerProcess, expected: list[tuple[int, float]]) -> None:
        import cohere

        client = cohere.Client(KEY, base_url=server.url)
        answer = client.rerank(
            model="rerank-english-v3.0", query=QUERY, documents=DOCUMENTS, top_n=3, return_documents=True
        )
        assert isinstance(answer, cohere.RerankResponse)
        assert [(each.index, each.relevance_score) for each in answer.results] == expected[:3]
        texts = [each.document.text for each in answer.results if each.document is not None]
        assert texts == [DOCUMENTS[index] for index, _ in expected[:3]]
        assert answer.id
        assert answer.meta is not None
        assert answer.meta.api_version is not None
        assert answer.meta.api_version.version == "1"
        assert answer.meta.billed_units is not None
        assert answer.meta.billed_units.search_units == 1
        assert answer.meta.warnings is not None
        assert "chat-yes-no was used" in answer.meta.warnings[0]

    def test_objects_as_documents(self, server: ServerProcess, expected: list[tuple[int, float]]) -> None:
        import cohere

        client = cohere.Client(KEY, base_url=server.url)
        answer = client.rerank(query=QUERY, documents=[{"text": text} for text in DOCUMENTS])
        assert [(each.index, each.relevance_score) for each in answer.results] == expected
        assert all(each.document is None for each in answer.results)

    def test_client_v2(self, server: ServerProcess, expected: list[tuple[int, float]]) -> None:
        import cohere

        client = cohere.ClientV2(KEY, base_url=server.url)
        answer = client.rerank(
            model="rerank-v3.5", query=QUERY, documents=DOCUMENTS, top_n=100, max_tokens_per_doc=1000
        )
        assert isinstance(answer, cohere.V2RerankResponse)
        assert [(each.index, each.relevance_score) for each in answer.results] == expected
        assert answer.meta is not None
        assert answer.meta.api_version is not None
        assert answer.meta.api_version.version == "2"
        assert answer.meta.tokens is not None
        assert answer.meta.tokens.input_tokens

    @pytest.mark.parametrize("version", ["Client", "ClientV2"])
    def test_a_bad_request_is_its_own_exception(self, server: ServerProcess, version: str) -> None:
        import cohere

        client = getattr(cohere, version)(KEY, base_url=server.url)
        with pytest.raises(cohere.BadRequestError) as caught:
            client.rerank(model="any", query="", documents=DOCUMENTS)
        assert caught.value.status_code == 400
        assert caught.value.body["message"].startswith("query must hold at least one character")

    def test_a_wrong_key_is_its_own_exception(self, server: ServerProcess) -> None:
        import cohere

        with pytest.raises(cohere.UnauthorizedError, match="invalid_api_key"):
            cohere.ClientV2("another", base_url=server.url).rerank(model="any", query=QUERY, documents=DOCUMENTS)

    @pytest.mark.parametrize("version", ["Client", "ClientV2"])
    def test_a_full_queue_is_its_own_exception(self, full_queue: ServerProcess, version: str) -> None:
        import cohere

        client = getattr(cohere, version)("any", base_url=full_queue.url)
        with pytest.raises(cohere.TooManyRequestsError) as caught:
            client.rerank(model="any", query="a", documents=["b"], request_options={"max_retries": 0})
        assert caught.value.body["error"]["code"] == "queue_full"
        assert int((caught.value.headers or {})["retry-after"]) >= 1


class TestLitellm:
    @pytest.fixture(autouse=True)
    def without_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would look for prices on import."""
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")

    # The last three are other dialects of its own: Cohere's, Jina's, and Text Embeddings Inference's.
    @pytest.mark.parametrize(
        ("model", "path"),
        [
            ("hosted_vllm/any", ""),
            ("hosted_vllm/any", "/v1"),
            ("cohere/rerank-v3.5", ""),
            ("jina_ai/jina-reranker-v2", ""),
            ("huggingface/any", ""),
        ],
    )
    def test_rerank(self, server: ServerProcess, expected: list[tuple[int, float]], model: str, path: str) -> None:
        import litellm

        answer = litellm.rerank(
            model=model, query=QUERY, documents=DOCUMENTS, top_n=2, api_base=server.url + path, api_key=KEY
        )
        assert isinstance(answer, litellm.RerankResponse)
        assert answer.results is not None
        assert [(each["index"], each["relevance_score"]) for each in answer.results] == expected[:2]
        if not model.startswith("cohere"):  # which does not ask for them
            texts = [each["document"]["text"] for each in answer.results]
            assert texts == [DOCUMENTS[index] for index, _ in expected[:2]]

    def test_an_instruction_arrives(self, server: ServerProcess, expected: list[tuple[int, float]]) -> None:
        import litellm

        asked: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS, "api_base": server.url, "api_key": KEY}
        answer = litellm.rerank(model="hosted_vllm/any", instruction="Is the document about Germany?", **asked)
        assert answer.results is not None
        assert [each["relevance_score"] for each in answer.results] != [score for _, score in expected]

    def test_a_bad_request_is_its_own_exception(self, server: ServerProcess) -> None:
        import litellm

        asked: dict[str, Any] = {"query": "", "documents": DOCUMENTS, "api_base": server.url, "api_key": KEY}
        with pytest.raises(litellm.exceptions.BadRequestError, match="query must hold at least one character"):
            litellm.rerank(model="hosted_vllm/any", **asked)

    def test_a_full_queue_is_its_own_exception(self, full_queue: ServerProcess) -> None:
        import litellm

        asked: dict[str, Any] = {"query": "a", "documents": ["b"], "api_base": full_queue.url, "api_key": "any"}
        with pytest.raises(litellm.exceptions.RateLimitError, match="queue_full"):
            litellm.rerank(model="hosted_vllm/any", max_retries=0, **asked)


class TestOpenai:
    SCORE: dict[str, Any] = {  # noqa: RUF012  # read only
        "query": "Is this about food? ",
        "items": ["pizza", "tax law"],
        "labels": ["yes", "no"],
        "apply_softmax": True,
    }

    def test_a_generic_post_to_score(self, server: ServerProcess) -> None:
        import openai

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
        answer = client.post("/score", cast_to=dict[str, Any], body=self.SCORE)
        assert (answer["object"], len(answer["scores"])) == ("scoring", 2)
        assert [sum(row) for row in answer["scores"]] == pytest.approx([1, 1])
        assert [each.id for each in client.models.list()] == [answer["model"]]

    def test_completions_and_chats(self, server: ServerProcess) -> None:
        import openai

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
        model, texts = next(iter(client.models.list())).id, ["Is this", "food"]
        done = client.completions.create(model=model, prompt=texts, max_tokens=1, echo=True, logprobs=2, temperature=0)
        assert all(choice.text.startswith(text) for choice, text in zip(done.choices, texts, strict=True))
        logprobs = done.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
        assert logprobs.tokens[:2] == ["Is", " this"]
        assert all(each < 0 for each in logprobs.token_logprobs[1:])
        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Yes or no?"}],
            max_tokens=1,
            logprobs=True,
            top_logprobs=5,
        )
        assert chat.choices[0].message.role == "assistant"
        assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 5
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=model, prompt="Is this", max_tokens=5)
        assert caught.value.code == "invalid_max_tokens"

    def test_a_bad_request_is_its_own_exception(self, server: ServerProcess) -> None:
        import openai

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/score", cast_to=dict[str, Any], body={**self.SCORE, "items": []})
        assert (caught.value.code, caught.value.param, caught.value.type) == (
            "empty_items", "items", "invalid_value_error"
        )  # fmt: skip

    def test_a_full_queue_is_its_own_exception(self, full_queue: ServerProcess) -> None:
        import openai

        client = openai.OpenAI(base_url=f"{full_queue.url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            client.post("/score", cast_to=dict[str, Any], body={"query": "a", "items": ["b"], "labels": ["y"]})
        assert caught.value.code == "queue_full"


def test_a_client_of_text_embeddings_inference(server: ServerProcess, expected: list[tuple[int, float]]) -> None:
    """As its clients do: /info, then /rerank; no package of theirs is so small that one would install it for this."""
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        assert client.get("/info").json()["max_input_length"] == 8192
        body: dict[str, Any] = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": False, "return_text": True}
        answer = client.post("/rerank", json=body).json()
        assert [(each["index"], each["score"]) for each in answer] == expected
        refused = client.post("/rerank", json={**body, "texts": ["word " * 9000], "truncate": False})
        assert (refused.status_code, refused.json()["error_type"]) == (400, "Validation")
