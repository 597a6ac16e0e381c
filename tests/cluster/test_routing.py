"""What one front can know of the replicas' loads."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from prefixwise.cluster.exchange import HttpRequest
from prefixwise.cluster.routing import (
    QUEUED_TOKENS,
    QueuedTokensPolicy,
    ReplicaLoad,
    RequestKey,
    RoutingOptions,
    desired_replicas,
    estimate_tokens,
    key_of,
    order_replicas,
    overloaded_replicas,
    rank_replicas,
)

NAMES = [f"replica-{number}" for number in range(8)]
KEYS = [str(number).encode() for number in range(4000)]


def loads(**tokens: int) -> dict[str, ReplicaLoad]:
    return {name: ReplicaLoad(count, 100) for name, count in tokens.items()}


class TestRanking:
    def test_is_the_same_for_everybody(self) -> None:
        assert all(rank_replicas(key, NAMES) == rank_replicas(key, NAMES[::-1]) for key in KEYS[:100])

    def test_shares_homes_out_evenly(self) -> None:
        homes = Counter(rank_replicas(key, NAMES)[0] for key in KEYS)
        assert set(homes) == set(NAMES)
        assert max(homes.values()) < 1.2 * len(KEYS) / len(NAMES)

    def test_a_replica_that_goes_moves_only_its_own_queries(self) -> None:
        for key in KEYS[:500]:
            before = rank_replicas(key, NAMES)
            after = rank_replicas(key, NAMES[1:])
            assert after == [name for name in before if name != NAMES[0]]

    def test_the_queries_of_one_that_goes_are_shared_out_among_all(self) -> None:
        orphans = [key for key in KEYS if rank_replicas(key, NAMES)[0] == NAMES[0]]
        assert {rank_replicas(key, NAMES[1:])[0] for key in orphans} == set(NAMES[1:])


class TestOrder:
    def test_home_comes_first_while_nobody_is_overloaded(self) -> None:
        idle = loads(a=0, b=0, c=0)
        for key in KEYS[:50]:
            assert order_replicas(key, idle, RoutingOptions()) == rank_replicas(key, ["a", "b", "c"])

    def test_home_is_kept_while_the_wait_is_short(self) -> None:
        """400 tokens are four steps of 100: that long a query waits for its home, though the others are idle."""
        key = next(key for key in KEYS if rank_replicas(key, ["a", "b", "c"])[0] == "a")
        assert order_replicas(key, loads(a=400, b=0, c=0), RoutingOptions(max_wait_steps=4))[0] == "a"
        assert order_replicas(key, loads(a=401, b=0, c=0), RoutingOptions(max_wait_steps=4))[0] != "a"

    def test_home_is_kept_where_all_are_as_busy(self) -> None:
        key = next(key for key in KEYS if rank_replicas(key, ["a", "b", "c"])[0] == "a")
        assert order_replicas(key, loads(a=9000, b=8000, c=8500), RoutingOptions())[0] == "a"

    def test_what_is_too_hot_for_one_goes_to_its_second_choice(self) -> None:
        for key in KEYS[:50]:
            home, second, third = rank_replicas(key, ["a", "b", "c"])
            hot = loads(**{home: 5000, second: 100, third: 0})
            assert order_replicas(key, hot, RoutingOptions()) == [second, third, home]

    def test_without_a_query_the_idlest_comes_first(self) -> None:
        assert order_replicas(None, loads(a=3, b=1, c=2), RoutingOptions()) == ["b", "c", "a"]

    def test_names_every_replica_once(self) -> None:
        for key in (None, b"key"):
            ordered = order_replicas(key, loads(a=5000, b=10, c=7000, d=0), RoutingOptions())
            assert sorted(ordered) == ["a", "b", "c", "d"]

    def test_of_no_replicas_is_empty(self) -> None:
        assert order_replicas(b"key", {}, RoutingOptions()) == []

    def test_never_are_all_overloaded(self) -> None:
        assert overloaded_replicas(loads(a=10**9, b=10**9), RoutingOptions(max_wait_steps=0, share=1)) == frozenset()


@pytest.mark.parametrize(
    ("name", "value"), [("max_wait_steps", -1.0), ("max_wait_steps", float("nan")), ("share", 0.9)]
)
def test_options_that_cannot_be_meant_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        RoutingOptions(**{name: value})


def test_a_front_that_is_alone_knows_what_it_sent() -> None:
    assert estimate_tokens({"a": 300, "b": 100}, {"a": 0, "b": 250}) == {"a": 300, "b": 100}


def test_one_of_several_fronts_sees_its_part_of_the_whole() -> None:
    assert estimate_tokens({"a": 300, "b": 100}, {"a": 1000, "b": 600, "c": 0}) == {"a": 1200, "b": 400, "c": 0}


def test_what_was_said_moves_no_load_from_one_replica_to_another() -> None:
    one, other = (estimate_tokens({"a": 50, "b": 50}, said) for said in ({"a": 900, "b": 100}, {"a": 100, "b": 900}))
    assert one == other == {"a": 500, "b": 500}


def test_a_front_that_waits_for_nobody_takes_all_for_idle() -> None:
    assert estimate_tokens({}, {"a": 1000, "b": 0}) == {"a": 0, "b": 0}


def test_replicas_that_are_no_more_are_not_counted() -> None:
    assert estimate_tokens({"gone": 500, "a": 100}, {"a": 200}) == {"a": 200}


def test_of_replicas_that_are_equally_idle_the_first_is_taken() -> None:
    loads = {name: ReplicaLoad(0, 2048) for name in ("b", "a")}
    assert order_replicas(None, loads, RoutingOptions()) == ["b", "a"]


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "which?", "documents": ["a"]}),
        ("/v2/rerank/", {"query": "which?", "documents": ["a"]}),
        ("/rerank", {"query": "which?", "texts": ["a"]}),
        ("/v1/ranking", {"query": {"text": "which?"}, "passages": [{"text": "a"}]}),
        ("/score", {"text_1": "which?", "text_2": ["a"]}),
        ("/v1/score", {"queries": ["which?"], "documents": ["a"]}),
    ],
)
def test_the_query_makes_the_key_under_any_of_its_names(path: str, body: dict[str, Any]) -> None:
    assert key(body, path).key == key(SCORE).key


def test_judges_share_the_key_of_their_rubric() -> None:
    chats = [[{"role": "user", "content": f"{rubric} {{item}}"}] for rubric in ("which?", "who?")]
    first, again, other = (
        key({"messages": chat, "items": [item], "answers": "1-5"}, "/v1/judge")
        for chat, item in ((chats[0], "a"), (chats[0], "b"), (chats[1], "a"))
    )
    assert first.key == again.key != other.key
    assert key({"messages": chats[0], "answers": "1-5"}, "/v1/judge").tokens < 30  # as text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        {"items": ["a"]},
        {"query": None},
        {**SCORE, "item_first": True},
        {"requests": [SCORE]},
        {"text_1": ["which?", "who?"], "text_2": ["a", "b"]},
    ],
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


@pytest.mark.parametrize(("queued", "replicas"), [(0, 1), (1, 1), (100, 1), (101, 2), (1000, 10)])
def test_each_has_at_most_the_target_waiting(queued: float, replicas: int) -> None:
    assert desired_replicas(queued, 100) == replicas


@pytest.mark.parametrize("metrics", [None, {}, {"other": {"a": 1e9}}])
def test_replicas_that_have_said_nothing_have_nothing_waiting(metrics: object) -> None:
    assert QueuedTokensPolicy(100)(SimpleNamespace(aggregated_metrics=metrics)) == (1, {})


def test_the_sum_over_replicas_counts() -> None:
    context = SimpleNamespace(aggregated_metrics={QUEUED_TOKENS: {"a": 150.0, "b": 160.0}})
    assert QueuedTokensPolicy(100)(context) == (4, {})
