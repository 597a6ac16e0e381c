"""The answer of `itemwise score` as text: a table or JSON for stdout, notes and a summary for stderr."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from itemwise.cli.output import say
from itemwise.cli.text_table import Column, render_table, visible

if TYPE_CHECKING:
    from itemwise.backends.base import BackendInfo
    from itemwise.contract.request import ScoreMode
    from itemwise.contract.result import RankedItem, ScoreResult

_ONE_COLUMN_MODES = ("logit_diff", "sigmoid")
_PROBABILITIES = ("softmax", "prob", "sigmoid")
_MAX_NAMED = 5  # items that a note names; the others are counted


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
    names = [result.score_mode] if one_column else [_label_name(label) for label in result.labels]
    return [
        Column(name, [_number(item.scores[position], result.score_mode) for item in ranked], align_right=True)
        for position, name in enumerate(names)
    ]


def _label_name(label: str) -> str:
    """In quotes where its spaces would be lost on the reader."""
    return visible(label if label == label.strip() and label else f'"{label}"')


def _number(value: float, mode: ScoreMode) -> str:
    if mode not in _PROBABILITIES:
        return f"{value:.3f}"
    return f"{value:.1e}" if 0 < value < 0.0001 else f"{value:.4f}"


def _item_text(item: RankedItem, width: int) -> str:
    assert isinstance(item.item, str), "the command line sends text"
    return visible(item.item[: 2 * width])  # more than a line can show, less than a whole document


def tell_item_notes(result: ScoreResult) -> None:
    """Which items were cut short, and which have no score and why."""
    if result.truncated:
        indices = ", ".join(str(cut.index) for cut in result.truncated[:_MAX_NAMED])
        more = ", ..." if len(result.truncated) > _MAX_NAMED else ""
        kept = result.truncated[0].kept_tokens
        num_cut = f"{len(result.truncated)} of {_count(len(result.scores), 'item')}"
        say(f"warning: {num_cut} cut to {_count(kept, 'token')}: index {indices}{more}", style="yellow")
    for error in result.item_errors[:_MAX_NAMED]:
        say(f"warning: no score: {visible(error.message)}", style="yellow")
    if len(result.item_errors) > _MAX_NAMED:
        others = _count(len(result.item_errors) - _MAX_NAMED, "more item")
        say(f"warning: no score for {others}; --json lists them all", style="yellow")


def tell_debug(result: ScoreResult) -> None:
    """The debug block, one line per key and per batch."""
    for key, value in (result.debug or {}).items():
        if isinstance(value, list):
            for position, entry in enumerate(value):
                say(f"{key}[{position}]: {json.dumps(entry)}")
        else:
            say(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")


def summary_line(result: ScoreResult, backend: BackendInfo, load_seconds: float, score_seconds: float) -> str:
    """What ran where, and how long it took."""
    num_items = _count(len(result.scores), "item")
    num_tokens = _count(result.usage.prompt_tokens, "token")
    algorithm = f", {result.debug['algorithm']}" if result.debug else ""  # no debug: nothing could be scored
    return (
        f"{result.model} with {backend.name} on {backend.device}, {backend.dtype}{algorithm}: "
        f"{num_items}, {num_tokens} in {score_seconds:.2f} s (model loaded in {load_seconds:.1f} s)"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
