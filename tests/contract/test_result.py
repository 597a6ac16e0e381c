"""The result object: its JSON body, its ranking, its figures."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.ragged import Ragged
from prefixwise.contract.result import ItemError, RankedItem, ScoreResult, Truncation, Usage


def result(
    scores: list[list[float] | None],
    items: tuple[str, ...] | Ragged | None = None,
    truncated: tuple[Truncation, ...] = (),
    item_errors: tuple[ItemError, ...] = (),
    debug: dict[str, object] | None = None,
) -> ScoreResult:
    return ScoreResult(
        scores=scores,
        items=tuple(f"item {index}" for index in range(len(scores))) if items is None else items,
        labels=(" yes", " no"),
        score_mode="softmax",
        model="smol",
        usage=Usage(prompt_tokens=30, cached_tokens=8),
        truncated=truncated,
        item_errors=item_errors,
        debug=debug,
    )


def test_scoring_generates_no_tokens() -> None:
    usage = Usage(prompt_tokens=30, cached_tokens=8)
    assert (usage.completion_tokens, usage.total_tokens) == (0, 30)


def test_the_body_is_that_of_the_http_route() -> None:
    body = result([[0.9, 0.1], [0.2, 0.8]]).to_json()
    assert json.loads(json.dumps(body)) == {
        "object": "scoring",
        "model": "smol",
        "scores": [[0.9, 0.1], [0.2, 0.8]],
        "usage": {
            "prompt_tokens": 30,
            "total_tokens": 30,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 8},
        },
    }


@pytest.mark.parametrize("debug", [None, {}])
def test_keys_that_would_hold_nothing_are_left_out(debug: dict[str, object] | None) -> None:
    assert set(result([[1.0]], debug=debug).to_json()) == {"object", "model", "scores", "usage"}


def test_the_extra_keys_appear_when_they_hold_something() -> None:
    body = result(
        [[1.0], None],
        truncated=(Truncation(index=0, original_tokens=50, kept_tokens=10),),
        item_errors=(ItemError(1, "negative_token_id", "items[1][0] is negative"),),
        debug={"algorithm": "packed"},
    ).to_json()
    assert body["scores"] == [[1.0], None]
    assert body["truncated"] == [{"index": 0, "original_tokens": 50, "kept_tokens": 10}]
    assert body["item_errors"] == [{"index": 1, "code": "negative_token_id", "message": "items[1][0] is negative"}]
    assert body["debug"] == {"algorithm": "packed"}


def test_an_item_error_is_made_from_the_error_that_was_found() -> None:
    error = InvalidValueError("items[4] must be short, got long", code="context_too_long", item_index=4)
    assert ItemError.from_error(4, error) == ItemError(4, "context_too_long", "items[4] must be short, got long")


def test_ranked_is_best_first_by_the_first_column() -> None:
    ranked = result([[0.1, 0.9], [0.7, 0.3], [0.4, 0.6]]).ranked()
    assert ranked == [
        RankedItem(1, "item 1", 0.7, [0.7, 0.3]),
        RankedItem(2, "item 2", 0.4, [0.4, 0.6]),
        RankedItem(0, "item 0", 0.1, [0.1, 0.9]),
    ]


def test_ties_are_ranked_in_item_order() -> None:
    assert [item.index for item in result([[0.5], [0.7], [0.5], [0.7]]).ranked()] == [1, 3, 0, 2]


def test_items_without_a_score_are_not_ranked() -> None:
    assert [item.index for item in result([None, [0.1], None, [0.2]]).ranked()] == [3, 1]


def test_id_items_are_ranked_as_lists() -> None:
    ranked = result([[0.1], [0.9]], items=Ragged.from_sequences([[1, 2], [3]])).ranked()
    assert [item.item for item in ranked] == [[3], [1, 2]]
    assert json.dumps(ranked[0].item) == "[3]"


@given(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), max_size=30))
def test_every_scored_item_is_ranked_once_and_in_order(values: list[float | None]) -> None:
    ranked = result([None if value is None else [value] for value in values]).ranked()
    keys = [(-item.score, item.index) for item in ranked]
    assert keys == sorted(keys)
    assert sorted(item.index for item in ranked) == [index for index, value in enumerate(values) if value is not None]
