"""`prefixwise score`: one request from the command line, its answer as a ranked table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefixwise.cli import common_options as common
from prefixwise.cli import score_options as option
from prefixwise.cli.engine_options import with_engine_options
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say, stdout_width, write_data
from prefixwise.cli.read_inputs import check_sources, read_items, read_query
from prefixwise.cli.report_notes import tell_debug
from prefixwise.cli.run_request import run_request
from prefixwise.cli.score_report import score_json, score_table, summary_line, tell_item_notes
from prefixwise.launch.options import EngineOptions

if TYPE_CHECKING:
    from prefixwise.contract.request import ScoreRequest
    from prefixwise.contract.result import ScoreResult
    from prefixwise.engine.engine import OnProgress, ScoringEngine


@dataclass(frozen=True)
class ShowOptions:
    """How the answer is shown."""

    top: int | None
    as_json: bool
    debug: bool
    quiet: bool


@with_engine_options
def score(
    query: option.Query = None,
    query_file: common.QueryFile = None,
    items: option.Items = None,
    items_file: option.ItemsFile = None,
    items_format: option.ItemsFormatOption = None,
    labels: option.Labels = None,
    label_token_ids: option.LabelTokenIds = None,
    suffix: option.Suffix = None,
    softmax: option.Softmax = False,
    score_mode: option.ScoreModeOption = None,
    label_scoring: option.LabelScoringOption = "single",
    tokenization: option.TokenizationOption = "apart",
    item_first: option.ItemFirst = False,
    max_tokens_per_item: option.MaxTokensPerItem = None,
    algorithm: common.AlgorithmOption = "auto",
    on_item_error: option.OnItemErrorOption = "fail",
    top: option.Top = None,
    as_json: option.AsJson = False,
    debug: common.Debug = False,
    quiet: common.Quiet = False,
    *,
    engine: EngineOptions,
) -> None:
    """Score items against a query: how likely is each label after query + item? Best first.

    All text is taken as it is: a backslash is a backslash.
    """
    check_sources(query, query_file, items or (), items_file, items_format)
    _check_labels(labels or (), label_token_ids or ())
    if as_json and top is not None:
        raise CommandError("--top is for the table: expected it without --json", status=MISUSED)
    # The request is judged before the model is loaded: a mistake should not cost the wait.
    from prefixwise.contract.parse import parse_score_request

    request = parse_score_request(
        {
            "query": read_query(query, query_file),
            "items": read_items(items or (), items_file, items_format),
            "labels": labels or None,
            "label_token_ids": label_token_ids or None,
            "suffix": suffix,
            "apply_softmax": softmax or None,
            "score_mode": score_mode,
            "label_scoring": label_scoring,
            "tokenization": tokenization,
            "item_first": item_first,
            "max_tokens_per_item": max_tokens_per_item,
            "algorithm": algorithm,
            "on_item_error": on_item_error,
            "return_debug": True,  # the summary names the algorithm that was chosen
        }
    )
    _answer(request, engine, ShowOptions(top, as_json, debug, quiet))


def _check_labels(labels: Sequence[str], label_token_ids: Sequence[int]) -> None:
    if bool(labels) != bool(label_token_ids):
        return
    got, hint = ("both", None) if labels else ("neither", 'for example: --label " yes" --label " no"')
    raise CommandError(f"expected --label or --label-token-id, got {got}", hint=hint, status=MISUSED)


def _answer(request: ScoreRequest, options: EngineOptions, show: ShowOptions) -> None:
    def run(engine: ScoringEngine, on_progress: OnProgress | None) -> ScoreResult:
        return engine.score(request, on_progress)

    finished = run_request(options, request.num_items, run, quiet=show.quiet)
    result = finished.result
    if show.as_json:
        write_data(score_json(result if show.debug else replace(result, debug=None)))
    else:
        write_data(score_table(result, show.top, stdout_width()))
    tell_item_notes(result)
    if show.debug and not show.as_json:
        tell_debug(result.debug)
    if not show.quiet:
        say(summary_line(finished), style="dim")
