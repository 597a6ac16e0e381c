"""`/classify`, and `/v1/score` without labels, on the fake model's formula as a classifier's head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.prompts.profile import many_classes
from prefixwise.prompts.profile_choice import ProfileChoice, builtin_profiles
from tests.prompts.merging_tokenizer import merging_tokenizer
from tests.server.app_client import MODEL, AppClient, app_client, expected_logits

NAMES = ("good", "bad", "ugly")


@pytest.fixture(scope="module")
def classifier() -> Iterator[AppClient]:
    backend = FakeBackend()
    backend.config = replace(backend.config, num_classes=3, id2label=NAMES)
    choice = ProfileChoice(None, many_classes(3), builtin_profiles(), can_rerank=False)
    with app_client(backend=backend, tokenizer=merging_tokenizer(), profiles=choice) as made:
        yield made


def logits(*inputs: list[int]) -> list[list[float]]:
    return expected_logits([], list(inputs), [0, 1, 2])


def test_the_response_is_vllms(classifier: AppClient) -> None:
    body = {"input": [[1, 2, 3], [4, 5]], "use_activation": False, "request_id": "mine", "user": "me"}
    answer = classifier.post("/classify", body)
    assert answer.status_code == 200
    found = answer.json()
    wanted = logits([1, 2, 3], [4, 5])
    assert found["data"] == [
        {"index": index, "label": NAMES[int(np.argmax(row))], "probs": row, "num_classes": 3}
        for index, row in enumerate(wanted)
    ]
    assert (found["id"], found["object"], found["model"]) == ("classify-mine", "list", MODEL)
    assert found["labels"] == list(NAMES)
    assert set(found) == {"id", "object", "created", "model", "data", "labels", "usage"}
    assert (found["usage"]["prompt_tokens"], found["usage"]["total_tokens"]) == (5, 5)


@pytest.mark.parametrize(
    "value", ["abc", ["abc", "x"], [7], [[7], [4]]], ids=["text", "texts", "token ids", "lists of token ids"]
)
def test_probabilities_are_the_default(classifier: AppClient, value: Any) -> None:
    found = classifier.post("/classify", {"input": value, "model": "default"}).json()
    many = isinstance(value[0], list) or (isinstance(value, list) and isinstance(value[0], str))
    wanted = np.array(logits([7], [4]) if many else logits([7]))
    powers = np.exp(wanted)
    np.testing.assert_allclose([each["probs"] for each in found["data"]], powers / powers.sum(1, keepdims=True))


def test_long_inputs_are_cut_where_asked_and_reported(classifier: AppClient) -> None:
    body = {"input": [[1, 2, 3, 4]], "truncate_prompt_tokens": 2, "truncation_side": "left", "use_activation": False}
    found = classifier.post("/classify", body).json()
    assert found["data"][0]["probs"] == logits([3, 4])[0]
    assert found["truncated"] == [{"index": 0, "original_tokens": 4, "kept_tokens": 2}]


def test_unknown_fields_are_named(classifier: AppClient) -> None:
    answer = classifier.post("/classify", {"input": [1], "use_activaton": False})
    (warning,) = answer.json()["warnings"]
    assert "did you mean use_activation?" in warning
    assert "use_activaton" in answer.headers["x-prefixwise-warning"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "missing_input"),
        ({"input": ""}, 400, "empty_input"),
        ({"input": []}, 400, "empty_input"),
        ({"input": [[513]]}, 422, "token_id_exceeds_vocab"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "unsupported_parameter"),
        ({"input": "a", "model": "other"}, 404, "model_not_found"),
        ({"input": "a", "truncate_prompt_tokens": 5000}, 400, "invalid_truncate_prompt_tokens"),
    ],
)
def test_wrong_requests(classifier: AppClient, body: dict[str, Any], status: int, code: str) -> None:
    answer = classifier.post("/classify", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_model_that_is_no_classifier(client: AppClient) -> None:
    answer = client.post("/classify", {"input": [1, 2]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_a_classifier")


class TestScore:
    BODY: dict[str, Any] = {"query": [1, 2], "items": [[3], [4, 5]]}  # noqa: RUF012  # read only

    def test_logits_by_default_and_their_softmax(self, classifier: AppClient) -> None:
        """As SGLang answers for a sequence classifier, and with the names of the classes."""
        wanted = expected_logits([1, 2], [[3], [4, 5]], [0, 1, 2])
        found = classifier.post("/v1/score", self.BODY).json()
        assert (found["scores"], found["labels"]) == (wanted, list(NAMES))
        assert "pooled_hidden_states" not in found
        shares = classifier.post("/v1/score", {**self.BODY, "apply_softmax": True}).json()["scores"]
        powers = np.exp(np.array(wanted))
        np.testing.assert_allclose(shares, powers / powers.sum(1, keepdims=True))

    @pytest.mark.parametrize("kind", ["classifier", "client"])
    def test_pooled_hidden_states(self, kind: str, request: pytest.FixtureRequest) -> None:
        """One list per item; the scores do not change. SGLang has them for classifiers only."""
        server: AppClient = request.getfixturevalue(kind)
        body = self.BODY if kind == "classifier" else {**self.BODY, "label_token_ids": [7]}
        found = server.post("/v1/score", {**body, "return_pooled_hidden_states": True}).json()
        assert found["pooled_hidden_states"] == expected_logits([1, 2], [[3], [4, 5]], list(range(1, 9)))
        assert found["scores"] == server.post("/v1/score", body).json()["scores"]

    def test_labels_are_refused_with_a_classifier_and_needed_without(
        self, classifier: AppClient, client: AppClient
    ) -> None:
        refused = classifier.post("/v1/score", {**self.BODY, "label_token_ids": [7]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_label_logits")
        missing = client.post("/v1/score", self.BODY)
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, "missing_label_token_ids")


def test_a_classifier_of_many_classes_does_not_rerank(classifier: AppClient) -> None:
    for profile in (None, "question-yes-no"):
        answer = classifier.post("/v1/rerank", {"query": "a", "documents": ["b"], "profile": profile})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_profile")
        assert "this model is a classifier of 3 classes" in answer.json()["message"]


def test_tei_and_server_info_name_the_classes(classifier: AppClient) -> None:
    assert classifier.get("/health_generate").status_code == 200
    info = classifier.get("/info").json()["model_type"]
    assert info == {
        "classifier": {
            "id2label": {"0": "good", "1": "bad", "2": "ugly"},
            "label2id": {"good": 0, "bad": 1, "ugly": 2},
        }
    }
    assert classifier.get("/server_info").json()["model"]["id2label"] == list(NAMES)
