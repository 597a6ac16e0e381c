"""`prefixwise score`: one request from the command line, its result as a ranked table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from prefixwise.cli import request_options as option
from prefixwise.cli.engine_options import ENGINE_FLAGS, with_engine_options
from prefixwise.cli.failures import MISUSED, CommandError, print_warning
from prefixwise.cli.output import (
    Column,
    label_name,
    probability,
    render_table,
    say,
    start_of,
    stdout_width,
    write_data,
)
from prefixwise.cli.output_file import OutputFile
from prefixwise.cli.read_inputs import ItemsSource, check_sources, read_query
from prefixwise.cli.run_request import (
    MAX_NAMED,
    ask_server,
    load_time,
    print_debug,
    print_truncated,
    run_request,
    run_summary,
    size_and_time,
)
from prefixwise.cli.server_address import ApiKey, ServerAddress, Timeout, Url, server_address
from prefixwise.contract.errors import MissingParameterError, count
from prefixwise.contract.request import SCORE_FIELDS
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.cli.run_request import Finished
    from prefixwise.contract.request import ScoreMode
    from prefixwise.contract.result import RankedItem, ScoreResult

_ONE_COLUMN_MODES = ("logit_diff", "sigmoid")
_PROBABILITIES = ("softmax", "prob", "sigmoid")


@dataclass(frozen=True)
class ShowOptions:
    """How the result is shown."""

    top: int | None
    as_json: bool
    output: OutputFile | None
    debug: bool
    quiet: bool


@with_engine_options
@option.with_request_fields(fields=SCORE_FIELDS)
def score(
    context: typer.Context,
    query: option.ScoreQuery = None,
    query_file: option.QueryFile = None,
    items: option.Items = None,
    items_file: option.ItemsFile = None,
    items_format: option.ItemsFormatOption = None,
    items_field: option.ItemsField = None,
    *,
    fields: Mapping[str, object],
    top: option.Top = None,
    as_json: option.ScoreAsJson = False,
    output: option.Output = None,
    output_format: option.OutputFormatOption = None,
    debug: option.Debug = False,
    quiet: option.Quiet = False,
    url: Url = None,
    api_key: ApiKey = None,
    timeout_sec: Timeout = 180.0,
    engine: EngineOptions,
) -> None:
    """Score items against a query: how likely is each label after query + item? Best first.

    Text is used as it is: a backslash is a backslash. An example:

    \b
      prefixwise score -q "Review: " -i "I loved it." -i "It broke." \\
        --suffix " Sentiment:" -l " positive" -l " negative" --softmax
    """
    source = ItemsSource("item", items or (), items_file, items_format, items_field)
    check_sources(query, query_file, source)
    server = server_address(context, url, api_key, timeout_sec, ENGINE_FLAGS)
    _check_labels(fields, None if server else engine)
    show = ShowOptions(top, as_json, OutputFile.chosen(output, output_format), debug, quiet)
    body = {"query": read_query(query, query_file), "items": source.read(), **fields}
    _show(_ask(body, server, debug=debug) if server else _finish(body, engine, quiet=quiet), show)


def _check_labels(fields: Mapping[str, object], options: EngineOptions | None) -> None:
    """A classifier needs no labels: its classes are scored. `options` is None if a server knows that."""
    has_labels, has_ids = fields["labels"] is not None, fields["label_token_ids"] is not None
    if has_labels != has_ids or (not has_labels and (options is None or _is_classifier(options))):
        return
    raise _label_error("both", None) if has_labels else _label_error()


def _label_error(got: str = "neither", hint: str | None = 'for example: --label " yes" --label " no"') -> CommandError:
    return CommandError(f"expected --label or --label-token-id, got {got}", hint=hint, status=MISUSED)


def _is_classifier(options: EngineOptions) -> bool:
    if options.model is None:  # the embedded model
        return False
    from prefixwise.models.sources import open_checkpoint

    return open_checkpoint(options.model).config.num_classes > 0  # reads headers only


def _finish(body: dict[str, object], options: EngineOptions, *, quiet: bool) -> Finished[ScoreResult]:
    """The request is checked before the model is loaded, so a mistake is reported at once."""
    from prefixwise.contract.parse import parse_score_request

    request = parse_score_request({**body, "return_debug": True})  # the summary names the chosen algorithm
    return run_request(
        options, request.num_items, lambda engine, on_progress: engine.score(request, on_progress), quiet=quiet
    )


def _ask(body: dict[str, Any], server: ServerAddress, *, debug: bool) -> Finished[ScoreResult]:
    asked = {**body, "return_debug": debug}
    try:
        return ask_server(server, len(body["items"]), lambda client: client.post_score(asked))
    except MissingParameterError as error:
        if error.param == "label_token_ids":
            raise _label_error() from None
        raise


def _show(finished: Finished[ScoreResult], show: ShowOptions) -> None:
    result = finished.result
    if show.output is not None:
        rows = result.to_dicts()
        show.output.write([rows[each.index] for each in result.ranked()[: show.top]])
    if show.as_json:
        write_data(score_json(result if show.debug else replace(result, debug=None), show.top))
    elif show.output is None:
        write_data(score_table(result, show.top, stdout_width()))
    print_item_notes(result)
    if show.debug and not show.as_json:
        print_debug(result.debug)
    if not show.quiet:
        say(summary_line(finished), style="dim")


def score_json(result: ScoreResult, top: int | None) -> str:
    """The body of a `/v1/score` response, and `results`: the items best first, at most `top` of them. One line."""
    ranked = [{"index": each.index, "item": each.item, "scores": each.scores} for each in result.ranked()[:top]]
    return json.dumps({**result.to_json(), "results": ranked}) + "\n"


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
    return [
        Column(
            label_name(name), [_number(item.scores[position], result.score_mode) for item in ranked], align_right=True
        )
        for position, name in enumerate(_column_names(result))
    ]


def _column_names(result: ScoreResult) -> list[str]:
    """The labels; some modes make one number of them all."""
    return [result.score_mode] if result.score_mode in _ONE_COLUMN_MODES else list(result.labels)


def _number(value: float, mode: ScoreMode) -> str:
    return probability(value) if mode in _PROBABILITIES else f"{value:.3f}"


def _item_text(item: RankedItem, width: int) -> str:
    assert isinstance(item.item, str), "the command line sends text"
    return start_of(item.item, width)


def print_item_notes(result: ScoreResult) -> None:
    """Print the warnings, which items were truncated, and which have no score and why."""
    for warning in result.warnings:
        print_warning(warning)
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
    return f"{ran}: {size_and_time(finished, 'item', result.usage)}{load_time(finished)}"
