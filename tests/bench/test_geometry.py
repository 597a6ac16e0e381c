"""Requests by number: of the shape asked for, the same every time, apart where they are to be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixwise.bench.geometry import (
    PRESETS,
    GeometryError,
    Preset,
    RequestMaker,
    choose_labels,
    delimiter_of,
    vocab_size_of,
)
from prefixwise.bench.kinds.load import LoadGeometry


def maker(seed: int = 0, delimiter: int | None = None, **changes: Any) -> RequestMaker:
    shape = {"query_tokens": 30, "num_items": 4, "item_tokens": 5, "vocab_size": 50, "distinct_queries": 0}
    return RequestMaker(LoadGeometry(**{**shape, "label_token_ids": [1, 2], **changes}), seed, delimiter=delimiter)


def test_the_geometries_of_the_field() -> None:
    assert PRESETS["contract"] == Preset(2000, 500, 20)
    assert PRESETS["small"] == Preset(300, 10, 20, rate_qps=120.0)


def test_requests_have_the_shape_asked_for() -> None:
    request = maker().request(7)
    assert len(request["query"]) == 30
    assert [len(item) for item in request["items"]] == [5] * 4
    assert request["label_token_ids"] == [1, 2]
    assert all(0 <= token < 50 for ids in [request["query"], *request["items"]] for token in ids)


@pytest.mark.parametrize("number", [0, 1, 49, 50, 2500, 10**5])
@pytest.mark.parametrize("query_tokens", [1, 2, 3, 30])
def test_a_body_is_its_request_as_json(number: int, query_tokens: int) -> None:
    made = maker(query_tokens=query_tokens)
    assert json.loads(made.body(number)) == made.request(number)


def test_items_may_be_empty() -> None:
    assert json.loads(maker(item_tokens=0).body(0))["items"] == [[]] * 4


def test_the_same_seed_gives_the_same_requests() -> None:
    assert maker(3).body(11) == maker(3).body(11)
    assert maker(3).body(11) != maker(4).body(11)


def test_every_request_has_its_own_query_from_its_first_token_on() -> None:
    """Of 50 ids: the first token is the number modulo 50, the second and third go on."""
    heads = [tuple(maker().request(number)["query"][:3]) for number in (0, 1, 49, 50, 2501)]
    assert heads == [(0, 0, 0), (1, 0, 0), (49, 0, 0), (0, 1, 0), (1, 0, 1)]
    made = maker()
    assert len({tuple(made.request(number)["query"]) for number in range(3000)}) == 3000


def test_queries_take_turns_and_items_go_on() -> None:
    made = maker(distinct_queries=2)
    requests = [made.request(number) for number in range(4)]
    assert requests[0]["query"] == requests[2]["query"] != requests[1]["query"] == requests[3]["query"]
    assert requests[0]["items"] != requests[2]["items"]


def test_the_delimiter_is_in_no_request() -> None:
    made = maker(vocab_size=5, delimiter=3)
    requests = [made.request(number) for number in range(40)]
    used = {token for request in requests for ids in [request["query"], *request["items"]] for token in ids}
    assert used == {0, 1, 2, 4}


def test_a_vocabulary_of_the_delimiter_alone_is_refused() -> None:
    with pytest.raises(GeometryError, match="--vocab-size"):
        maker(vocab_size=1, delimiter=0)


def test_labels_are_the_default_ones_where_the_vocabulary_has_them() -> None:
    assert choose_labels(None, 9455) == [9454, 2753]
    assert choose_labels(None, 9454) == [0, 1]
    assert choose_labels([7], 8) == [7]


@pytest.mark.parametrize("given", [[8], [-1], []])
def test_labels_of_the_user_must_be_in_the_vocabulary(given: list[int]) -> None:
    with pytest.raises(GeometryError, match="from 0 to 7"):
        choose_labels(given, 8)


def test_what_servers_tell_of_themselves() -> None:
    ours = {"model": {"vocab_size": 9}, "configuration": {"vocab_size": 9, "delimiter_token_id": 4}}
    assert (vocab_size_of(ours), delimiter_of(ours)) == (9, 4)
    other = {"vocab_size": 7, "model": "a name", "multi_item_scoring_delimiter": 0}
    assert (vocab_size_of(other), delimiter_of(other)) == (7, 0)
    assert (vocab_size_of({}), delimiter_of({})) == (None, None)


def test_large_requests_are_made_of_few_lists_and_still_have_queries_of_their_own() -> None:
    large = maker(num_items=2, item_tokens=600_000)
    first, second = large.request(0), large.request(1)
    assert first["items"] is second["items"]
    assert first["query"] != second["query"]
