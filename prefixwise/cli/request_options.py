"""The options of the verbs that score, rerank and run batches.

The options of request fields come from the tables of `contract/request.py` and `rerank_request.py`:

    @with_request_fields(fields=SCORE_FIELDS)
    def score(query: ..., *, fields: Mapping[str, object], top: ...) -> None: ...

typer sees `query`, one option for each field that has one, and `top`; `score` is called with the values of the fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Annotated, Any, Literal

import typer

from prefixwise.cli.engine_options import ENGINE_FLAGS, PROFILE_FLAG
from prefixwise.cli.flags import Verb
from prefixwise.cli.output_file import OutputFormat
from prefixwise.cli.read_inputs import ItemsFormat
from prefixwise.contract.fields import Choice, Count, Field, Flag

input_option = partial(typer.Option, rich_help_panel="Input")
scoring_option = partial(typer.Option, rich_help_panel="Scoring")
output_option = partial(typer.Option, rich_help_panel="Output")

_FILE_HELP = "More {0}s from a file: one per line, or rows of CSV, TSV, JSON Lines or Parquet; - is stdin."
_FORMAT_HELP = "lines, csv, tsv, jsonl or parquet; default: by the file's name, lines for an unknown one."
_FIELD_HELP = "The column, or the field of JSON objects, that has the text; default: {0}, or text."


def _of_file(noun: str, what: str, help_text: str) -> Any:
    metavar = {"file": "FILE", "format": "NAME", "field": "NAME"}[what]
    return input_option(f"--{noun}s-{what}", metavar=metavar, help=help_text.format(noun))


QueryFile = Annotated[
    str | None,
    input_option(metavar="FILE", help="Read the query from a file (- for stdin), without its last newline."),
]
Debug = Annotated[
    bool,
    output_option(
        "--debug",
        metavar="",
        help="Include the debug block (algorithm, batches, times) in the JSON, or print it on stderr.",
    ),
]
Quiet = Annotated[
    bool,
    output_option("--quiet", metavar="", help="No progress and no summary on stderr, only warnings."),
]

ScoreQuery = Annotated[str | None, input_option("--query", "-q", metavar="TEXT", help="The text before every item.")]
Items = Annotated[list[str] | None, input_option("--item", "-i", metavar="TEXT", help="An item; may be repeated.")]
ItemsFile = Annotated[str | None, _of_file("item", "file", _FILE_HELP)]
ItemsFormatOption = Annotated[ItemsFormat | None, _of_file("item", "format", _FORMAT_HELP)]
ItemsField = Annotated[str | None, _of_file("item", "field", _FIELD_HELP)]

Top = Annotated[int | None, output_option(min=1, metavar="N", help="Only the N best.")]
ScoreAsJson = Annotated[
    bool,
    output_option(
        "--json",
        metavar="",
        help="One line of JSON: the response body of /v1/score, and results, the items best first with their text.",
    ),
]
Output = Annotated[
    str | None,
    output_option(
        "--output",
        metavar="FILE",
        help="Write the ranked rows to a .csv, .tsv, .jsonl or .parquet file, no table: scores, text, and index, the "
        "place in the input, from 0. Other columns of the input are not copied.",
    ),
]
OutputFormatOption = Annotated[
    OutputFormat | None,
    output_option("--output-format", metavar="NAME", help="csv, tsv, jsonl or parquet; default: by the file's name."),
]

# The profile defines the text between query and document, so there is no delimiter option.
RERANK_ENGINE_FLAGS = {
    "model": ENGINE_FLAGS["model"],
    "profile": PROFILE_FLAG,
    **{field: flag for field, flag in ENGINE_FLAGS.items() if field not in ("model", "delimiter_token_id")},
}

RerankQuery = Annotated[
    str | None, input_option("--query", "-q", metavar="TEXT", help="The query that documents are ranked for.")
]
Documents = Annotated[
    list[str] | None, input_option("--document", "-d", metavar="TEXT", help="A document; may be repeated.")
]
DocumentsFile = Annotated[str | None, _of_file("document", "file", _FILE_HELP)]
DocumentsFormat = Annotated[ItemsFormat | None, _of_file("document", "format", _FORMAT_HELP)]
DocumentsField = Annotated[str | None, _of_file("document", "field", _FIELD_HELP)]

RerankAsJson = Annotated[bool, output_option("--json", metavar="", help="One line of JSON, documents best first.")]


def with_request_fields(**tables: Sequence[Field]) -> Callable[[Verb], Verb]:
    """Replaces each named parameter of a verb by the options of a table. The verb gets the values by field name."""
    rows = {row.name: row for table in tables.values() for row in table if row.option is not None}

    def extend(verb: Verb) -> Verb:
        @wraps(verb)
        def run(**given: Any) -> None:
            values = {name: _field_value(row, given.pop(name)) for name, row in rows.items()}
            made = {
                parameter: {row.name: values[row.name] for row in table if row.option is not None}
                for parameter, table in tables.items()
            }
            verb(**given, **made)

        signature = inspect.signature(verb, eval_str=True)
        parameters: list[inspect.Parameter] = []
        added = [_parameter(row) for row in rows.values()]
        for each in signature.parameters.values():
            if each.name in tables:
                parameters += added
                added = []
            else:
                parameters.append(each)
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return extend


def option_names(row: Field) -> tuple[str, ...]:
    """The names of the field's option; none if it has no option."""
    return () if row.option is None else row.option.names or (f"--{row.name.replace('_', '-')}",)


def _parameter(row: Field) -> inspect.Parameter:
    """A flag has no metavar: it takes no value. The help of a choice names its values, which need much room."""
    assert row.option is not None, "only fields with an option are parameters"
    kind = row.kind
    option = typer.Option(
        *option_names(row),
        min=kind.least if isinstance(kind, Count) else None,
        metavar=kind.metavar if row.option.metavar is None else row.option.metavar,
        help=row.option.help or row.about,
        rich_help_panel=row.option.panel,
    )
    default = False if isinstance(kind, Flag) else row.default
    return inspect.Parameter(
        row.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[_option_type(row), option]
    )


def _option_type(row: Field) -> Any:
    assert row.option is not None, "only fields with an option are parameters"
    if row.option.repeats is not None:
        return list[row.option.repeats] | None  # type: ignore[name-defined]
    if isinstance(row.kind, Flag):
        return bool
    if isinstance(row.kind, Choice):
        values = Literal[(*row.kind.values, *row.kind.former)]  # type: ignore[valid-type]
        return values if row.default is not None else values | None
    return int | None if isinstance(row.kind, Count) else str | None


def _field_value(row: Field, given: Any) -> object:
    """The value of the field, None if the option was not given."""
    assert row.option is not None, "only fields with an option are parameters"
    if row.option.turns_off:
        return not given
    if row.option.repeats is not None or (isinstance(row.kind, Flag) and row.default is None):
        return given or None
    return row.kind.former.get(given, given) if isinstance(row.kind, Choice) else given
