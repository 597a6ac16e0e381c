"""The request object, and the checks that know what is served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefixwise.contract.checks import (
    check_item_count,
    check_model,
    check_score_count,
    check_vocabulary,
    with_classes,
)
from prefixwise.contract.errors import ModelNotFoundError, RequestError
from prefixwise.contract.fields import MAX_WARNINGS
from prefixwise.contract.parse import parse_generative_request, parse_score_request
from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.contract.request import OnItemError, ScoreRequest

VOCAB_SIZE = 100


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def id_request(
    query: Int32Array | None = None,
    items: Ragged | None = None,
    labels: tuple[tuple[int, ...], ...] = ((1,),),
    suffix: Int32Array | None = None,
    on_item_error: OnItemError = "fail",
) -> ScoreRequest:
    return ScoreRequest(
        query=ids(1) if query is None else query,
        items=Ragged.from_sequences([[2], [3, 4]]) if items is None else items,
        label_token_ids=labels,
        suffix=suffix,
        on_item_error=on_item_error,
    )


def text_request(model: str | None = None) -> ScoreRequest:
    return ScoreRequest(query="q", items=("a", "b", "c"), labels=("yes", "no"), model=model)


def rows(request: ScoreRequest) -> list[list[int]]:
    assert isinstance(request.items, Ragged)
    return [row.tolist() for row in request.items]


def test_a_request_counts_its_items_and_labels() -> None:
    text = text_request()
    assert (text.is_text, text.num_items, text.num_labels) == (True, 3, 2)
    by_id = id_request()
    assert (by_id.is_text, by_id.num_items, by_id.num_labels) == (False, 2, 1)


def test_the_defaults_are_those_of_the_http_route() -> None:
    request = text_request()
    assert (request.score_mode, request.label_scoring, request.tokenization) == ("prob", "single", "separate")
    assert (request.algorithm, request.on_item_error, request.item_first) == ("auto", "fail", False)
    assert (request.max_tokens_per_item, request.suffix, request.item_errors) == (None, None, {})


class TestClasses:
    LABELS = ("good", "bad", "ugly")

    def test_a_request_without_labels_gets_the_classes(self) -> None:
        request = with_classes(ScoreRequest("q", ("a",), score_mode="logit"), self.LABELS)
        assert (request.labels, request.label_token_ids) == (self.LABELS, ((0,), (1,), (2,)))
        assert request.num_labels == 3

    def test_a_model_that_is_no_classifier_needs_labels(self) -> None:
        request = text_request()
        assert with_classes(request, ()) is request
        with pytest.raises(RequestError) as caught:
            with_classes(ScoreRequest("q", ("a",)), ())
        error = caught.value
        assert (error.code, error.status, error.param) == ("missing_label_token_ids", 400, "label_token_ids")
        assert "expected a list of token ids (or labels, a list of strings), got nothing" in error.message

    @pytest.mark.parametrize(
        ("fields", "code", "message"),
        [
            ({"labels": ("yes", "no")}, "no_label_logits", "scores its 3 classes, got one with 2 label"),
            ({"label_token_ids": ((1,),)}, "no_label_logits", "expected a request without labels"),
            ({"label_scoring": "sequence"}, "conflicting_parameters", "needs label tokens"),
            ({"score_mode": "logit_diff"}, "wrong_label_count", "takes 2 labels, got 3"),
            ({"score_mode": "sigmoid"}, "wrong_label_count", "takes 1 or 2 labels, got 3"),
        ],
    )
    def test_what_a_classifier_does_not_have_is_refused(self, fields: dict[str, Any], code: str, message: str) -> None:
        with pytest.raises(RequestError, match=message) as caught:
            with_classes(ScoreRequest("q", ("a",), **fields), self.LABELS)
        assert caught.value.code == code


def test_hidden_states_count_as_numbers_of_the_answer() -> None:
    request = replace(text_request(), return_pooled_hidden_states=True)  # 3 items
    check_score_count(request, 24, model_size=8)
    with pytest.raises(RequestError, match="at most 23 numbers, got 3 items x 8") as caught:
        check_score_count(request, 23, model_size=8)
    assert caught.value.code == "too_many_scores"
    check_score_count(text_request(), 6, model_size=8)


def test_as_many_items_as_allowed_pass() -> None:
    check_item_count(3, 3)


@pytest.mark.parametrize("field", ["items", "documents", "texts"])
def test_one_item_too_many_is_refused(field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_item_count(3, 2) if field == "items" else check_item_count(3, 2, field)
    error = caught.value
    assert (error.code, error.status, error.type) == ("too_many_items", 400, "invalid_value_error")
    assert error.message.startswith(f"{field} ")
    assert "at most 2" in error.message
    assert "got 3" in error.message
    assert error.param == field


@pytest.mark.parametrize("name", [None, "default", "qwen", "Qwen/Qwen3-0.6B"])
def test_served_names_and_default_match(name: str | None) -> None:
    check_model(text_request(model=name), ["qwen", "Qwen/Qwen3-0.6B"])


@pytest.mark.parametrize("name", ["gpt", "Qwen", ""])
def test_an_unknown_model_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        check_model(text_request(model=name), ["qwen", "smol"])
    error = caught.value
    assert (error.code, error.status, error.type) == ("model_not_found", 404, "model_error")
    assert '"qwen", "smol"' in error.message
    assert f'got "{name}"' in error.message


def test_the_largest_id_of_the_vocabulary_passes() -> None:
    request = id_request(ids(99), Ragged.from_sequences([[99], []]), ((99,),), ids(99))
    assert check_vocabulary(request, VOCAB_SIZE) is request


@pytest.mark.parametrize(
    ("request_", "name", "item_index"),
    [
        (id_request(query=ids(1, 100)), "query[1]", None),
        (id_request(suffix=ids(100)), "suffix[0]", None),
        (id_request(labels=((1,), (100,))), "label_token_ids[1]", None),
        (id_request(labels=((1,), (5, 100))), "label_token_ids[1][1]", None),
        (id_request(items=Ragged.from_sequences([[1], [], [2, 100, 100], [100]])), "items[2][1]", 2),
        (id_request(items=Ragged.from_sequences([[], [100]])), "items[1][0]", 1),
    ],
    ids=["query", "suffix", "label", "label sequence", "item", "item after an empty one"],
)
def test_an_id_beyond_the_vocabulary_is_named(request_: ScoreRequest, name: str, item_index: int | None) -> None:
    with pytest.raises(RequestError) as caught:
        check_vocabulary(request_, VOCAB_SIZE)
    error = caught.value
    assert (error.code, error.status, error.type) == ("token_id_exceeds_vocab", 422, "invalid_value_error")
    assert error.message == f"{name} must be below 100, the model's vocabulary size, got 100 (int)"
    assert (error.param, error.item_index) == (name.split("[")[0], item_index)


def test_label_ids_are_checked_for_text_requests_too() -> None:
    request = ScoreRequest(query="q", items=("a",), label_token_ids=((100,),))
    with pytest.raises(RequestError, match=r"label_token_ids\[0\] must be below 100"):
        check_vocabulary(request, VOCAB_SIZE)


def test_bad_items_are_emptied_and_reported_while_the_others_stay() -> None:
    items = Ragged.from_sequences([[1, 2], [3, 150, 200], [], [4], [100]])
    checked = check_vocabulary(id_request(items=items, on_item_error="report"), VOCAB_SIZE)
    assert rows(checked) == [[1, 2], [], [], [4], []]
    assert {index: error.item_index for index, error in checked.item_errors.items()} == {1: 1, 4: 4}
    assert "items[1][1] must be below 100" in checked.item_errors[1].message
    assert "got 150" in checked.item_errors[1].message


def test_errors_found_while_parsing_are_kept() -> None:
    earlier = RequestError("bad from the start", code="invalid_items_type", item_index=0)
    request = ScoreRequest(
        query=ids(1),
        items=Ragged.from_sequences([[], [100]]),
        label_token_ids=((1,),),
        on_item_error="report",
        item_errors={0: earlier},
    )
    checked = check_vocabulary(request, VOCAB_SIZE)
    assert checked.item_errors[0] is earlier
    assert checked.item_errors[1].code == "token_id_exceeds_vocab"
    assert list(request.item_errors) == [0]  # the request that came in is unchanged


def test_a_bad_query_fails_even_where_items_are_reported() -> None:
    with pytest.raises(RequestError, match=r"query\[0\]"):
        check_vocabulary(id_request(query=ids(100), on_item_error="report"), VOCAB_SIZE)


class TestLabelWarnings:
    """Labels that are legal and hardly meant. They are scored, as they are for clients of other servers."""

    def warnings(self, **fields: Any) -> tuple[str, ...]:
        return parse_score_request({"query": "q", "items": ["a"], **fields}).warnings

    def test_one_label_under_softmax(self) -> None:
        (warning,) = self.warnings(labels=[" yes"], apply_softmax=True)
        assert "softmax over one label is always 1.0" in warning
        assert self.warnings(labels=[" yes"]) == self.warnings(labels=[" yes", " no"], apply_softmax=True) == ()

    def test_one_class_under_softmax(self) -> None:
        request = parse_score_request({"query": "q", "items": ["a"], "apply_softmax": True})
        assert request.warnings == with_classes(request, ("bad", "good")).warnings == ()
        assert len(with_classes(request, ("reward",)).warnings) == 1

    @pytest.mark.parametrize(
        ("fields", "shown"),
        [
            ({"labels": [" yes", " no", " yes"]}, 'labels[2] is the same label as labels[0], " yes"'),
            ({"label_token_ids": [7, 8, 8]}, "label_token_ids[2] is the same label as label_token_ids[1], 8"),
        ],
    )
    def test_the_same_label_twice(self, fields: dict[str, object], shown: str) -> None:
        (warning,) = self.warnings(**fields)
        assert shown in warning

    def test_they_are_bounded(self) -> None:
        warnings = self.warnings(label_token_ids=[3] * 50)
        assert len(warnings) == MAX_WARNINGS + 1
        assert warnings[-1] == "39 more labels occur twice"

    def test_unknown_fields_are_named_beside_them(self) -> None:
        body = {"query": "q", "items": ["a"], "label_token_ids": [3], "unknown": 1}
        unknown, one_label = parse_generative_request(body).request.warnings
        assert "unknown" in unknown
        assert "softmax" in one_label

    def test_classes_of_the_same_name_are_different(self) -> None:
        request = parse_score_request({"query": "q", "items": ["a"]})
        assert with_classes(request, ("other", "other")).warnings == ()
