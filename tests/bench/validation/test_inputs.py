from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.token_facts import token_facts
from prefixwise.bench.validation.inputs import TokenChoice, TokenSource, settle_tokens, told_vocab_size
from prefixwise.bench.workload import WorkloadOptions, make_workload
from prefixwise.contract.errors import PrefixwiseError

SMALL = TokenSource(TokenChoice((0, 1), delimiter=5, vocab_size=10), seed=0)


@pytest.mark.parametrize(
    ("info", "models", "size"),
    [
        ({"model": {"vocab_size": 512}, "vocab_size": 7}, {}, 512),
        ({"model": "a name", "vocab_size": 7}, {}, 7),
        ({}, {"data": [{"id": "m", "vocab_size": 9}]}, 9),
        ({"model": {"vocab_size": True}}, {"data": [{"vocab_size": 0}]}, None),
        ({}, {"data": []}, None),
        ({}, {}, None),
    ],
)
def test_the_vocabulary_size_is_what_the_server_tells(
    info: dict[str, Any], models: dict[str, Any], size: int | None
) -> None:
    assert told_vocab_size(info, models) == size


def settle(labels: list[int] | None, delimiter: int | None, size: int | None) -> tuple[TokenChoice, list[str]]:
    return settle_tokens(labels, delimiter, size, "a model that is not here")


def test_defaults_stay_where_the_vocabulary_has_them() -> None:
    assert settle(None, None, 151_644) == (TokenChoice((9454, 2753), 151_643, 151_644), [])


def test_a_default_that_the_vocabulary_lacks_is_replaced_and_that_is_said() -> None:
    choice, notes = settle(None, None, 151_643)
    assert choice == TokenChoice((9454, 2753), 151_642, 151_643)
    assert len(notes) == 1
    assert notes[0].endswith("(151643): 151642, its last id")
    choice, notes = settle(None, None, 512)
    assert choice == TokenChoice((0, 1), 511, 512)
    assert "the default label_token_ids [9454, 2753] is not in the vocabulary" in notes[1]


def test_a_model_that_is_here_gives_tokens_of_its_own_as_for_a_workload(checkpoint_of: Callable[[str], Path]) -> None:
    facts = token_facts(str(checkpoint_of("qwen3")))
    choice, _ = settle_tokens(None, None, 512, str(checkpoint_of("qwen3")))
    workload = make_workload(WorkloadOptions(query_tokens=1, num_items=1), facts)
    assert choice == TokenChoice(tuple(workload.label_token_ids), workload.delimiter_token_id, 512)
    # A server under that name with another vocabulary is another model.
    assert settle_tokens(None, None, 500, str(checkpoint_of("qwen3")))[0] == TokenChoice((0, 1), 499, 500)


def test_what_replaces_a_default_is_not_what_was_given() -> None:
    assert settle(None, 1, 512)[0] == TokenChoice((0, 2), 1, 512)
    assert settle([511, 3], None, 512)[0] == TokenChoice((511, 3), 510, 512)


@pytest.mark.parametrize(("labels", "delimiter"), [([3, 512], None), (None, 512), ([-1], 3)])
def test_a_given_id_that_the_vocabulary_lacks_is_an_error(labels: list[int] | None, delimiter: int | None) -> None:
    with pytest.raises(PrefixwiseError, match="must be from 0 to 511 for this server, got"):
        settle(labels, delimiter, 512)


def test_a_vocabulary_must_have_some_tokens() -> None:
    with pytest.raises(PrefixwiseError, match="at least 8 tokens is needed, got 7"):
        settle(None, None, 7)


def test_without_a_size_ids_stay_below_the_largest_that_is_named() -> None:
    choice, notes = settle(None, None, None)
    assert choice == TokenChoice((9454, 2753), 151_643, 151_644)
    assert "ids stay below 151644" in notes[0]
    assert settle([3, 900], 7, None)[0].vocab_size == 901


def test_tokens_are_the_same_for_a_name_and_others_for_another() -> None:
    again = TokenSource(SMALL.choice, seed=0)
    assert SMALL.draw("a", 50) == again.draw("a", 50)
    assert SMALL.draw("a", 50) != SMALL.draw("b", 50)
    assert SMALL.draw("a", 50) != TokenSource(SMALL.choice, seed=1).draw("a", 50)


def test_all_tokens_may_come_but_the_delimiter() -> None:
    assert set(SMALL.draw("many", 500)) == {0, 1, 2, 3, 4, 6, 7, 8, 9}


def test_others_differ_at_every_place_and_are_not_the_delimiter_either() -> None:
    tokens = SMALL.draw("many", 500)
    others = SMALL.other("other", tokens)
    assert all(one != other for one, other in zip(tokens, others, strict=True))
    assert set(others) == {0, 1, 2, 3, 4, 6, 7, 8, 9}


def test_items_have_lengths_of_their_own() -> None:
    assert [len(item) for item in SMALL.isolation_items(20)] == [17, 18, 19, 20, 21, 22, 23, 24]
    assert [len(item) for item in SMALL.isolation_items(1)] == [1, 1, 1, 1, 2, 3, 4, 5]
    assert [len(item) for item in SMALL.items("a", 3, 4)] == [4, 4, 4]
