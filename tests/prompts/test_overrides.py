"""Which tokens the vectors of a request take the place of; vectors without a token, and tokens without a vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixwise.contract.checks import check_embed_overrides
from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.parse import parse_score_request
from prefixwise.prompts.template import Prompt, build_prompt
from tests.prompts.merging_tokenizer import merging_tokenizer

A, B, C, D = ([[float(number)]] for number in range(1, 5))


def prompt_of(delimiter: int | None = None, **fields: Any) -> Prompt:
    request = parse_score_request({"label_token_ids": [9], "embed_override_token_id": 4, **fields})
    request = check_embed_overrides(request, 10, 1, "float32")
    return build_prompt(request, merging_tokenizer(bos=True), delimiter)


def contexts(prompt: Prompt) -> list[list[int | float]]:
    """What the model sees for every item: token ids, and the only number of a vector as a float."""
    assert prompt.overrides is not None
    numbers = prompt.overrides.vectors[:, 0].tolist()
    prefix = [] if prompt.joined else prompt.prefix_ids.tolist()
    return [[numbers[~id_] if id_ < 0 else id_ for id_ in prefix + row.tolist()] for row in prompt.sequences]


def test_every_placeholder_of_query_and_items_gets_the_next_vector() -> None:
    fields: dict[str, Any] = {"query": [4, 1, 4], "items": [[4, 2], [], [3], [2, 4, 4]], "suffix": [4]}
    prompt = prompt_of(**fields, query_embed_overrides=A + B, item_embed_overrides=[C, None, [], D + A])
    assert contexts(prompt) == [[1.0, 1, 2.0, *item] for item in ([3.0, 2, 4], [4], [3, 4], [2, 4.0, 1.0, 4])]
    assert prompt.context(3).tolist() == [4, 1, 4, 2, 4, 4, 4]
    assert prompt.prompt_tokens == 9


def test_placeholders_without_vectors_keep_their_embeddings() -> None:
    fields: dict[str, Any] = {"query": [4, 1], "items": [[4], [4]]}
    assert contexts(prompt_of(**fields, item_embed_overrides=[None, C])) == [[4, 1, 4], [4, 1, 3.0]]
    assert contexts(prompt_of(**fields, query_embed_overrides=C)) == [[3.0, 1, 4], [3.0, 1, 4]]
    assert prompt_of(**fields).overrides is None


def test_item_first_and_a_delimiter() -> None:
    fields: dict[str, Any] = {
        "query": [4, 1],
        "items": [[2, 4]],
        "query_embed_overrides": A,
        "item_embed_overrides": [B],
    }
    assert contexts(prompt_of(**fields, item_first=True)) == [[2, 2.0, 1.0, 1]]
    assert contexts(prompt_of(8, **fields)) == [[1.0, 1, 8, 2, 2.0]]


def test_text_is_tokenized_first() -> None:
    prompt = prompt_of(query="ax", items=["x", "b"], query_embed_overrides=A, item_embed_overrides=[B, None])
    assert contexts(prompt) == [[0, 1, 1.0, 2.0], [0, 1, 1.0, 2]]


@pytest.mark.parametrize(
    ("fields", "code", "param", "message"),
    [
        (
            {"query_embed_overrides": A + B},
            "embed_overrides_mismatch",
            "query_embed_overrides",
            "query_embed_overrides must hold a vector for each token 4 (embed_override_token_id) of query: "
            "expected 1, got 2",
        ),
        (
            {"item_embed_overrides": [A, []]},
            "embed_overrides_mismatch",
            "item_embed_overrides",
            "item_embed_overrides[1] must hold a vector for each token 4 (embed_override_token_id) of items[1]: "
            "expected 2, got 0",
        ),
        (
            {"item_embed_overrides": [None, A + B], "max_tokens_per_item": 2},
            "embed_overrides_truncated",
            "item_embed_overrides",
            "items[1] must have its overridden tokens among its first 2 tokens (max_tokens_per_item), "
            "got one behind them",
        ),
    ],
)
def test_vectors_that_do_not_fit_the_tokens(fields: dict[str, Any], code: str, param: str, message: str) -> None:
    common: dict[str, Any] = {"query": [4, 1], "items": [[4], [4, 2, 4]], **fields}
    with pytest.raises(InvalidValueError) as caught:
        prompt_of(**common)
    assert (caught.value.code, caught.value.param, str(caught.value)) == (code, param, message)
    if param == "item_embed_overrides":
        assert caught.value.item_index == 1
        prompt = prompt_of(**common, on_item_error="report")
        assert {index: error.code for index, error in prompt.item_errors.items()} == {1: code}
        if fields["item_embed_overrides"][0]:
            assert contexts(prompt.take(np.array([0]))) == [[4, 1, 1.0]]


def test_an_item_may_be_cut_behind_its_vectors() -> None:
    prompt = prompt_of(query=[1], items=[[4, 2, 3]], item_embed_overrides=[A], max_tokens_per_item=2)
    assert contexts(prompt) == [[1, 1.0, 2]]
    assert prompt.truncated[0].kept_tokens == 2


def test_joint_tokens_belong_to_neither_part() -> None:
    fields: dict[str, Any] = {"items": ["b"], "tokenization": "joint", "query_embed_overrides": A}
    with pytest.raises(InvalidValueError, match='need tokenization "separate", got "joint"') as caught:
        prompt_of(query="ax", **fields)
    assert caught.value.code == "conflicting_parameters"
    assert contexts(prompt_of(query=[4], **{**fields, "items": [[2]]})) == [[1.0, 2]]
