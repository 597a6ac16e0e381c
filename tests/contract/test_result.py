"""The result object: its JSON body, its ranking, its figures."""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwise.contract import result as result_module
from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.ragged import IdLists, Ragged
from prefixwise.contract.result import (
    Classification,
    ClassifyResult,
    EmbedResult,
    ItemError,
    RerankedDocument,
    RerankResult,
    ScoredItem,
    ScoreResult,
    Truncation,
    Usage,
)


def result(
    scores: list[list[float] | None],
    items: Sequence[str] | Sequence[list[int]] | None = None,
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
        ScoredItem(1, "item 1", [0.7, 0.3]),
        ScoredItem(2, "item 2", [0.4, 0.6]),
        ScoredItem(0, "item 0", [0.1, 0.9]),
    ]
    assert [item.score for item in ranked] == [0.7, 0.4, 0.1]


def test_ties_are_ranked_in_item_order() -> None:
    assert [item.index for item in result([[0.5], [0.7], [0.5], [0.7]]).ranked()] == [1, 3, 0, 2]


def test_items_without_a_score_are_not_ranked() -> None:
    assert [item.index for item in result([None, [0.1], None, [0.2]]).ranked()] == [3, 1]


def test_id_items_are_ranked_as_lists() -> None:
    ranked = result([[0.1], [0.9]], items=IdLists(Ragged.from_sequences([[1, 2], [3]]))).ranked()
    assert [item.item for item in ranked] == [[3], [1, 2]]
    assert json.dumps(ranked[0].item) == "[3]"


@given(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), max_size=30))
def test_every_scored_item_is_ranked_once_and_in_order(values: list[float | None]) -> None:
    ranked = result([None if value is None else [value] for value in values]).ranked()
    keys = [(-item.score, item.index) for item in ranked]
    assert keys == sorted(keys)
    assert sorted(item.index for item in ranked) == [index for index, value in enumerate(values) if value is not None]


class TestSequence:
    def test_it_is_a_sequence_of_its_items(self) -> None:
        found = result([[0.1, 0.9], [0.7, 0.3], [0.4, 0.6]])
        assert len(found) == 3
        assert found[1] == ScoredItem(1, "item 1", [0.7, 0.3])
        assert found[-1].index == 2
        assert [each.index for each in found[1:]] == [1, 2]
        assert [each.score for each in found] == [0.1, 0.7, 0.4]
        with pytest.raises(IndexError):
            found[3]

    def test_an_item_without_scores_is_no_number(self) -> None:
        found = result([[0.1], None], item_errors=(ItemError(1, "c", "too long"),))
        assert found[1].scores is None
        assert math.isnan(found[1].score)

    def test_id_items_are_lists(self) -> None:
        found = result([[0.1], [0.9]], items=IdLists(Ragged.from_sequences([[1, 2], [3]])))
        assert [each.item for each in found] == [[1, 2], [3]]
        assert found.items[-1] == [3]
        assert list(found.items[:1]) == [[1, 2]]

    def test_documents_are_a_sequence(self) -> None:
        first, second = RerankedDocument(1, "b", 0.9, 2.2), RerankedDocument(0, "a", 0.1, -2.2)
        found = RerankResult([first, second], "m", "p", Usage(3))
        assert (len(found), found[0], list(found), found[1:]) == (2, first, [first, second], [second])

    def test_classes_are_a_sequence(self) -> None:
        each = Classification(0, "good", [0.9, 0.1])
        found = ClassifyResult([each], ("good", "bad"), "m", Usage(3))
        assert found[0] is each
        assert found.to_dicts() == [{"index": 0, "label": "good", "good": 0.9, "bad": 0.1}]

    def test_embeddings_are_a_sequence(self) -> None:
        vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
        found = EmbedResult(vectors, "m", Usage(3))
        assert (len(found), found[1].tolist(), len(found[:1])) == (2, [3, 4, 5], 1)
        assert np.stack(list(found)).tolist() == vectors.tolist()
        frame = found.to_pandas()
        assert (frame.index.tolist(), list(frame.columns)) == ([0, 1], ["embedding"])
        assert frame.loc[1, "embedding"].tolist() == [3, 4, 5]


