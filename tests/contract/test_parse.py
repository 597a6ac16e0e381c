"""Required fields, options and combinations of score and rerank requests. Query, items, labels: test_inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from prefixwise.contract.checks import label_warnings
from prefixwise.contract.errors import RequestError, describe
from prefixwise.contract.fields import MAX_WARNINGS
from prefixwise.contract.parse import (
    parse_generative_request,
    parse_pairs,
    parse_requests,
    parse_rerank_request,
    parse_score_request,
)
from prefixwise.contract.request import MAX_PRIORITY
from prefixwise.contract.rerank_request import Dialect, RerankRequest

TEXT: Mapping[str, object] = MappingProxyType({"query": "q", "items": ["a", "b"], "labels": ["yes", "no"]})
INVALID_REQUEST = "invalid_request_error"
INVALID_VALUE = "invalid_value_error"
MISSING = "missing_parameter_error"


def refusal(body: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_score_request(body)
    return caught.value


def test_the_smallest_request_gets_the_defaults() -> None:
    request = parse_score_request(TEXT)
    assert (request.query, request.items, request.labels) == ("q", ("a", "b"), ("yes", "no"))
    assert (request.score_mode, request.label_scoring, request.tokenization) == ("prob", "single", "separate")
    assert (request.algorithm, request.on_item_error, request.model) == ("auto", "fail", None)
    assert (request.item_first, request.return_debug) == (False, False)
    assert (request.label_token_ids, request.max_tokens_per_item, request.suffix) == (None, None, None)
    assert request.item_errors == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("score_mode", "logprob"),
        ("label_scoring", "sequence"),
        ("item_first", True),
        ("tokenization", "joint"),
        ("max_tokens_per_item", 1),
        ("algorithm", "prefill_extend"),
        ("return_debug", True),
        ("on_item_error", "report"),
        ("model", "default"),
        ("suffix", "\nanswer:"),
    ],
)
def test_every_option_reaches_the_request(name: str, value: object) -> None:
    request = parse_score_request({**TEXT, name: value})
    assert getattr(request, name) == value


def test_the_former_name_of_separate_tokenization_is_accepted() -> None:
    assert parse_score_request({**TEXT, "tokenization": "apart"}).tokenization == "separate"


def test_null_means_absent_for_every_optional_field() -> None:
    names = [
        *["label_token_ids", "apply_softmax", "score_mode", "label_scoring", "item_first", "tokenization"],
        *["max_tokens_per_item", "algorithm", "return_debug", "debug_top_k", "on_item_error", "model", "suffix"],
    ]
    request = parse_score_request({**TEXT, **dict.fromkeys(names)})
    assert (request.score_mode, request.model, request.item_first) == ("prob", None, False)


def test_top_tokens_need_a_debug_block_to_be_shown_in() -> None:
    assert parse_score_request({**TEXT, "return_debug": True, "debug_top_k": 3}).debug_top_k == 3
    error = refusal({**TEXT, "debug_top_k": 3})
    assert (error.code, error.param) == ("conflicting_parameters", "debug_top_k")
    assert refusal({**TEXT, "return_debug": True, "debug_top_k": 0}).code == "invalid_debug_top_k"


def test_unknown_fields_are_ignored_and_named() -> None:
    request = parse_score_request({**TEXT, "unheard_of": 1, "label_token_id": [7], "user": None})
    assert request.num_items == 2
    assert request.warnings == (
        'the field "unheard_of" is unknown and was ignored',
        'the field "label_token_id" is unknown and was ignored; did you mean label_token_ids?',
    )
    assert parse_score_request(TEXT).warnings == ()


def test_warnings_about_unknown_fields_are_bounded() -> None:
    warnings = parse_score_request({**TEXT, **dict.fromkeys(map(str, range(1000)), 1), "\ud800" * 10**5: 1}).warnings
    assert len(warnings) == MAX_WARNINGS + 1
    assert warnings[-1] == "991 more unknown fields were ignored"
    assert len(parse_score_request({**TEXT, "\n" * 10**5: 1}).warnings[0]) < 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_salt": "x"}, "cache_salt"),
        ({"max_tokens_per_query": 5}, "max_tokens_per_query"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"instruction": "x"}, "instruction"),
        ({"return_documents": True}, "return_documents"),
        ({"requests": []}, "requests"),
        ({"text_1": "x"}, "text_1"),
    ],
)
def test_a_field_that_is_known_and_not_served_is_an_error(fields: dict[str, object], param: str) -> None:
    error = refusal({**TEXT, **fields})
    assert (error.code, error.param) == ("unsupported_parameter", param)
    assert error.message.startswith(f"{param} is not served here: ")


def test_a_known_field_may_say_what_is_done_anyway() -> None:
    fields = {"max_tokens_per_query": 0, "add_special_tokens": True, "use_activation": True, "mm_processor_kwargs": {}}
    assert parse_score_request({**TEXT, **fields}).warnings == ()
    assert refusal({**TEXT, "use_activation": 1}).code == "unsupported_parameter"


def test_softmax_is_another_name_for_apply_softmax() -> None:
    assert parse_score_request({**TEXT, "softmax": True}).score_mode == "softmax"
    assert parse_score_request({**TEXT, "softmax": True, "apply_softmax": True}).score_mode == "softmax"
    assert parse_score_request({**TEXT, "softmax": False, "score_mode": "logit"}).score_mode == "logit"
    for wrong in ({"apply_softmax": False}, {"score_mode": "prob"}):
        assert refusal({**TEXT, "softmax": True, **wrong}).code == "conflicting_parameters"


def test_a_numpy_integer_is_an_integer() -> None:
    assert parse_score_request({**TEXT, "max_tokens_per_item": np.int64(5)}).max_tokens_per_item == 5


@pytest.mark.parametrize("body", [None, [], "text", 3, [TEXT]])
def test_a_body_that_is_no_object_is_invalid_json(body: object) -> None:
    error = refusal(body)
    assert (error.code, error.status, error.type) == ("invalid_json", 400, INVALID_REQUEST)
    assert "must be a JSON object" in error.message
    assert error.message.endswith(f"got {describe(body)}")


@pytest.mark.parametrize("absent", [{}, {"query": None, "items": None, "labels": None}])
@pytest.mark.parametrize(
    ("field", "param", "expected"),
    [
        ("query", "query", "a string or a list of token ids"),
        ("items", "items", "a list of strings"),
    ],
)
def test_a_missing_field_is_named(absent: dict[str, object], field: str, param: str, expected: str) -> None:
    rest = {name: value for name, value in TEXT.items() if name != field}
    error = refusal({**{name: value for name, value in absent.items() if name == field}, **rest})
    assert (error.code, error.status, error.type) == (f"missing_{param}", 400, MISSING)
    assert error.param == param
    assert f"{param} is required: expected {expected}" in error.message
    assert "got nothing" in error.message


def test_a_request_without_labels_is_for_a_classifier() -> None:
    """Whether the model is one, `checks.with_classes` knows."""
    bare = {name: value for name, value in TEXT.items() if name != "labels"}
    request = parse_score_request(bare)
    assert (request.labels, request.label_token_ids, request.num_labels) == (None, None, 0)
    assert request.score_mode == "logit"
    assert parse_score_request({**bare, "apply_softmax": True}).score_mode == "softmax"
    assert parse_score_request({**bare, "apply_softmax": False}).score_mode == "logit"
    assert parse_score_request({**bare, "score_mode": "prob"}).score_mode == "prob"
    assert parse_score_request({**bare, "score_mode": "logit_diff"}).score_mode == "logit_diff"


@pytest.mark.parametrize("value", [0, 1, "true", []])
@pytest.mark.parametrize("name", ["apply_softmax", "item_first", "return_debug", "return_pooled_hidden_states"])
def test_a_flag_must_be_a_bool(name: str, value: object) -> None:
    error = refusal({**TEXT, name: value})
    assert (error.code, error.status, error.type) == (f"invalid_{name}_type", 400, INVALID_REQUEST)
    assert f"{name} must be true or false, got " in error.message
    assert f"({type(value).__name__})" in error.message
    assert error.param == name


@pytest.mark.parametrize("value", ["fast", "", 1, True, ["softmax"]])
@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("score_mode", "softmax, prob, logprob, logit, logit_diff, sigmoid"),
        ("label_scoring", "single, sequence"),
        ("tokenization", "separate, joint"),
        ("algorithm", "auto, serial, packed, prefill_extend"),
        ("on_item_error", "fail, report"),
    ],
)
def test_an_unknown_choice_is_answered_with_the_known_ones(name: str, choices: str, value: object) -> None:
    error = refusal({**TEXT, name: value})
    assert (error.code, error.status, error.type) == (f"invalid_{name}", 400, INVALID_VALUE)
    assert f"{name} must be one of {choices}, got " in error.message
    assert f"({type(value).__name__})" in error.message
    assert error.param == name


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "5"])
def test_max_tokens_per_item_must_be_a_positive_integer(value: object) -> None:
    error = refusal({**TEXT, "max_tokens_per_item": value})
    assert (error.code, error.status, error.type) == ("invalid_max_tokens_per_item", 400, INVALID_VALUE)
    assert "must be an integer of 1 or more, got " in error.message
    assert f"({type(value).__name__})" in error.message


def test_model_must_be_a_string() -> None:
    error = refusal({**TEXT, "model": 7})
    assert (error.code, error.status, error.type) == ("invalid_model_type", 400, INVALID_REQUEST)
    assert error.message == "model must be a string, got 7 (int)"


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "prob"),
        ({"apply_softmax": False}, "prob"),
        ({"apply_softmax": True}, "softmax"),
        ({"apply_softmax": np.bool_(True)}, "softmax"),
        ({"score_mode": "softmax"}, "softmax"),
        ({"score_mode": "softmax", "apply_softmax": True}, "softmax"),
        ({"score_mode": "logit", "apply_softmax": False}, "logit"),
        ({"score_mode": "logit", "apply_softmax": None}, "logit"),
    ],
)
def test_score_mode_and_apply_softmax_agree_on_one_mode(options: dict[str, object], mode: str) -> None:
    assert parse_score_request({**TEXT, **options}).score_mode == mode


@pytest.mark.parametrize(
    ("mode", "apply_softmax"), [("prob", True), ("logit", True), ("sigmoid", True), ("softmax", False)]
)
def test_score_mode_must_not_contradict_apply_softmax(mode: str, apply_softmax: bool) -> None:
    error = refusal({**TEXT, "score_mode": mode, "apply_softmax": apply_softmax})
    assert (error.code, error.status, error.type) == ("conflicting_parameters", 400, INVALID_VALUE)
    assert f'score_mode "{mode}" contradicts apply_softmax {str(apply_softmax).lower()}: ' in error.message


@pytest.mark.parametrize(
    ("mode", "num_labels", "expected"),
    [("logit_diff", 1, "2"), ("logit_diff", 3, "2"), ("sigmoid", 3, "1 or 2")],
)
@pytest.mark.parametrize("field", ["labels", "label_token_ids"])
def test_a_mode_that_compares_labels_needs_the_right_number(
    field: str, mode: str, num_labels: int, expected: str
) -> None:
    labels = list("abc")[:num_labels] if field == "labels" else [1, 2, 3][:num_labels]
    error = refusal({"query": "q", "items": ["a"], field: labels, "score_mode": mode})
    assert (error.code, error.status, error.type) == ("wrong_label_count", 400, INVALID_VALUE)
    assert error.message == f'score_mode "{mode}" takes {expected} labels, got {num_labels}'
    assert error.param == field


@pytest.mark.parametrize(("mode", "labels"), [("logit_diff", "ab"), ("sigmoid", "a"), ("sigmoid", "ab")])
def test_the_right_number_of_labels_passes(mode: str, labels: str) -> None:
    request = parse_score_request({**TEXT, "labels": list(labels), "score_mode": mode})
    assert request.num_labels == len(labels)


@pytest.mark.parametrize(("mode", "labels"), [("logit", ["a"]), ("logit", ["a", "b"]), ("sigmoid", ["a"])])
def test_a_label_of_many_tokens_has_no_raw_logit(mode: str, labels: list[str]) -> None:
    error = refusal({**TEXT, "labels": labels, "score_mode": mode, "label_scoring": "sequence"})
    assert (error.code, error.status, error.type) == ("conflicting_parameters", 400, INVALID_VALUE)
    assert "expected score_mode softmax, prob, logprob, logit_diff, or sigmoid with two labels" in error.message
    assert f'got "{mode}" with {len(labels)} label(s)' in error.message


@pytest.mark.parametrize("mode", ["softmax", "prob", "logprob", "logit_diff", "sigmoid"])
def test_the_other_modes_take_labels_of_many_tokens(mode: str) -> None:
    assert parse_score_request({**TEXT, "score_mode": mode, "label_scoring": "sequence"}).score_mode == mode


def test_no_profile_but_plain_is_taken_where_items_are_scored() -> None:
    body = {"query": "q", "items": ["a"], "labels": ["x"]}
    for good in (None, "plain"):
        assert parse_score_request({**body, "profile": good}).num_items == 1
    for bad in ("qwen3-reranker", 5):
        with pytest.raises(RequestError, match="profile must be plain or absent") as caught:
            parse_score_request({**body, "profile": bad})
        assert (caught.value.code, caught.value.param) == ("invalid_profile", "profile")


# What a rerank request may say, and the first thing wrong with one that may not


LEAST: Mapping[str, object] = MappingProxyType({"query": "q", "documents": ["a", "b"]})


def rerank_refusal(body: object, dialect: Dialect = "native") -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_rerank_request(body, dialect)
    return caught.value


def test_rerank_the_smallest_request_gets_the_defaults() -> None:
    assert parse_rerank_request(LEAST) == RerankRequest(
        query="q",
        documents=("a", "b"),
        top_n=None,
        profile=None,
        instruction=None,
        max_tokens_per_doc=None,
        max_chunks_per_doc=None,
        truncate=True,
        truncation_side="right",
        priority=0,
        algorithm="auto",
        return_debug=False,
        debug_top_k=None,
        model=None,
        documents_field="documents",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_n", 1),
        ("top_n", 10**6),
        ("profile", "plain"),
        ("instruction", "Find it"),
        ("instruction", ""),
        ("max_tokens_per_doc", 1),
        ("max_chunks_per_doc", 3),
        ("truncate", False),
        ("truncate", True),
        ("truncation_side", "left"),
        ("truncation_side", "right"),
        ("priority", 0),
        ("priority", MAX_PRIORITY),
        ("algorithm", "prefill_extend"),
        ("return_debug", True),
        ("model", "anything"),
    ],
)
def test_rerank_every_option_reaches_the_request(name: str, value: object) -> None:
    assert getattr(parse_rerank_request({**LEAST, name: value}), name) == value


def test_rerank_null_means_absent_for_every_optional_field() -> None:
    names = [
        *["top_n", "profile", "instruction", "max_tokens_per_doc", "max_chunks_per_doc", "truncate"],
        *["truncation_side", "priority", "algorithm", "return_debug", "debug_top_k", "model"],
    ]
    assert parse_rerank_request({**LEAST, **dict.fromkeys(names)}) == parse_rerank_request(LEAST)


def test_rerank_unknown_fields_are_ignored_and_named() -> None:
    request = parse_rerank_request({**LEAST, "x": 1})
    assert request.warnings == ('the field "x" is unknown and was ignored',)
    assert replace(request, warnings=()) == parse_rerank_request(LEAST)


@pytest.mark.parametrize("fields", [{"labels": ["a"]}, {"cache_salt": "x"}, {"use_activation": False}])
def test_rerank_a_field_that_is_known_and_not_served_is_an_error(fields: dict[str, object]) -> None:
    error = rerank_refusal({**LEAST, **fields})
    assert (error.code, [error.param]) == ("unsupported_parameter", list(fields))


def test_the_arguments_of_a_template_may_hold_the_instruction() -> None:
    def instruction(**fields: object) -> str | None:
        return parse_rerank_request({**LEAST, **fields}, "cohere_v1").instruction

    assert instruction(chat_template_kwargs={"instruction": "x"}) == "x"
    assert instruction(chat_template_kwargs={"instruction": "x"}, instruction="x") == "x"
    assert instruction(chat_template_kwargs={}, instruction="y") == "y"
    for wrong, code in (
        ({"chat_template_kwargs": {"enable_thinking": False}}, "invalid_chat_template_kwargs_type"),
        ({"chat_template_kwargs": "x"}, "invalid_chat_template_kwargs_type"),
        ({"chat_template_kwargs": {"instruction": 3}}, "invalid_instruction_type"),
        ({"chat_template_kwargs": {"instruction": "x"}, "instruction": "y"}, "conflicting_parameters"),
    ):
        assert rerank_refusal({**LEAST, **wrong}, "cohere_v1").code == code


def test_documents_may_be_objects_with_a_text() -> None:
    documents = [{"text": "a"}, "b", {"text": "", "title": "ignored"}]
    assert parse_rerank_request({**LEAST, "documents": documents}).documents == ("a", "b", "")


def test_documents_may_be_a_tuple_or_an_array() -> None:
    assert parse_rerank_request({**LEAST, "documents": ("a", "")}).documents == ("a", "")
    assert parse_rerank_request({**LEAST, "documents": np.array(["a", "b"])}).documents == ("a", "b")


def test_numpys_numbers_are_numbers() -> None:
    request = parse_rerank_request({**LEAST, "top_n": np.int64(2), "truncate": np.bool_(False)})
    assert (request.top_n, request.truncate) == (2, False)
    assert (type(request.top_n), type(request.truncate)) == (int, bool)


def test_the_documents_are_called_what_the_dialect_calls_them() -> None:
    request = parse_rerank_request({"query": "q", "texts": ["a"]}, "tei")
    assert (request.documents, request.documents_field) == (("a",), "texts")
    error = rerank_refusal({"query": "q", "texts": ["a"], "documents": ["b"]}, "tei")
    assert (error.code, error.param) == ("unsupported_parameter", "documents")


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_request_must_be_an_object(body: object) -> None:
    error = rerank_refusal(body)
    assert (error.code, error.status, error.type) == ("invalid_json", 400, INVALID_REQUEST)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_query", "query"),
        ({"documents": ["a"]}, "missing_query", "query"),
        ({"query": None, "documents": ["a"]}, "missing_query", "query"),
        ({"query": "q"}, "missing_documents", "documents"),
        ({"query": "q", "documents": None}, "missing_documents", "documents"),
    ],
)
def test_query_and_documents_are_required(body: object, code: str, param: str) -> None:
    error = rerank_refusal(body)
    assert (error.code, error.status, error.type, error.param) == (code, 400, MISSING, param)
    assert error.message.startswith(f"{param} is required: expected a ")


def test_a_missing_field_is_called_what_the_dialect_calls_it() -> None:
    error = rerank_refusal({"query": "q"}, "tei")
    assert (error.code, error.param) == ("missing_texts", "texts")


@pytest.mark.parametrize(
    ("name", "value", "code", "kind", "message"),
    [
        ("query", 3, "invalid_query_type", INVALID_REQUEST, "query must be a string, got 3 (int)"),
        ("query", ["q"], "invalid_query_type", INVALID_REQUEST, "query must be a string, got ['q'] (list)"),
        ("query", "", "empty_query", INVALID_VALUE, 'query must hold at least one character, got "" (str)'),
        ("query", "\ud800", "invalid_unicode", INVALID_VALUE, "query must be valid Unicode"),
        ("documents", "a", "invalid_documents_type", INVALID_REQUEST, "documents must be a list of strings"),
        ("documents", {"text": "a"}, "invalid_documents_type", INVALID_REQUEST, "documents must be a list of strings"),
        ("documents", [], "empty_documents", INVALID_VALUE, "documents must hold at least one document"),
        ("top_n", 0, "invalid_top_n", INVALID_VALUE, "top_n must be an integer of 1 or more, got 0 (int)"),
        ("top_n", -1, "invalid_top_n", INVALID_VALUE, "top_n must be an integer of 1 or more"),
        ("top_n", True, "invalid_top_n", INVALID_VALUE, "top_n must be an integer of 1 or more, got True (bool)"),
        ("top_n", 1.0, "invalid_top_n", INVALID_VALUE, "top_n must be an integer of 1 or more, got 1.0 (float)"),
        ("top_n", "3", "invalid_top_n", INVALID_VALUE, "top_n must be an integer of 1 or more"),
        ("profile", 1, "invalid_profile_type", INVALID_REQUEST, "profile must be a string, got 1 (int)"),
        ("profile", "\udc00", "invalid_unicode", INVALID_VALUE, "profile must be valid Unicode"),
        ("instruction", [], "invalid_instruction_type", INVALID_REQUEST, "instruction must be a string, got [] (list)"),
        ("instruction", "\ud800", "invalid_unicode", INVALID_VALUE, "instruction must be valid Unicode"),
        ("max_tokens_per_doc", 0, "invalid_max_tokens_per_doc", INVALID_VALUE, "max_tokens_per_doc must be an integer"),
        ("max_chunks_per_doc", 0, "invalid_max_chunks_per_doc", INVALID_VALUE, "max_chunks_per_doc must be an integer"),
        ("truncate", "no", "invalid_truncate_type", INVALID_REQUEST, "truncate must be true or false"),
        ("truncate", 0, "invalid_truncate_type", INVALID_REQUEST, "truncate must be true or false, got 0 (int)"),
        (
            "truncation_side",
            "Left",
            "invalid_truncation_side",
            INVALID_VALUE,
            "truncation_side must be one of right, left",
        ),
        ("truncation_side", 1, "invalid_truncation_side", INVALID_VALUE, "truncation_side must be one of right, left"),
        ("priority", -1, "invalid_priority", INVALID_VALUE, "priority must be an integer from 0 to 999"),
        ("priority", MAX_PRIORITY + 1, "invalid_priority", INVALID_VALUE, "priority must be an integer from 0"),
        ("priority", True, "invalid_priority", INVALID_VALUE, "priority must be an integer from 0"),
        ("priority", 1.5, "invalid_priority", INVALID_VALUE, "priority must be an integer from 0"),
        ("algorithm", "fast", "invalid_algorithm", INVALID_VALUE, "algorithm must be one of auto, "),
        ("return_debug", 1, "invalid_return_debug_type", INVALID_REQUEST, "return_debug must be true or false"),
        ("model", 1, "invalid_model_type", INVALID_REQUEST, "model must be a string, got 1 (int)"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, value: object, code: str, kind: str, message: str) -> None:
    error = rerank_refusal({**LEAST, name: value})
    assert (error.code, error.status, error.type, error.param) == (code, 400, kind, name)
    assert error.message.startswith(message)
    assert error.item_index is None


@pytest.mark.parametrize(
    ("document", "got"),
    [
        (3, "got 3 (int)"),
        (None, "got None"),
        (["a"], "got ['a'] (list)"),
        ({}, "got an object with nothing in it"),
        ({"title": "a", "body": "b"}, 'got an object with "title", "body"'),
        ({"text": 3}, 'got an object whose "text" is 3 (int)'),
        ({"text": None}, 'got an object whose "text" is None'),
    ],
)
@pytest.mark.parametrize(("name", "dialect"), [("documents", "native"), ("texts", "tei")])
def test_a_document_that_is_no_text_is_named(document: object, got: str, name: str, dialect: Dialect) -> None:
    error = rerank_refusal({"query": "q", name: ["a", document, 4]}, dialect)
    assert (error.code, error.type, error.param) == (f"invalid_{name}_type", INVALID_REQUEST, name)
    assert error.item_index == 1
    assert error.message == f'{name}[1] must be a string, or an object whose "text" is one, {got}'


@pytest.mark.parametrize("document", ["a\ud800", {"text": "\udfff"}])
def test_half_a_character_in_a_document_is_named(document: object) -> None:
    error = rerank_refusal({"query": "q", "documents": ["a", document]})
    assert (error.code, error.type, error.item_index) == ("invalid_unicode", INVALID_VALUE, 1)
    assert error.message.startswith("documents[1] must be valid Unicode, got a lone surrogate")


@pytest.mark.parametrize("document", [{"\ud800": 1}, {f"key {number}": number for number in range(1000)}])
def test_what_is_shown_of_a_document_is_short_and_can_be_sent(document: object) -> None:
    message = rerank_refusal({"query": "q", "documents": [document]}).message
    assert len(message.encode()) < 300


# Pairs, as in vLLM's /score


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_one_text_makes_a_pair_with_each_of_many(names: tuple[str, str]) -> None:
    pairs = parse_pairs({names[0]: "q", names[1]: ["a", "b"]})
    assert pairs.indices == ((0, 1),)
    assert [(each.query, each.documents) for each in pairs.requests] == [("q", ("a", "b"))]
    assert pairs.requests[0].documents_field == names[1]
    assert parse_pairs({names[0]: ["q"], names[1]: "a"}).requests[0].documents == ("a",)


def test_as_many_texts_make_pairs_and_equal_ones_are_one_request() -> None:
    pairs = parse_pairs({"text_1": ["q", "r", "q"], "text_2": ["a", "b", "c"], "priority": 3})
    assert pairs.indices == ((0, 2), (1,))
    assert [(each.query, each.documents) for each in pairs.requests] == [("q", ("a", "c")), ("r", ("b",))]
    assert {each.priority for each in pairs.requests} == {3}


def test_a_pair_is_cut_only_if_the_request_says_so() -> None:
    body = {"text_1": "q", "text_2": "a"}
    assert not parse_pairs(body).requests[0].truncate
    cut = parse_pairs({**body, "truncate_prompt_tokens": -1}).requests[0]
    assert (cut.truncate, cut.truncate_prompt_tokens) == (True, -1)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"text_1": "q"}, "missing_text_2", "text_2"),
        ({"documents": ["a"]}, "missing_queries", "queries"),
        ({"text_1": "q", "documents": ["a"]}, "conflicting_parameters", "documents"),
        ({"text_1": "q", "text_2": "a", "queries": "q"}, "conflicting_parameters", "queries"),
        ({"query": "q", "documents": ["a"]}, "unsupported_parameter", "query"),
        ({"text_1": "q", "text_2": "a", "labels": ["y"]}, "unsupported_parameter", "labels"),
        ({"text_1": "q", "text_2": "a", "top_n": 1}, "unsupported_parameter", "top_n"),
        ({"text_1": ["q", "r"], "text_2": ["a"]}, "conflicting_parameters", "text_1"),
        ({"text_1": ["q", ""], "text_2": ["a", "b"]}, "empty_query", "text_1"),
        ({"text_1": [], "text_2": ["a"]}, "empty_text_1", "text_1"),
        ({"text_1": "q", "text_2": []}, "empty_text_2", "text_2"),
        ({"text_1": "q", "text_2": [{"content": []}]}, "invalid_text_2_type", "text_2"),
        ({"text_1": [1], "text_2": ["a"]}, "invalid_text_1_type", "text_1"),
        ({"text_1": list(map(str, range(1001))), "text_2": ["a"] * 1001}, "too_many_requests", "text_1"),
    ],
)
def test_wrong_pairs(body: object, code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_pairs(body)
    assert (caught.value.code, caught.value.param) == (code, param)


# vLLM's /generative_scoring


def test_generative_scoring_applies_softmax_unless_told_otherwise() -> None:
    body = {"query": "q", "items": ["a"], "label_token_ids": [3, 4]}
    parsed = parse_generative_request({**body, "request_id": "mine", "x": 1})
    assert (parsed.request.score_mode, parsed.add_special_tokens, parsed.request_id) == ("softmax", True, "mine")
    assert parsed.request.warnings == ('the field "x" is unknown and was ignored',)
    other = parse_generative_request({**body, "apply_softmax": False, "add_special_tokens": False, "item_first": True})
    assert (other.request.score_mode, other.add_special_tokens, other.request.item_first) == ("prob", False, True)
    for wrong, code in (
        ({**body, "labels": ["y"]}, "unsupported_parameter"),
        ({**body, "score_mode": "logit"}, "unsupported_parameter"),
        ({**body, "label_token_ids": None}, "missing_label_token_ids"),
        ({**body, "add_special_tokens": 1}, "invalid_add_special_tokens_type"),
    ):
        with pytest.raises(RequestError) as caught:
            parse_generative_request(wrong)
        assert caught.value.code == code


# Many requests


def test_fields_beside_requests_are_defaults() -> None:
    own = {"query": "r", "items": ["b"], "label_token_ids": [3], "score_mode": "logit", "suffix": None}
    many = parse_requests(
        {
            "requests": [{"query": "q", "items": ["a"]}, own],
            "labels": ["y"],
            "apply_softmax": True,
            "suffix": "s",
            "x": 1,
        }
    )
    first, second = map(parse_score_request, many.bodies)
    assert (first.labels, first.score_mode, first.suffix) == (("y",), "softmax", "s")
    assert (second.labels, second.label_token_ids, second.score_mode, second.suffix) == (None, ((3,),), "logit", "s")
    assert many.warnings == ('the field "x" is unknown and was ignored',)
    assert first.warnings == label_warnings(first) != ()  # of the one label; not of the field beside the requests
    assert second.warnings == ()


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"requests": 3}, "invalid_requests_type", "requests"),
        ({"requests": []}, "empty_requests", "requests"),
        ({"requests": [{}] * 1001}, "too_many_requests", "requests"),
        ({"requests": [{}], "query": "q"}, "conflicting_parameters", "requests"),
        ({"requests": [{}], "items": ["a"]}, "conflicting_parameters", "requests"),
        ({"requests": [{}], "priority": -1}, "invalid_priority", "priority"),
        ({"requests": [{}], "labels": 3}, "invalid_labels_type", "labels"),
        ({"requests": [{}], "top_n": 3}, "unsupported_parameter", "top_n"),
    ],
)
def test_what_is_wrong_with_all_requests_fails_the_call(body: dict[str, object], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_requests(body)
    assert (caught.value.code, caught.value.param) == (code, param)
