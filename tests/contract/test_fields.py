"""The tables of request fields: complete, consistent, and the source of every description."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import get_args, get_type_hints

import jsonschema_rs
import pytest

from prefixwise.contract.errors import RequestError
from prefixwise.contract.fields import Choice, Field, Structured, in_python_words, markdown_table, properties
from prefixwise.contract.parse import parse_rerank_request, parse_score_request
from prefixwise.contract.request import SCORE_FIELDS, ScoreOptions, ScoreRequest
from prefixwise.contract.rerank_request import RERANK_FIELDS, Dialect, RerankOptions, RerankRequest, rerank_fields
from prefixwise.scorer import Scorer

TABLES = [
    pytest.param(SCORE_FIELDS, ScoreRequest, {"item_errors", "warnings"}, id="score"),
    pytest.param(
        rerank_fields("native"),
        RerankRequest,
        {"documents_field", "cut_by", "truncate_prompt_tokens", "warnings"},
        id="rerank",
    ),
    pytest.param(rerank_fields("tei"), RerankRequest, None, id="tei"),
]
SCORE = {"query": "q", "items": ["a"], "labels": ["y", "n"]}
RERANK = {"query": "q", "documents": ["a"]}


@pytest.mark.parametrize(("rows", "request_class", "others"), TABLES)
def test_a_row_and_an_attribute_belong_together(
    rows: tuple[Field, ...], request_class: type[ScoreRequest | RerankRequest], others: set[str] | None
) -> None:
    attributes = {each.name: each for each in fields(request_class)}
    stored = {row.attribute or row.name: row for row in rows if row.attribute is not None}
    assert stored.keys() <= attributes.keys()
    if others is None:  # a dialect that does not have all fields
        return
    assert attributes.keys() - stored.keys() == others
    for name, row in stored.items():
        default = attributes[name].default
        if name != "score_mode":  # its default depends on apply_softmax
            assert row.is_required if default is MISSING else row.default == default


def test_names_are_unique_in_every_dialect() -> None:
    dialects: tuple[Dialect, ...] = get_args(Dialect)
    for rows in (SCORE_FIELDS, *map(rerank_fields, dialects)):
        assert len({row.name for row in rows}) == len(rows)
    assert {row.name for row in RERANK_FIELDS} == {row.name for each in dialects for row in rerank_fields(each)}


@pytest.mark.parametrize(
    ("method", "rows", "options"),
    [(Scorer.score, SCORE_FIELDS, ScoreOptions), (Scorer.rerank, rerank_fields("native"), RerankOptions)],
)
def test_python_methods_have_and_explain_every_parameter(
    method: object, rows: tuple[Field, ...], options: type
) -> None:
    named = {row.name: row for row in rows if row.in_python}
    parameters = inspect.signature(method).parameters  # type: ignore[arg-type]
    assert set(parameters) == {"self", "lora", "on_progress", *named}
    written = {"on_item_error"}  # in the signature itself: it decides the type of the result
    assert get_type_hints(options).keys() == {name for name, row in named.items() if not row.is_required} - written
    for name, row in named.items():
        assert f"    {name}: {in_python_words(row.about)}" in (inspect.getdoc(method) or "").splitlines()
        assert row.is_required or parameters[name].default == row.default


def test_help_in_python_has_pythons_words() -> None:
    about = "true: report in `meta.debug`; false and null: nothing. What is untrue stays."
    words = "True: report in `debug`; False and None: nothing. What is untrue stays."
    assert in_python_words(about) == words
    assert "meta.debug" not in (inspect.getdoc(Scorer.rerank) or "")


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        Scorer.score(None, "q", ["a"], labels=["y"], temperature=1)  # type: ignore[call-overload]


@pytest.mark.parametrize("rows", [SCORE_FIELDS, RERANK_FIELDS])
def test_every_field_is_described_in_one_sentence_or_two(rows: tuple[Field, ...]) -> None:
    for row in rows:
        assert row.about.endswith("."), row.name
        assert len(row.about) < 120, row.name
        assert row.about in markdown_table(rows)
        assert properties([row])[row.name]["description"] == row.about


@pytest.mark.parametrize(
    ("row", "body"), [*((row, SCORE) for row in SCORE_FIELDS), *((row, RERANK) for row in rerank_fields("native"))]
)
def test_the_schema_accepts_what_the_parser_accepts(row: Field, body: dict[str, object]) -> None:
    """Of simple fields: some values of every type, each in a request that is otherwise legal."""
    if isinstance(row.kind, Structured) or row.name == "debug_top_k":
        return
    parse = parse_score_request if body is SCORE else parse_rerank_request
    validator = jsonschema_rs.validator_for(row.schema())
    known = [*row.kind.values, *row.kind.former] if isinstance(row.kind, Choice) else []
    values: list[object] = [None, True, False, 0, 1, 1000, -1, 1.5, "text", [], *known]
    for value in values:
        try:
            parse({**body, row.name: value})
            is_accepted = True
        except RequestError:
            is_accepted = False
        assert validator.is_valid(value) == is_accepted, value