class TestTables:
    def test_dicts_have_a_key_for_each_label(self) -> None:
        assert result([[0.1, 0.9]]).to_dicts() == [{"index": 0, "item": "item 0", " yes": 0.1, " no": 0.9}]

    def test_errors_are_a_column_where_there_are_some(self) -> None:
        found = result([[0.1, 0.9], None], item_errors=(ItemError(1, "c", "too long"),))
        assert found.to_dicts() == [
            {"index": 0, "item": "item 0", "error": None, " yes": 0.1, " no": 0.9},
            {"index": 1, "item": "item 1", "error": "too long", " yes": None, " no": None},
        ]

    def test_modes_of_one_number_have_one_column(self) -> None:
        found = replace(result([[1.5]]), score_mode="logit_diff")
        assert found.to_dicts() == [{"index": 0, "item": "item 0", "logit_diff": 1.5}]

    @pytest.mark.parametrize(
        ("names", "distinct"),
        [(("item", "a"), ["item (2)", "a"]), (("a", "a", "a (3)"), ["a", "a (3)", "a (3) (4)"])],
    )
    def test_a_label_named_like_another_column_is_no_other_column(
        self, names: tuple[str, ...], distinct: list[str]
    ) -> None:
        (row,) = replace(result([[0.0] * len(names)]), labels=names).to_dicts()
        assert list(row) == ["index", "item", *distinct]

    def test_a_data_frame_is_indexed_like_the_request(self) -> None:
        documents = [RerankedDocument(1, "b", 0.9, 2.2), RerankedDocument(0, "a", 0.1, -2.2)]
        frame = RerankResult(documents, "m", "p", Usage(3)).to_pandas()
        assert list(frame.columns) == ["document", "relevance_score", "raw_score"]
        assert frame.index.tolist() == [1, 0]
        assert frame.loc[0, "document"] == "a"
        assert frame["relevance_score"].dtype == float

    def test_scores_that_are_missing_are_nan_in_a_data_frame(self) -> None:
        frame = result([[0.1, 0.9], None], item_errors=(ItemError(1, "c", "too long"),)).to_pandas()
        assert frame[" yes"].isna().tolist() == [False, True]
        assert frame.loc[1, "error"] == "too long"


class TestDisplay:
    def test_the_text_is_short(self) -> None:
        found = replace(result([[0.5, 0.5]] * 1000, items=["long " * 50] * 1000), warnings=("be careful",))
        lines = repr(found).splitlines()
        assert lines[0] == "ScoreResult: 1,000 items, softmax, model smol"
        assert lines[1].split() == ["index", "item", "yes", "no"]
        assert lines[-2:] == ["... 990 more", "warning: be careful"]
        assert len(lines) == 14
        assert max(map(len, lines)) < 100

    def test_one_entry_is_no_plural(self) -> None:
        usage = Usage(3)
        shown = [
            result([[0.5, 0.5]]),
            RerankResult([RerankedDocument(0, "a", 0.9, 2.2)], "m", "p", usage),
            ClassifyResult([Classification(0, "a", [1.0])], ("a",), "m", usage),
            EmbedResult(np.zeros((1, 4), np.float32), "m", usage),
        ]
        titles = [repr(each).partition(",")[0] for each in shown]
        counts = ["ScoreResult: 1 item", "RerankResult: 1 document", "ClassifyResult: 1 input", "EmbedResult: 1 input"]
        assert titles == counts

    def test_vectors_are_cut(self) -> None:
        found = EmbedResult(np.random.default_rng(0).normal(size=(1000, 576)).astype(np.float32), "m", Usage(3))
        lines = repr(found).splitlines()
        assert lines[0] == "EmbedResult: 1,000 inputs, hidden size 576, model m"
        assert len(lines) == 13
        assert max(map(len, [*lines, *found._repr_html_().split("<tr>")[1:-1]])) < 200

    def test_html_has_bars_and_escapes_texts(self) -> None:
        page = result([[0.25, 0.75]], items=["<script>alert(1)</script>"])._repr_html_()
        assert "&lt;script&gt;" in page
        assert "<script>" not in page
        assert "25.0%" in page
        assert "75.0%" in page

    def test_logits_are_drawn_between_the_least_and_the_largest(self) -> None:
        page = result([[-4.0, 0.0], [4.0, 0.0], [0.0, 0.0]])._repr_html_()
        assert [f"{percent}%,transparent" in page for percent in (0.0, 100.0, 50.0)] == [True] * 3

    def test_a_result_without_scores_can_be_shown(self) -> None:
        found = result([None], item_errors=(ItemError(0, "c", "too long"),))
        assert "too long" in repr(found)
        assert "too long" in found._repr_html_()


def test_the_examples_of_the_docstrings_are_true() -> None:
    assert doctest.testmod(result_module).failed == 0
