"""What `prefixwise serve` answers with a real model: held against transformers, and against the library bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from prefixwise import Scorer
from tests.reference import LOGIT_BOUND, Reference, bound_of, expected_scores
from tests.server.app_client import error_of
from tests.server.real_requests import (
    BLOCK,
    Body,
    ask,
    ask_at_once,
    ask_one_by_one,
    cached_tokens,
    fetch,
    leftovers,
    mixed_requests,
    plain_request,
    scores_of,
    server_stats,
    tokens,
)
from tests.server.server_process import ServerProcess

MODEL = "qwen3"
QUERY = tokens(random.Random(1), 150)
ITEMS = [tokens(random.Random(length), length) for length in (4, 1, 40, 0, 17)]
LABELS = [3, 300]
IDS: Body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS}

TEXT_QUERY = "Is this document relevant? naïve café — да/нет: "
TEXTS = [
    "a plain one",
    "",
    " leading and trailing \t\n",
    "emoji 🙂 👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽",
    "你好世界。今天天气不错。日本語のテキスト、한국어",
    "combining: e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343\u036a",
    "שלום עולם — العربية من اليمين",
    "zero\u200bwidth\ufeff and \u202eoverride",
    "astral \U0001d518\U0001d52b 𒀀𒁀 \U0010ffff",
    "NUL \x00 and <|im_start|>",
]


@pytest.fixture(scope="module", params=["small_server", "worker_server"], ids=["one process", "workers"])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    """A server in each of its two forms."""
    running: ServerProcess = request.getfixturevalue(request.param)
    return running


@pytest.fixture(scope="module")
def reference(reference_of: Callable[[str], Reference]) -> Reference:
    return reference_of(MODEL)


@pytest.fixture(scope="module")
def tokenizer(checkpoint_of: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_of(MODEL) / "tokenizer.json"))


@pytest.fixture(scope="module")
def library_scores(scorer_of: Callable[..., Scorer]) -> Callable[[Body], Any]:
    """What a request gets without a server, and with no prefix kept."""
    scorer = scorer_of(MODEL, backend="torch", device="cpu", prefix_cache=False)
    return lambda body: scorer.score(**body).scores


class TestIds:
    @pytest.mark.parametrize("mode", ["softmax", "prob", "logprob", "logit", "logit_diff", "sigmoid"])
    def test_every_score_mode_is_right(
        self, server: ServerProcess, reference: Reference, library_scores: Callable[[Body], Any], mode: str
    ) -> None:
        body = {**IDS, "score_mode": mode}
        answer = ask(server, body)
        expected = expected_scores(mode, reference.label_logits([QUERY + item for item in ITEMS]), LABELS)
        assert np.abs(np.array(answer["scores"]) - expected).max() <= bound_of(mode)
        assert answer["scores"] == library_scores(body)
        assert set(answer) == {"object", "model", "scores", "usage"}

    @pytest.mark.parametrize(("apply_softmax", "mode"), [(True, "softmax"), (False, "prob"), (None, "prob")])
    def test_apply_softmax_is_a_mode(self, server: ServerProcess, apply_softmax: bool | None, mode: str) -> None:
        scores = ask(server, {**IDS, "apply_softmax": apply_softmax})["scores"]
        assert scores == ask(server, {**IDS, "score_mode": mode})["scores"]

    @pytest.mark.parametrize("algorithm", ["auto", "serial", "packed", "prefill_extend"])
    def test_items_alone_get_what_they_get_together(self, server: ServerProcess, algorithm: str) -> None:
        together = ask(server, {**IDS, "algorithm": algorithm})["scores"]
        for item, scores in zip(ITEMS, together, strict=True):
            assert ask(server, {**IDS, "items": [item], "algorithm": algorithm})["scores"] == [scores]

    def test_item_first(self, server: ServerProcess, reference: Reference) -> None:
        items = [item for item in ITEMS if item]
        body = {**IDS, "items": items, "item_first": True, "score_mode": "logit"}
        expected = reference.label_logits([item + QUERY for item in items])[:, LABELS]
        assert np.abs(np.array(ask(server, body)["scores"]) - expected).max() <= LOGIT_BOUND

    def test_label_sequences(self, server: ServerProcess, reference: Reference) -> None:
        labels = [[7], [7, 9, 11], [30, 31, 32, 33]]
        body = {**IDS, "label_token_ids": labels, "label_scoring": "sequence", "score_mode": "logprob"}
        expected = [[reference.sequence_logprob(QUERY + item, label) for label in labels] for item in ITEMS]
        assert np.abs(np.array(ask(server, body)["scores"]) - np.array(expected)).max() <= LOGIT_BOUND

    def test_10_000_items(self, server: ServerProcess) -> None:
        """Every one of them gets what it gets among a few."""
        few = {**IDS, "query": [5, 6, 7], "items": [tokens(random.Random(i), i % 7) for i in range(100)]}
        many = ask(server, {**few, "items": few["items"] * 100})
        assert many["scores"] == ask(server, few)["scores"] * 100
        assert many["usage"]["prompt_tokens"] == 3 + 100 * sum(map(len, few["items"]))

    def test_bad_items_are_reported_and_the_others_scored(self, server: ServerProcess) -> None:
        bad: dict[int, tuple[Any, str]] = {
            0: ([-1], "negative_token_id"),
            2: ([1, 512], "token_id_exceeds_vocab"),
            4: ([True], "invalid_token_id_type"),
            6: ([1] * 32_768, "context_too_long"),
        }
        good = iter(ITEMS)
        items = [bad[i][0] if i in bad else next(good) for i in range(9)]
        answer = ask(server, {**IDS, "items": items, "on_item_error": "report"})
        assert [(error["index"], error["code"]) for error in answer["item_errors"]] == [
            (index, code) for index, (_, code) in bad.items()
        ]
        assert [index for index, row in enumerate(answer["scores"]) if row is None] == list(bad)
        assert [row for row in answer["scores"] if row is not None] == ask(server, IDS)["scores"]

    def test_items_are_cut_only_when_asked_for(self, server: ServerProcess) -> None:
        answer = ask(server, {**IDS, "max_tokens_per_item": 4})
        assert answer["scores"] == ask(server, {**IDS, "items": [item[:4] for item in ITEMS]})["scores"]
        assert [(cut["index"], cut["original_tokens"], cut["kept_tokens"]) for cut in answer["truncated"]] == [
            (2, 40, 4),
            (4, 17, 4),
        ]


class TestText:
    LABELS = (" yes", " no")

    def encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def in_ids(self, tokenizer: Tokenizer, texts: list[str]) -> Body:
        return {
            "query": self.encode(tokenizer, TEXT_QUERY),
            "items": [self.encode(tokenizer, text) for text in texts],
            "label_token_ids": [self.encode(tokenizer, label)[0] for label in self.LABELS],
        }

    def test_any_text_gets_what_its_tokens_get(
        self, server: ServerProcess, tokenizer: Tokenizer, reference: Reference
    ) -> None:
        answer = ask(server, {"query": TEXT_QUERY, "items": TEXTS, "labels": self.LABELS, "score_mode": "logit"})
        body = {**self.in_ids(tokenizer, TEXTS), "score_mode": "logit"}
        in_ids = ask(server, body)
        assert answer["scores"] == in_ids["scores"]
        assert answer["usage"]["prompt_tokens"] == in_ids["usage"]["prompt_tokens"]
        logits = reference.label_logits([body["query"] + item for item in body["items"]])
        expected = logits[:, body["label_token_ids"]]
        assert np.abs(np.array(answer["scores"]) - expected).max() <= LOGIT_BOUND

    def test_tokenize_returns_these_tokens(self, server: ServerProcess, tokenizer: Tokenizer) -> None:
        answer = fetch("POST", f"{server.url}/tokenize", json={"text": TEXTS}).json()
        assert answer["tokens"] == self.in_ids(tokenizer, TEXTS)["items"]
        assert answer["count"] == [len(row) for row in answer["tokens"]]

    def test_one_text_is_one_item(self, server: ServerProcess) -> None:
        body = {"query": TEXT_QUERY, "labels": self.LABELS}
        together = ask(server, {**body, "items": TEXTS})["scores"]
        for text, scores in zip(TEXTS, together, strict=True):
            assert ask(server, {**body, "items": text})["scores"] == [scores]

    def test_10_000_texts(self, server: ServerProcess) -> None:
        texts = [f"{i} {TEXTS[i % len(TEXTS)][:2]}" for i in range(100)]
        body = {"query": TEXT_QUERY, "labels": self.LABELS, "algorithm": "prefill_extend"}
        expected = ask(server, {**body, "items": texts})["scores"] * 100
        assert ask(server, {**body, "items": texts * 100})["scores"] == expected

    def test_a_suffix_stands_behind_every_item(self, server: ServerProcess, tokenizer: Tokenizer) -> None:
        answer = ask(server, {"query": TEXT_QUERY, "items": TEXTS, "labels": self.LABELS, "suffix": " yes or no?"})
        body, suffix = self.in_ids(tokenizer, TEXTS), self.encode(tokenizer, " yes or no?")
        expected = ask(server, {**body, "items": [item + suffix for item in body["items"]]})
        assert answer["scores"] == expected["scores"]

    def test_labels_of_many_tokens(self, server: ServerProcess, tokenizer: Tokenizer) -> None:
        labels = [" yes", " relevant to the query", " no 你好"]
        answer = ask(server, {"query": TEXT_QUERY, "items": TEXTS, "labels": labels, "label_scoring": "sequence"})
        ids = [self.encode(tokenizer, label) for label in labels]
        body = {**self.in_ids(tokenizer, TEXTS), "label_token_ids": ids, "label_scoring": "sequence"}
        assert max(map(len, ids)) > 1
        assert answer["scores"] == ask(server, body)["scores"]


class TestUsageAndDebug:
    def test_a_prefix_is_computed_once(self, server: ServerProcess) -> None:
        body = plain_request(11, 5, prefix_len=300)
        first, second = ask(server, body), ask(server, body)
        assert first["usage"] == {
            "prompt_tokens": 350,
            "total_tokens": 350,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert cached_tokens(second) == 300
        assert second["scores"] == first["scores"]

    @pytest.mark.parametrize("algorithm", ["serial", "packed", "prefill_extend"])
    def test_debug_shows_the_algorithm(self, server: ServerProcess, algorithm: str) -> None:
        body = plain_request(12, 5, prefix_len=200)
        begin = monotonic()
        answer = ask(server, {**body, "algorithm": algorithm, "return_debug": True})
        milliseconds = 1000 * (monotonic() - begin)
        debug = answer["debug"]
        assert (debug["algorithm"], debug["reason"]) == (algorithm, "asked for by the request")
        assert debug["mask"] == ("segment" if algorithm == "packed" else None)
        assert sum(batch["segments"] for batch in debug["batches"]) == 5
        assert all(0 < batch["fill"] <= 1 for batch in debug["batches"])
        num_tokens = {"serial": 5 * 210, "packed": 250, "prefill_extend": 50}[algorithm]
        assert sum(batch["num_tokens"] for batch in debug["batches"]) == num_tokens
        assert set(debug["milliseconds"]) == {"tokenize", "queue", "prefill", "extend", "host"}
        assert 0 < sum(debug["milliseconds"].values()) < milliseconds
        assert answer["scores"] == ask(server, body)["scores"]

    def test_the_callers_request_id_comes_back(self, server: ServerProcess) -> None:
        for body, status in ((IDS, 200), ({}, 400)):
            url = f"{server.url}/v1/score"
            sent = fetch("POST", url, json=body, headers={"X-Request-Id": "order 66/a?"})
            assert (sent.status_code, sent.headers["x-request-id"]) == (status, "order 66/a?")
            made = {fetch("POST", url, json=body).headers["x-request-id"] for _ in range(3)}
            assert len(made) == 3


class TestPrefix:
    def pin(self, server: ServerProcess, body: Body) -> dict[str, Any]:
        response = fetch("POST", f"{server.url}/v1/prefix", json=body)
        assert response.status_code == 200, response.text
        pinned: dict[str, Any] = response.json()
        return pinned

    def listed(self, server: ServerProcess) -> list[str]:
        answer = fetch("GET", f"{server.url}/v1/prefix").json()
        return [prefix["id"] for prefix in answer["data"]]

    def test_a_warm_prefix_saves_its_tokens_and_changes_no_bit(
        self, server: ServerProcess, library_scores: Callable[[Body], Any]
    ) -> None:
        body = plain_request(21, 6, prefix_len=2 * BLOCK + 37)
        pinned = self.pin(server, {"query": body["query"], "ttl_seconds": 60})
        assert (pinned["tokens"], pinned["cached_tokens"]) == (2 * BLOCK + 37, 0)
        assert pinned["bytes"] == 3 * server_stats(server)["block_bytes"]
        answer = ask(server, body)
        assert cached_tokens(answer) == 2 * BLOCK + 37
        assert answer["scores"] == library_scores(body)

        assert self.listed(server) == [pinned["id"]]
        assert server_stats(server)["pinned_blocks"] == 3
        path = f"{server.url}/v1/prefix/{pinned['id']}"
        assert fetch("DELETE", path).json()["deleted"] is True
        assert self.listed(server) == []
        assert leftovers(server) == (0, 0, 0)
        assert error_of(fetch("DELETE", path)) == (404, "invalid_request_error", "not_found", "id")
        assert ask(server, body)["scores"] == answer["scores"]

    def test_a_text_may_be_pinned(self, server: ServerProcess) -> None:
        """It is shorter than a block, so only this algorithm looks for it."""
        pinned = self.pin(server, {"query": TEXT_QUERY, "ttl_seconds": 60})
        answer = ask(server, {"query": TEXT_QUERY, "items": TEXTS, "labels": [" yes"], "algorithm": "prefill_extend"})
        assert cached_tokens(answer) == pinned["tokens"]
        assert fetch("DELETE", f"{server.url}/v1/prefix/{pinned['id']}").status_code == 200

    def test_its_time_ends(self, server: ServerProcess) -> None:
        begin = monotonic()
        self.pin(server, {"query": plain_request(22, 1, prefix_len=200)["query"], "ttl_seconds": 1.5})
        assert server_stats(server)["pinned_blocks"] == 2
        assert len(self.listed(server)) == 1
        assert leftovers(server) == (0, 0, 0)
        assert monotonic() - begin >= 1.5
        assert self.listed(server) == []


def test_scores_of_a_real_model_are_those_of_one_process(
    small_server: ServerProcess, worker_server: ServerProcess
) -> None:
    """Isolation, bit for bit: one by one in one process, and all at once through two workers."""
    bodies = mixed_requests(3, 40)
    expected = scores_of(ask_one_by_one(small_server, bodies))
    assert scores_of(ask_at_once(worker_server, bodies)) == expected
    assert scores_of(ask_at_once(worker_server, bodies[::-1])) == expected[::-1]
