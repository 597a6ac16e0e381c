"""What the model cannot take is an error before any work, by item."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import RequestError
from prefixwise.contract.parse import parse_score_request
from prefixwise.prompts.limits import check_limits
from prefixwise.prompts.template import build_prompt
from tests.prompts.merging_tokenizer import merging_tokenizer

MODEL = FakeBackend(vocab_size=10, max_context_len=8).config


def check(
    label_tokens: int = 0, vocab_size: int = 10, *, report: bool = False, **fields: Any
) -> dict[int, RequestError]:
    prompt = build_prompt(parse_score_request({"label_token_ids": [1], **fields}), merging_tokenizer(), None)
    model = replace(MODEL, vocab_size=vocab_size)
    return check_limits(prompt, model, label_tokens=label_tokens, report=report)


class TestContext:
    def test_a_context_may_fill_the_model(self) -> None:
        assert check(query=[1] * 5, items=[[2] * 3, []]) == {}
        assert check(2, query=[1] * 5, items=[[2]]) == {}

    @pytest.mark.parametrize(
        ("label_tokens", "fields", "got"),
        [
            (0, {"query": [1] * 5, "items": [[2], [2] * 4]}, "prefix 5 + item 4 tokens;"),
            (0, {"query": [1] * 5, "items": [[2], [2] * 2], "suffix": [1, 1]}, "prefix 5 + item 4 tokens;"),
            (2, {"query": [1] * 5, "items": [[2], [2] * 2]}, "prefix 5 + item 2 tokens + label 2;"),
            (0, {"query": [1] * 5, "items": [[2], [2] * 4], "item_first": True}, "got 9 tokens;"),
            (0, {"query": "xxxxx", "items": ["a", "xxxx"], "tokenization": "joint"}, "got 9 tokens;"),
        ],
    )
    def test_the_error_names_the_item_the_limit_and_what_came(
        self, label_tokens: int, fields: dict[str, Any], got: str
    ) -> None:
        with pytest.raises(RequestError) as caught:
            check(label_tokens, **fields)
        error = caught.value
        assert (error.code, error.status, error.type) == ("context_too_long", 400, "invalid_value_error")
        assert (error.param, error.item_index) == ("items", 1)
        assert error.message.startswith("items[1] must fit the model's 8 tokens, ")
        assert got in error.message
        assert error.message.endswith("shorten it or set max_tokens_per_item")

    def test_where_no_item_could_fit_the_query_is_to_be_shortened(self) -> None:
        with pytest.raises(RequestError, match=r"items\[0\].*prefix 9 \+ item 0 tokens; shorten the query"):
            check(query=[1] * 9, items=[[]])

    def test_a_report_names_every_item_that_does_not_fit(self) -> None:
        errors = check(report=True, query=[1] * 5, items=[[2] * 4, [2], [2] * 9])
        assert {index: error.code for index, error in errors.items()} == {
            0: "context_too_long",
            2: "context_too_long",
        }

    def test_an_item_that_is_at_fault_already_is_left_alone(self) -> None:
        errors = check(report=True, query=[1] * 9, items=[[-1], [2]], on_item_error="report")
        assert list(errors) == [1]


class TestTokensThatTheModelLacks:
    """A tokenizer may know tokens that were added after the embedding was made; 7 is `abc`."""

    @pytest.mark.parametrize(
        ("fields", "param", "where"),
        [
            ({"query": "xabc", "items": ["a"]}, "query", "query"),
            ({"query": "x", "items": ["a", "xabc"]}, "items", "items[1]"),
            ({"query": "xa", "items": ["a", "bc"], "tokenization": "joint"}, "items", "items[1]"),
            (
                {"query": "x", "items": ["a"], "labels": ["a", "abc"], "label_token_ids": None},
                "labels",
                "labels[1]",
            ),
        ],
    )
    def test_the_error_names_the_text_and_the_token(self, fields: dict[str, Any], param: str, where: str) -> None:
        assert check(vocab_size=8, **fields) == {}
        with pytest.raises(RequestError) as caught:
            check(vocab_size=7, **fields)
        error = caught.value
        assert (error.code, error.status, error.param) == ("token_id_exceeds_vocab", 422, param)
        assert error.message.startswith(f"{where} must hold tokens below 7, the model's vocabulary size, ")
        assert error.message.endswith("token 7")

    def test_a_report_names_every_such_item_once(self) -> None:
        errors = check(vocab_size=7, report=True, query="x", items=["abcabc", "a", "abc" * 9])
        assert {index: error.code for index, error in errors.items()} == {
            0: "token_id_exceeds_vocab",
            2: "context_too_long",
        }
