"""The requests whose scores are known: a pool of all kinds, and the reference, which scores each item alone.

A case knows where its items stand in the body and where their scores stand in the response. The reference sends one
request for each item to a server without faults or other traffic, so no batch, prefix cache or neighbour is part of it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.checkpoints import TRAINING_TEXT
from tests.server.real_requests import mixed_requests, plain_request, tokens

Body = dict[str, Any]
Ask = Callable[[str, Body], Awaitable[Any]]  # path, body -> the JSON of a response with status 200

WORDS = TRAINING_TEXT.split()
LABELS = ["a", "b"]  # single letters are tokens of any byte-level tokenizer
PLACEHOLDER_ID = 600  # outside of the vocabulary: an invalid item
_SCORE_NAMES = ("relevance_score", "score", "logit")
_RESULT_NAMES = ("results", "data", "rankings")


@dataclass(frozen=True)
class Case:
    """One request; `expected` has the reference's value for each item."""

    kind: str
    path: str
    body: Body
    items: str  # the field of the items
    is_ranked: bool = False  # best first
    expected: tuple[Any, ...] = ()

    def alone(self, index: int) -> Body:
        """The request of one of its items."""
        body = {name: value for name, value in self.body.items() if name not in ("top_n", "top_k")}
        return {**body, self.items: [self.body[self.items][index]]}

    def problem(self, answer: Any) -> str:
        """What is wrong with a response of status 200; empty where every bit is right."""
        found = values_of(answer)
        order = list(range(len(self.expected)))
        if self.is_ranked:
            order.sort(key=lambda index: (-self.expected[index], index))
            order = order[: self.body.get("top_n") or self.body.get("top_k")]
        if [index for index, _ in found] != order:
            return f"expected items {order[:8]}, got {[index for index, _ in found][:8]}"
        for index, value in found:
            if value != self.expected[index]:
                return f"item {index}: expected {brief(self.expected[index])}, got {brief(value)}"
        return ""


def values_of(answer: Any) -> list[tuple[int, Any]]:
    """Index and value of each item in a response of any dialect. Raises KeyError, TypeError where it has none."""
    if isinstance(answer, dict) and "scores" in answer:
        pooled = answer.get("pooled_hidden_states") or [None] * len(answer["scores"])
        return list(enumerate(zip(answer["scores"], pooled, strict=True)))
    if isinstance(answer, dict):
        answer = next(answer[name] for name in _RESULT_NAMES if name in answer)
    return [(each["index"], next(each[name] for name in _SCORE_NAMES if name in each)) for each in answer]


