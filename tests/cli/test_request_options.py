"""Options of request fields: made from the tables of fields, and turned into the fields of a request."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import typer
from typer.testing import CliRunner

from prefixwise.cli.request_options import with_request_fields
from prefixwise.contract.request import SCORE_FIELDS
from prefixwise.contract.rerank_request import rerank_fields

SCORE_DEFAULTS = {
    "labels": None,
    "label_token_ids": None,
    "suffix": None,
    "apply_softmax": None,
    "score_mode": None,
    "label_scoring": "single",
    "tokenization": "separate",
    "item_first": False,
    "max_tokens_per_item": None,
    "algorithm": "auto",
    "on_item_error": "fail",
}
RERANK_DEFAULTS = {
    "instruction": None,
    "max_tokens_per_doc": None,
    "max_chunks_per_doc": None,
    "truncate": True,
    "algorithm": "auto",
    "top_n": None,
}


def read(*args: str) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """The fields that a verb with the options of both tables gets."""
    got: list[tuple[Mapping[str, object], Mapping[str, object]]] = []

    @with_request_fields(score=SCORE_FIELDS, rerank=rerank_fields("native"))
    def verb(*, score: Mapping[str, object], rerank: Mapping[str, object]) -> None:
        got.append((score, rerank))

    app = typer.Typer()
    app.command()(verb)
    ran = CliRunner().invoke(app, list(args))
    if ran.exit_code:
        raise ValueError(ran.output)
    return got[0]


def test_without_options_every_field_has_its_default() -> None:
    assert read() == (SCORE_DEFAULTS, RERANK_DEFAULTS)


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (("--label", "a", "-l", "b"), {"labels": ["a", "b"]}),
        (("--label-token-id", "7"), {"label_token_ids": [7]}),
        (("--softmax",), {"apply_softmax": True}),
        (("--tokenization", "joint"), {"tokenization": "joint"}),
        (("--tokenization", "apart"), {"tokenization": "separate"}),
        (("--item-first",), {"item_first": True}),
        (("--max-tokens-per-item", "3"), {"max_tokens_per_item": 3}),
    ],
)
def test_an_option_sets_its_field(args: tuple[str, ...], fields: dict[str, object]) -> None:
    assert read(*args) == ({**SCORE_DEFAULTS, **fields}, RERANK_DEFAULTS)


def test_an_option_may_turn_a_field_off() -> None:
    assert read("--no-truncate")[1]["truncate"] is False


def test_an_option_of_both_tables_is_one_option() -> None:
    score, rerank = read("--algorithm", "serial")
    assert (score["algorithm"], rerank["algorithm"]) == ("serial", "serial")


@pytest.mark.parametrize("args", [("--tokenization", "words"), ("--top", "0"), ("--label-token-id", "x")])
def test_a_wrong_value_is_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="Invalid value"):
        read(*args)
