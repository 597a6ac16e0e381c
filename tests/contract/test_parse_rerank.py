"""What a rerank request may say, and the first thing wrong with one that may not."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest

from prefixwise.contract.errors import RequestError
from prefixwise.contract.parse_rerank import MAX_PRIORITY, parse_rerank_request
from prefixwise.contract.rerank import RerankRequest

LEAST: Mapping[str, object] = MappingProxyType({"query": "q", "documents": ["a", "b"]})
INVALID_REQUEST = "invalid_request_error"
INVALID_VALUE = "invalid_value_error"
MISSING = "missing_parameter_error"


def refusal(body: object, documents_field: str = "documents") -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_rerank_request(body, documents_field=documents_field)
    return caught.value


def test_the_smallest_request_gets_the_defaults() -> None:
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
def test_every_option_reaches_the_request(name: str, value: object) -> None:
    assert getattr(parse_rerank_request({**LEAST, name: value}), name) == value


def test_null_means_absent_for_every_optional_field() -> None:
    names = [
        *["top_n", "profile", "instruction", "max_tokens_per_doc", "max_chunks_per_doc", "truncate"],
        *["truncation_side", "priority", "algorithm", "return_debug", "debug_top_k", "model"],
    ]
    assert parse_rerank_request({**LEAST, **dict.fromkeys(names)}) == parse_rerank_request(LEAST)


def test_unknown_fields_are_ignored() -> None:
    assert parse_rerank_request({**LEAST, "return_documents": True, "x": 1}) == parse_rerank_request(LEAST)


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
    request = parse_rerank_request({"query": "q", "texts": ["a"], "documents": 3}, documents_field="texts")
    assert (request.documents, request.documents_field) == (("a",), "texts")


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_request_must_be_an_object(body: object) -> None:
    error = refusal(body)
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
    error = refusal(body)
    assert (error.code, error.status, error.type, error.param) == (code, 400, MISSING, param)
    assert error.message.startswith(f"{param} is required: expected a ")


def test_a_missing_field_is_called_what_the_dialect_calls_it() -> None:
    error = refusal(LEAST, documents_field="texts")
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
        ("priority", -1, "invalid_priority", INVALID_VALUE, "priority must be an integer from 0 (served first) to 999"),
        ("priority", MAX_PRIORITY + 1, "invalid_priority", INVALID_VALUE, "priority must be an integer from 0"),
        ("priority", True, "invalid_priority", INVALID_VALUE, "priority must be an integer from 0"),
        ("priority", 1.5, "invalid_priority", INVALID_VALUE, "priority must be an integer from 0"),
        ("algorithm", "fast", "invalid_algorithm", INVALID_VALUE, "algorithm must be one of auto, "),
        ("return_debug", 1, "invalid_return_debug_type", INVALID_REQUEST, "return_debug must be true or false"),
        ("model", 1, "invalid_model_type", INVALID_REQUEST, "model must be a string, got 1 (int)"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, value: object, code: str, kind: str, message: str) -> None:
    error = refusal({**LEAST, name: value})
    assert (error.code, error.status, error.type, error.param) == (code, 400, kind, name)
    assert error.message.startswith(message)
    assert error.item_index is None


@pytest.mark.parametrize(
    ("document", "got"),
    [
        (3, "got 3 (int)"),
        (None, "got None (NoneType)"),
        (["a"], "got ['a'] (list)"),
        ({}, "got an object with nothing in it"),
        ({"title": "a", "body": "b"}, 'got an object with "title", "body"'),
        ({"text": 3}, 'got an object whose "text" is 3 (int)'),
        ({"text": None}, 'got an object whose "text" is None (NoneType)'),
    ],
)
@pytest.mark.parametrize("name", ["documents", "texts"])
def test_a_document_that_is_no_text_is_named(document: object, got: str, name: str) -> None:
    error = refusal({"query": "q", name: ["a", document, 4]}, documents_field=name)
    assert (error.code, error.type, error.param) == (f"invalid_{name}_type", INVALID_REQUEST, name)
    assert error.item_index == 1
    assert error.message == f'{name}[1] must be a string, or an object whose "text" is one, {got}'


@pytest.mark.parametrize("document", ["a\ud800", {"text": "\udfff"}])
def test_half_a_character_in_a_document_is_named(document: object) -> None:
    error = refusal({"query": "q", "documents": ["a", document]})
    assert (error.code, error.type, error.item_index) == ("invalid_unicode", INVALID_VALUE, 1)
    assert error.message.startswith("documents[1] must be valid Unicode, got a lone surrogate")


@pytest.mark.parametrize("document", [{"\ud800": 1}, {f"key {number}": number for number in range(1000)}])
def test_what_is_shown_of_a_document_is_short_and_can_be_sent(document: object) -> None:
    message = refusal({"query": "q", "documents": [document]}).message
    assert len(message.encode()) < 300