def brief(value: object) -> str:
    """The beginning of a value."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


async def with_reference(cases: Sequence[Case], ask: Ask) -> list[Case]:
    """The cases with the value of each of their items alone."""
    found = []
    for case in cases:
        values = [
            values_of(await ask(case.path, case.alone(index)))[0][1] for index in range(len(case.body[case.items]))
        ]
        found.append(replace(case, expected=tuple(values)))
    return found


def make_cases(seed: int, num_mixed: int = 60) -> list[Case]:
    """The pool: token ids of all shapes, texts, every dialect, long answers, many items."""
    rng = random.Random(seed)
    cases = [Case("score ids", "/v1/score", body, "items") for body in mixed_requests(seed, num_mixed)]
    for _ in range(max(1, num_mixed // 15)):
        cases += [_text_case(rng, options) for options in _TEXT_OPTIONS]
        cases += _dialect_cases(rng)
    cases += [Case("score hidden states", "/v1/score", _hidden_request(seed), "items")]
    cases += [Case("score many items", "/v1/score", plain_request(seed + 1, num_mixed * 2, prefix_len=140), "items")]
    return cases


_TEXT_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"labels": LABELS, "apply_softmax": True, "suffix": " Answer:"},
    {"labels": LABELS, "score_mode": "logprob", "tokenization": "joint"},
    {"labels": ["yes", "no way"], "label_scoring": "sequence", "score_mode": "logprob"},
    {"labels": LABELS, "score_mode": "logit", "max_tokens_per_item": 6, "return_debug": True, "priority": 5},
    {"labels": LABELS, "item_first": True, "algorithm": "packed"},
)


def _text_case(rng: random.Random, options: Mapping[str, Any]) -> Case:
    body = {"query": text(rng, 12, 60), "items": [text(rng, 1, 8) for _ in range(rng.randint(1, 6))], **options}
    return Case("score text", "/v1/score", body, "items")


def _hidden_request(seed: int) -> Body:
    """Its response has hundreds of kilobytes; one of its items is invalid."""
    body = plain_request(seed, 24, prefix_len=60)
    body["items"][7] = [PLACEHOLDER_ID]
    return {**body, "return_pooled_hidden_states": True, "on_item_error": "report"}


def _dialect_cases(rng: random.Random) -> list[Case]:
    """A request of each rerank dialect, and of vLLM's formats."""
    query, documents = text(rng, 3, 12), [text(rng, 2, 12) for _ in range(rng.randint(2, 6))]
    usual = {"query": query, "documents": documents}
    passages = {"query": {"text": query}, "passages": [{"text": each} for each in documents]}
    ids = {"query": tokens(rng, 150), "items": [tokens(rng, 7) for _ in documents], "label_token_ids": [3, 5]}
    return [
        Case("rerank cohere v1", "/v1/rerank", {**usual, "top_n": 2, "return_documents": True}, "documents", True),
        Case("rerank cohere v2", "/v2/rerank", {**usual, "max_tokens_per_doc": 8}, "documents", True),
        Case("rerank tei", "/rerank", {"query": query, "texts": documents, "raw_scores": True}, "texts", True),
        Case("rerank sglang", "/v1/rerank", {**usual, "instruct": "Is it so?"}, "documents", True),
        Case("rerank voyage", "/v1/rerank", {**usual, "top_k": 3}, "documents", True),
        Case("rerank infinity", "/rerank", {**usual, "raw_scores": False}, "documents", True),
        Case("rerank mixedbread", "/v1/reranking", {"query": query, "input": documents}, "input", True),
        Case("rerank nvidia", "/v1/ranking", passages, "passages", True),
        Case("pairs vllm", "/score", {"text_1": query, "text_2": documents}, "text_2"),
        Case("generative vllm", "/generative_scoring", ids, "items"),
    ]


def text(rng: random.Random, least: int, most: int) -> str:
    """So many words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


@dataclass(frozen=True)
class WrongRequest:
    """A request with one right response: its error."""

    path: str
    body: bytes
    status: int
    code: str
    method: str = "POST"


WRONG_REQUESTS = (
    WrongRequest("/v1/score", b"{", 400, "invalid_json"),
    WrongRequest("/v1/score", b"[1, 2]", 400, "invalid_json"),
    WrongRequest("/v1/score", b'{"items": ["a"], "labels": ["a"]}', 400, "missing_query"),
    WrongRequest("/v1/score", b'{"query": "", "items": ["a"], "labels": ["a"]}', 400, "empty_query"),
    WrongRequest("/v1/score", b'{"query": [1], "items": ["a"], "labels": ["a"]}', 400, "mixed_input_types"),
    WrongRequest("/v1/score", b'{"query": [1], "items": [[-1]], "label_token_ids": [1]}', 400, "negative_token_id"),
    WrongRequest(
        "/v1/score", b'{"query": [1], "items": [[600]], "label_token_ids": [1]}', 422, "token_id_exceeds_vocab"
    ),
    WrongRequest(
        "/v1/score", b'{"query": "a", "items": ["a"], "labels": ["what is this"]}', 400, "label_not_single_token"
    ),
    WrongRequest(
        "/v1/score", b'{"query": "a", "items": ["a"], "labels": ["a"], "model": "other"}', 404, "model_not_found"
    ),
    WrongRequest("/v1/rerank", b'{"query": "a"}', 400, "missing_documents"),
    WrongRequest("/classify", b'{"input": "a"}', 400, "not_a_classifier"),
    WrongRequest("/v1/prefix/nothing", b"", 404, "not_found", method="DELETE"),
    WrongRequest("/nothing", b"", 404, "not_found", method="GET"),
    WrongRequest("/v1/score", b"", 405, "method_not_allowed", method="GET"),
)
