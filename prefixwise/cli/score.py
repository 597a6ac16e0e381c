"""`prefixwise score`: one request from the command line, its result as a ranked table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefixwise.cli import request_options as option
from prefixwise.cli.engine_options import with_engine_options
from prefixwise.cli.failures import MISUSED, CommandError, print_warning
from prefixwise.cli.output import Column, label_name, probability, render_table, say, start_of, stdout_width, write_data
from prefixwise.cli.read_inputs import check_sources, read_items, read_query
from prefixwise.cli.run_request import (
    MAX_NAMED,
    count,
    load_time,
    print_debug,
    print_truncated,
    run_request,
    run_summary,
    size_and_time,
)
from prefixwise.contract.request import SCORE_FIELDS
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.cli.run_request import Finished
    from prefixwise.contract.request import ScoreMode, ScoreRequest
    from prefixwise.contract.result import RankedItem, ScoreResult
    from prefixwise.engine.engine import OnProgress, ScoringEngine

_ONE_COLUMN_MODES = ("logit_diff", "sigmoid")
_PROBABILITIES = ("softmax", "prob", "sigmoid")


@dataclass(frozen=True)
class ShowOptions:
    """How the result is shown."""

    top: int | None
    as_json: bool
    debug: bool
    quiet: bool


@with_engine_options
@option.with_request_fields(fields=SCORE_FIELDS)
def score(
    query: option.ScoreQuery = None,
    query_file: option.QueryFile = None,
    items: option.Items = None,
    items_file: option.ItemsFile = None,
    items_format: option.ItemsFormatOption = None,
    *,
    fields: Mapping[str, object],
    top: option.Top = None,
    as_json: option.ScoreAsJson = False,
    debug: option.Debug = False,
    quiet: option.Quiet = False,
    engine: EngineOptions,
) -> None:
    """Score items against a query: how likely is each label after query + item? Best first.

    Text is used as it is: a backslash is a backslash.
    """
    check_sources(query, query_file, items or (), items_file, items_format)
    _check_labels(fields, engine)
    if as_json and top is not None:
        raise CommandError("--top is for the table: expected it without --json", status=MISUSED)
    # The request is checked before the model is loaded, so a mistake is reported at once.
    from prefixwise.contract.parse import parse_score_request

    request = parse_score_request(
        {
            "query": read_query(query, query_file),
            "items": read_items(items or (), items_file, items_format),
            **fields,
            "return_debug": True,  # the summary names the chosen algorithm
        }
    )
    _run(request, engine, ShowOptions(top, as_json, debug, quiet))


def _check_labels(fields: Mapping[str, object], options: EngineOptions) -> None:
    """A classifier needs no labels: its classes are scored."""
    has_labels, has_ids = fields["labels"] is not None, fields["label_token_ids"] is not None
    if has_labels != has_ids or (not has_labels and _is_classifier(options)):
        return
    got, hint = ("both", None) if has_labels else ("neither", 'for example: --label " yes" --label " no"')
    raise CommandError(f"expected --label or --label-token-id, got {got}", hint=hint, status=MISUSED)


def _is_classifier(options: EngineOptions) -> bool:
    if options.model is None:  # the embedded model
        return False
    from prefixwise.models.sources import open_checkpoint

    return open_checkpoint(options.model).config.num_classes > 0  # reads headers only


def _run(request: ScoreRequest, options: EngineOptions, show: ShowOptions) -> None:
    def run(engine: ScoringEngine, on_progress: OnProgress | None) -> ScoreResult:
        return engine.score(request, on_progress)

    finished = run_request(options, request.num_items, run, quiet=show.quiet)
    result = finished.result
    if show.as_json:
        write_data(score_json(result if show.debug else replace(result, debug=None)))
    else:
        write_data(score_table(result, show.top, stdout_width()))
    print_item_notes(result)
    if show.debug and not show.as_json:
        print_debug(result.debug)
    if not show.quiet:
        say(summary_line(finished), style="dim")


def score_json(result: ScoreResult) -> str:
    """The body of a `/v1/score` response, on one line."""
    return json.dumps(result.to_json()) + "\n"


def score_table(result: ScoreResult, top: int | None, width: int) -> str:
    """The items, best first, at most `top` of them, their text cut to the width."""
    ranked = result.ranked()[:top]
    ranks = Column("rank", [str(rank) for rank in range(1, len(ranked) + 1)], align_right=True)
    texts = [_item_text(item, width) for item in ranked]
    indices = [str(item.index) for item in ranked]
    columns = [
        ranks,
        *_score_columns(result, ranked),
        Column("item", texts, may_shrink=True),
        Column("index", indices, align_right=True),
    ]
    return render_table(columns, width)


def _score_columns(result: ScoreResult, ranked: list[RankedItem]) -> list[Column]:
    one_column = result.score_mode in _ONE_COLUMN_MODES
    names = [result.score_mode] if one_column else [label_name(label) for label in result.labels]
    return [
        Column(name, [_number(item.scores[position], result.score_mode) for item in ranked], align_right=True)
        for position, name in enumerate(names)
    ]


def _number(value: float, mode: ScoreMode) -> str:
    return probability(value) if mode in _PROBABILITIES else f"{value:.3f}"


def _item_text(item: RankedItem, width: int) -> str:
    assert isinstance(item.item, str), "the command line sends text"
    return start_of(item.item, width)


def print_item_notes(result: ScoreResult) -> None:
    """Print which items were truncated, and which have no score and why."""
    print_truncated(result.truncated, len(result.scores), "item")
    for error in result.item_errors[:MAX_NAMED]:
        print_warning(f"no score: {error.message}")
    if len(result.item_errors) > MAX_NAMED:
        others = count(len(result.item_errors) - MAX_NAMED, "more item")
        print_warning(f"no score for {others}; --json lists them all")


def summary_line(finished: Finished[ScoreResult]) -> str:
    """Model, device, algorithm, and times."""
    result = finished.result
    ran = run_summary(result.model, finished, result.debug)
    return f"{ran}: {size_and_time(finished, 'item', result.usage)} {load_time(finished)}"
