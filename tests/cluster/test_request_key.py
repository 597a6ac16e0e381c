from __future__ import annotations

from typing import Any

import orjson
import pytest

from prefixwise.cluster.exchange import HttpRequest
from prefixwise.cluster.request_key import RequestKey, key_of

SCORE = {"query": "which?", "items": ["a", "b"], "labels": ["yes"]}


def key(body: Any, path: str = "/v1/score", method: str = "POST") -> RequestKey:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return key_of(HttpRequest(method, path, body=raw))


def test_requests_of_one_query_have_one_key() -> None:
    assert key(SCORE).key is not None
    assert key(SCORE).key == key({**SCORE, "items": ["c"], "labels": ["no"], "score_mode": "logit"}).key


@pytest.mark.parametrize(
    "other", [{"query": "who?"}, {"query": [1, 2]}, {"instruction": "be strict"}, {"profile": "chat-yes-no"}]
)
def test_what_makes_another_prefix_makes_another_key(other: dict[str, Any]) -> None:
    assert key(SCORE).key != key({**SCORE, **other}).key


def test_a_prefix_that_is_pinned_has_the_key_of_its_requests() -> None:
    assert key({"query": "which?", "ttl_seconds": 5}, "/v1/prefix").key == key(SCORE).key


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank_requests_have_keys(path: str) -> None:
    assert key({"query": "which?", "documents": ["a"]}, path).key is not None


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", {"items": ["a"]}, {"query": None}, {**SCORE, "item_first": True}]
)
def test_what_shares_no_prefix_or_is_no_request_may_go_anywhere(body: Any) -> None:
    assert key(body).key is None


def test_other_routes_may_go_anywhere() -> None:
    assert key(SCORE, "/tokenize") == key(SCORE, method="GET") == RequestKey()


def test_tokens_are_about_right() -> None:
    text = key({**SCORE, "items": ["word " * 100] * 20})
    ids = key({"query": [12345] * 100, "items": [[12345] * 20] * 100, "label_token_ids": [1]})
    assert 1500 < text.tokens < 3500  # 2,000 words of one token each
    assert 1500 < ids.tokens < 3500  # 2,100 ids
