"""Requests that classify or embed: what parses to what, and the error of each wrong one."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.contract.classify import (
    CLASSIFY_FIELDS,
    ClassifyOptions,
    ClassifyRequest,
    EmbedOptions,
    parse_classify_request,
)
from prefixwise.contract.errors import RequestError
from prefixwise.contract.fields import in_python_words
from prefixwise.contract.ragged import Ragged


def parsed(value: object, **fields: Any) -> ClassifyRequest:
    return parse_classify_request({"input": value, **fields})


def refusal(body: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_classify_request(body)
    return caught.value


@pytest.mark.parametrize(("value", "expected"), [("a", ("a",)), (["a", "b c"], ("a", "b c")), (("x",), ("x",))])
def test_texts(value: object, expected: tuple[str, ...]) -> None:
    assert parsed(value).input == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (np.array([4, 5]), [[4, 5]]),
        ([np.array([4, 5]), [6]], [[4, 5], [6]]),
    ],
)
def test_token_ids_of_one_input_or_of_several(value: object, expected: list[list[int]]) -> None:
    found = parsed(value).input
    assert isinstance(found, Ragged)
    assert [row.tolist() for row in found] == expected


def test_defaults_are_vllms() -> None:
    request = parsed("a", use_activation=None)
    assert (request.use_activation, request.add_special_tokens, request.truncate_prompt_tokens) == (True, True, None)
    assert (request.truncation_side, request.priority, request.model, request.num_items) == ("right", 0, None, 1)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({}, "missing_input", "input is required: expected a string, a list of strings"),
        ({"input": ""}, "empty_input", "input must hold at least one character or token id"),
        ({"input": []}, "empty_input", "input must hold at least one"),
        ({"input": ["a", ""]}, "empty_input", "input[1] must hold"),
        ({"input": [[1], []]}, "empty_input", "input[1] must hold"),
        ({"input": 3}, "invalid_input_type", "input must be a string, a list of strings, a list of token ids"),
        ({"input": ["a", 3]}, "mixed_input_types", "input[1] must be a string as input[0] is one, got 3"),
        ({"input": [[1], "a"]}, "mixed_input_types", "input[1] must be a list of token ids as input[0] is one"),
        ({"input": [1, True]}, "invalid_token_id_type", "input[1] must be an integer token id"),
        ({"input": [[1], [2, -1]]}, "negative_token_id", "input[1][1] must be a token id of 0 or more"),
        ({"input": ["\ud800"]}, "invalid_unicode", "input[0] must be valid Unicode"),
        ({"input": "a", "use_activation": 1}, "invalid_use_activation_type", "true or false"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "invalid_truncate_prompt_tokens", "-1 or an integer of 1"),
        ({"input": "a", "truncate_prompt_tokens": True}, "invalid_truncate_prompt_tokens", "-1 or an integer of 1"),
        ({"input": "a", "truncation_side": "up"}, "invalid_truncation_side", "right, left"),
        ({"input": "a", "messages": []}, "unsupported_parameter", "no chat template is applied"),
        ({"input": "a", "cache_salt": "x"}, "unsupported_parameter", "cache_salt is not served here"),
        ({"input": "a", "labels": ["x"]}, "unsupported_parameter", "labels is not served here"),
    ],
)
def test_the_first_fault_is_named(body: dict[str, object], code: str, message: str) -> None:
    error = refusal(body)
    assert (error.code, error.status) == (code, 400)
    assert message in error.message


def test_unknown_fields_are_named_and_harmless_ones_are_not() -> None:
    request = parsed("a", softmx=True, add_generation_prompt=False, mm_processor_kwargs={}, user="me")
    assert request.warnings == ('the field "softmx" is unknown and was ignored',)


def test_every_attribute_has_a_row() -> None:
    rows = {row.name for row in CLASSIFY_FIELDS if row.attribute is not None}
    assert rows == set(ClassifyRequest.__dataclass_fields__) - {"warnings"}


@pytest.mark.parametrize(("method", "options"), [(Scorer.classify, ClassifyOptions), (Scorer.embed, EmbedOptions)])
def test_python_methods_take_and_explain_the_options(method: Any, options: type) -> None:
    parameters, rows = inspect.signature(method).parameters, {row.name: row for row in CLASSIFY_FIELDS}
    names = set(get_type_hints(options))
    assert set(parameters) == {"self", "inputs", "lora", "on_progress", *names}
    for name in names:
        assert parameters[name].default == rows[name].default
        assert f"{name}: {in_python_words(rows[name].about)}" in method.__doc__
