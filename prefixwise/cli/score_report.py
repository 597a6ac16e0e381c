"""The answer of `prefixwise score` as text: a table or JSON for stdout, notes and a summary for stderr."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from prefixwise.cli.report_notes import MAX_NAMED, count, how_much, load_time, tell_cut, tell_warning, what_ran
from prefixwise.cli.text_table import Column, label_name, probability, render_table, start_of

if TYPE_CHECKING:
    from prefixwise.cli.run_request import Finished
    from prefixwise.contract.request import ScoreMode
    from prefixwise.contract.result import RankedItem, ScoreResult

_ONE_COLUMN_MODES = ("logit_diff", "sigmoid")
_PROBABILITIES = ("softmax", "prob", "sigmoid")


def score_json(result: ScoreResult) -> str:
    """The body of a `/v1/score` response, on one line."""
    return json.dumps(result.to_json()) + "\n"


def score_table(result: ScoreResult, top: int | None, width: int) -> str:
    """The items best first, at most `top` of them, their text cut to the width."""
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


def tell_item_notes(result: ScoreResult) -> None:
    """Which items were cut short, and which have no score and why."""
    tell_cut(result.truncated, len(result.scores), "item")
    for error in result.item_errors[:MAX_NAMED]:
        tell_warning(f"no score: {error.message}")
    if len(result.item_errors) > MAX_NAMED:
        others = count(len(result.item_errors) - MAX_NAMED, "more item")
        tell_warning(f"no score for {others}; --json lists them all")


def summary_line(finished: Finished[ScoreResult]) -> str:
    """What ran where, and how long it took."""
    result = finished.result
    ran = what_ran(result.model, finished, result.debug)
    return f"{ran}: {how_much(finished, 'item', result.usage)} {load_time(finished)}"
