"""`/v1/completions` and `/v1/chat/completions` for scoring; `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, fake_logits
from tests.prompts.merging_tokenizer import CHAT_TEMPLATE, VOCABULARY, merging_tokenizer
from tests.server.app_client import AppClient, app_client
from tests.server.server_process import ServerProcess

SIZE = len(VOCABULARY)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def letters() -> Iterator[AppClient]:
    """Its tokens are a few letters, and its logits are arithmetic."""
    tokenizer = merging_tokenizer(bos=True, chat_template=CHAT_TEMPLATE)
    with app_client(backend=FakeBackend(SIZE, max_context_len=600), tokenizer=tokenizer) as made:
        yield made


def logprobs_after(context: list[int]) -> Any:
    logits = fake_logits(np.array(context, np.int32), np.arange(SIZE, dtype=np.int32)).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def complete(client: AppClient, prompt: object, **body: object) -> Any:
    response = client.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()


class TestLogprobs:
    def test_an_echo_has_those_of_every_token(self, letters: AppClient) -> None:
        prompts = [[1, 2, 3, 8], [1, 2, 9], [4]]
        answer = complete(letters, prompts, echo=True, logprobs=2)
        assert [each["index"] for each in answer["choices"]] == [0, 1, 2]
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            found = choice["logprobs"]
            after = logprobs_after(prompt)
            tokens = [*prompt, int(after.argmax())]
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == len(tokens)
            for place in range(1, len(tokens)):
                expected = logprobs_after(tokens[:place])
                assert found["token_logprobs"][place] == pytest.approx(expected[tokens[place]], abs=1e-5)
                top = found["top_logprobs"][place]
                assert max(top.values()) == pytest.approx(expected.max(), abs=1e-5)
                assert found["token_logprobs"][place] in top.values(), "the token itself, to the bit"
                assert 2 <= len(top) <= 3

    def test_without_an_echo_those_of_the_next_token(self, letters: AppClient) -> None:
        (choice,) = complete(letters, [1, 2, 3], logprobs=1)["choices"]
        expected = logprobs_after([1, 2, 3])
        assert choice["logprobs"]["token_logprobs"] == [pytest.approx(expected.max(), abs=1e-5)]
        assert list(choice["logprobs"]["top_logprobs"][0].values()) == choice["logprobs"]["token_logprobs"]
        assert choice["finish_reason"] == "length"

    def test_without_logprobs_there_is_the_text_alone(self, letters: AppClient) -> None:
        (choice,) = complete(letters, "ab", echo=True)["choices"]
        assert choice["logprobs"] is None
        assert choice["text"].startswith(letters.engine.tokenizer.decode(np.array([0, 5], np.int32)))  # type: ignore[union-attr]

    def test_no_token_is_generated_where_none_is_asked_for(self, letters: AppClient) -> None:
        answer = complete(letters, [[1, 2], [3]], max_tokens=0, echo=True, logprobs=0)
        assert [len(each["logprobs"]["tokens"]) for each in answer["choices"]] == [2, 1]
        assert answer["choices"][1]["logprobs"]["token_logprobs"] == [None]
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == 3

    def test_text_begins_with_bos_unless_it_must_not(self, letters: AppClient) -> None:
        with_bos = complete(letters, "ab", echo=True, logprobs=0)["choices"][0]["logprobs"]["tokens"]
        without = complete(letters, "ab", echo=True, logprobs=0, add_special_tokens=False)
        assert len(with_bos) == 3
        assert len(without["choices"][0]["logprobs"]["tokens"]) == 2

    def test_tokens_as_ids(self, letters: AppClient) -> None:
        answer = complete(letters, [1, 2], echo=True, logprobs=1, return_tokens_as_token_ids=True)
        assert answer["choices"][0]["logprobs"]["tokens"][:2] == ["token_id:1", "token_id:2"]

    def test_ids_need_no_tokenizer(self, client: AppClient) -> None:
        answer = complete(client, [[5, 6, 7]], echo=True, logprobs=1)
        assert answer["choices"][0]["logprobs"]["tokens"][:3] == ["token_id:5", "token_id:6", "token_id:7"]
        assert (
            client.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).json()["error"]["code"] == "no_tokenizer"
        )

    def test_offsets_point_into_the_text(self, letters: AppClient) -> None:
        (choice,) = complete(letters, "abxc", echo=True, logprobs=0)["choices"]
        found, text = choice["logprobs"], choice["text"]
        for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[1:-1]:
            assert text[offset:].strip().startswith(token.strip())


class TestRefused:
    @pytest.mark.parametrize(
        ("body", "code"),
        [
            ({"max_tokens": 1}, "missing_prompt"),
            ({"prompt": "a"}, "missing_max_tokens"),
            ({"prompt": "a", "max_tokens": 16}, "invalid_max_tokens"),
            ({"prompt": "a", "max_tokens": 0}, "conflicting_parameters"),
            ({"prompt": "", "max_tokens": 1}, "empty_prompt"),
            ({"prompt": [], "max_tokens": 1}, "empty_prompt"),
            ({"prompt": ["a", [1]], "max_tokens": 1}, "mixed_input_types"),
            ({"prompt": [[SIZE]], "max_tokens": 1}, "token_id_exceeds_vocab"),
            ({"prompt": [1] * 601, "max_tokens": 1}, "context_too_long"),
            ({"prompt": "a", "max_tokens": 1, "logprobs": 21}, "invalid_logprobs"),
            ({"prompt": "a", "max_tokens": 1, "stream": True}, "unsupported_parameter"),
            ({"prompt": "a", "max_tokens": 1, "n": 2}, "invalid_n"),
            ({"prompt": "a", "max_tokens": 1, "temperature": "hot"}, "invalid_temperature_type"),
        ],
    )
    def test_a_completion(self, letters: AppClient, body: dict[str, object], code: str) -> None:
        response = letters.post("/v1/completions", body)
        assert response.status_code in (400, 422)
        assert response.json()["error"]["code"] == code

    @pytest.mark.parametrize(
        ("more", "code"),
        [
            ({}, "invalid_max_tokens"),
            ({"max_tokens": 2}, "invalid_max_tokens"),
            ({"max_completion_tokens": 100}, "invalid_max_completion_tokens"),
            ({"max_tokens": 1, "top_logprobs": 2}, "conflicting_parameters"),
            ({"max_tokens": 1, "tools": [{}]}, "unsupported_parameter"),
            ({"max_tokens": 1, "messages": []}, "empty_messages"),
        ],
    )
    def test_a_chat(self, letters: AppClient, more: dict[str, object], code: str) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], **more}
        assert letters.post("/v1/chat/completions", body).json()["error"]["code"] == code

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/judge"])
    @pytest.mark.parametrize(
        ("name", "refused", "harmless"),
        [
            ("guided_choice", ["a"], None),
            ("guided_regex", "a", None),
            ("guided_json", {"type": "object"}, None),
            ("guided_grammar", "a", None),
            ("structured_outputs", {"choice": ["a"]}, {}),
            ("regex", "a", None),
            ("ebnf", "a", None),
            ("json_schema", "{}", None),
            ("structural_tag", "a", None),
            ("allowed_token_ids", [1], []),
            ("bad_words", ["a"], []),
            ("min_tokens", 1, 0),
            ("repetition_penalty", 1.1, 1.0),
            ("logits_processors", ["a"], []),
            ("custom_logit_processor", "a", None),
            ("lora_path", "a", None),
            ("cache_salt", "a", None),
        ],
    )
    def test_what_would_change_the_logits(
        self, letters: AppClient, path: str, name: str, refused: object, harmless: object
    ) -> None:
        bodies = {"/v1/completions": {"prompt": "a", "max_tokens": 1}, "/v1/judge": {**CHAT, "answers": "a/b"}}
        body = bodies.get(path, {**CHAT, "max_tokens": 1})
        error = letters.post(path, {**body, name: refused}).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)
        served = letters.post(path, {**body, name: harmless})
        assert (served.status_code, served.headers.get("x-prefixwise-warning")) == (200, None)

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/judge"])
    @pytest.mark.parametrize(
        ("name", "refused", "harmless"),
        [
            ("add_generation_prompt", False, True),
            ("continue_final_message", True, False),
            ("documents", [{"text": "a"}], []),
            ("echo", True, False),
            ("reasoning_effort", "low", "none"),
            ("prompt_embeds", "a", None),
            ("chat_template", "a", None),
            ("chat_template_kwargs", {"enable_thinking": True}, {"enable_thinking": False}),
            ("chat_template_kwargs", {"custom": 1}, {}),
            ("add_special_tokens", True, False),
        ],
    )
    def test_what_would_change_the_chat(
        self, letters: AppClient, path: str, name: str, refused: object, harmless: object
    ) -> None:
        body = {**CHAT, **({"answers": "a/b"} if path == "/v1/judge" else {"max_tokens": 1})}
        error = letters.post(path, {**body, name: refused}).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)
        plain, served = letters.post(path, body), letters.post(path, {**body, name: harmless})
        assert (served.status_code, served.headers.get("x-prefixwise-warning")) == (200, None)
        assert served.json().get("results") == plain.json().get("results")

    def test_an_assistants_message_at_the_end_is_continued_anyway(self, letters: AppClient) -> None:
        messages = [*CHAT["messages"], {"role": "assistant", "content": "b"}]
        body = {"messages": messages, "max_tokens": 1, "logprobs": True}
        asked = {**body, "continue_final_message": True, "add_generation_prompt": False}
        found = [letters.post("/v1/chat/completions", each).json()["choices"] for each in (body, asked)]
        assert found[0] == found[1]
        alone = letters.post("/v1/chat/completions", {**body, "add_generation_prompt": False})
        assert alone.json()["error"]["code"] == "unsupported_parameter"

    def test_a_temperature_is_named_in_a_warning(self, letters: AppClient) -> None:
        assert "warnings" not in complete(letters, "a", temperature=0, seed=3)
        assert "temperature has no effect" in complete(letters, "a", temperature=0.7)["warnings"][0]

    def test_a_classifier_has_no_vocabulary(self) -> None:
        from dataclasses import replace

        backend = FakeBackend()
        backend.config = replace(backend.config, num_classes=3)
        with app_client(backend=backend) as client:
            answer = client.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
        assert answer.json()["error"]["code"] == "no_vocabulary"


class TestChat:
    def test_the_token_that_follows_the_template(self, letters: AppClient) -> None:
        tokenizer = letters.engine.tokenizer
        assert tokenizer is not None
        body = {
            "messages": [{"role": "user", "content": "ab{item}"}],  # which means nothing here
            "max_completion_tokens": 1,
            "logprobs": True,
            "top_logprobs": 3,
        }
        answer = letters.post("/v1/chat/completions", body).json()
        expected = logprobs_after(tokenizer.encode("xab{item}zy").tolist())
        (choice,) = answer["choices"]
        (token,) = choice["logprobs"]["content"]
        assert token["logprob"] == pytest.approx(expected.max(), abs=1e-5)
        assert [each["logprob"] for each in token["top_logprobs"]] == pytest.approx(
            np.sort(expected)[::-1][:3].tolist(), abs=1e-5
        )
        assert bytes(token["bytes"]).decode() == token["token"]
        assert choice["message"]["role"] == "assistant"
        assert answer["object"] == "chat.completion"
        assert answer["usage"]["completion_tokens"] == 1

    def test_a_model_without_a_template(self) -> None:
        with app_client(tokenizer=merging_tokenizer()) as client:
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            assert client.post("/v1/chat/completions", body).json()["error"]["code"] == "no_chat_template"


class TestTokens:
    def test_there_and_back(self, letters: AppClient) -> None:
        ids = letters.post("/tokenize", {"prompt": "abx", "add_special_tokens": False}).json()["tokens"]
        assert ids == [5, 4]
        tokenizer = letters.engine.tokenizer
        assert tokenizer is not None
        found = letters.post("/detokenize", {"tokens": ids}).json()
        assert found == {"prompt": tokenizer.decode(np.array(ids, np.int32))}
        assert letters.post("/detokenize", {"tokens": [SIZE]}).json()["error"]["code"] == "token_id_exceeds_vocab"
        assert letters.post("/detokenize", {"tokens": "a"}).json()["error"]["code"] == "invalid_tokens_type"
        assert letters.post("/detokenize", {}).json()["error"]["code"] == "missing_tokens"

    def test_what_clients_must_know(self, letters: AppClient, client: AppClient) -> None:
        info = letters.get("/tokenizer_info").json()
        assert (info["chat_template"], info["add_bos_token"], info["vocab_size"]) == (CHAT_TEMPLATE, True, SIZE)
        assert {"bos_token", "eos_token", "pad_token"} <= info.keys()
        assert client.get("/tokenizer_info").json()["error"]["code"] == "no_tokenizer"


def test_workers_answer_as_one_process_does(small_server: ServerProcess, worker_server: ServerProcess) -> None:
    shared = list(range(1, 200))
    body = {"prompt": [[*shared, 7, 8], [*shared, 9], [3, 4]], "max_tokens": 1, "echo": True, "logprobs": 3}

    def choices(server: ServerProcess) -> Any:
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    found = choices(small_server)
    assert found == choices(worker_server)
    assert found[0]["logprobs"]["token_logprobs"][:199] == found[1]["logprobs"]["token_logprobs"][:199]
