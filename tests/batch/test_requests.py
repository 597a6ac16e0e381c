from __future__ import annotations

from typing import Any

import pytest

from prefixwise.batch.requests import RowDefaults, parse_row, query_key, row_id
from prefixwise.contract.errors import RequestError
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.rerank_request import RerankRequest

DEFAULTS = RowDefaults(
    {"labels": [" yes"], "apply_softmax": True, "suffix": "!"}, {"top_n": 2, "instruction": "Is it?"}
)
SCORE = {"query": "q", "items": ["i"]}


def scored(body: dict[str, Any], defaults: RowDefaults = DEFAULTS) -> ScoreRequest:
    request = parse_row(body, defaults)
    assert isinstance(request, ScoreRequest)
    return request


def test_defaults_hold_where_the_row_says_nothing() -> None:
    request = scored({**SCORE, "suffix": None})
    assert (request.labels, request.score_mode, request.suffix) == ((" yes",), "softmax", "!")


def test_the_row_comes_first() -> None:
    request = scored({**SCORE, "labels": [" no"], "suffix": "?"})
    assert (request.labels, request.suffix) == ((" no",), "?")


def test_a_row_with_other_words_for_the_same_thing_comes_first_too() -> None:
    request = scored({**SCORE, "label_token_ids": [3], "score_mode": "logit"})
    assert (request.labels, request.label_token_ids, request.score_mode) == (None, ((3,),), "logit")


def test_rows_with_documents_are_reranked_with_defaults_of_their_own() -> None:
    request = parse_row({"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}, DEFAULTS)
    assert isinstance(request, RerankRequest)
    assert (request.documents, request.top_n, request.instruction) == (("a", "b"), 1, "Is it?")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"query": "q", "items": ["a"], "documents": ["b"]}, "conflicting_parameters"),
        ({**SCORE, "return_debug": True}, "conflicting_parameters"),
        ({**SCORE, "return_pooled_hidden_states": True}, "conflicting_parameters"),
        ({"query": "q"}, "missing_items"),
        ({"items": ["a"]}, "missing_query"),
    ],
)
def test_what_is_wrong_is_said(body: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_row(body, DEFAULTS)
    assert raised.value.code == code


def test_an_id_is_no_part_of_the_request() -> None:
    assert scored({**SCORE, "suffix": "s"}, RowDefaults(DEFAULTS.score, {}, "suffix")).suffix == "!"
    assert row_id({"key": 7}, "key") == 7
    assert row_id({"id": "a"}, "key") is None


@pytest.mark.parametrize("value", [[1], {}, float("nan"), b"x"])
def test_an_id_that_cannot_be_a_key_is_refused(value: object) -> None:
    with pytest.raises(RequestError) as raised:
        row_id({"id": value}, "id")
    assert raised.value.code == "invalid_id"


def test_queries_of_text_and_of_ids_can_be_sorted_together() -> None:
    ids = scored({"query": [1, 2], "items": [[3]], "label_token_ids": [3]}, RowDefaults())
    text = scored(SCORE)
    assert sorted([query_key(ids), query_key(text)]) == [query_key(text), query_key(ids)]
    assert query_key(text) == query_key(scored({**SCORE, "items": ["other"]}))
