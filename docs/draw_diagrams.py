"""Draws the diagrams of docs/explanation from data (`make docs`; a test compares).

isolation-scores   what the code of the page prints
isolation-mask     the forward batch of a packed plan
cascade-merge      the numbers of the page's code
cascade-work       the plans of the three algorithms
scheduling-steps   the steps that the step filler makes of four requests
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixwise.engine.request_state import RequestState
from prefixwise.engine.step import Step
from prefixwise.forward.batch import ForwardBatch
from tests.engine.step_runner import STEP, StepRunner, state_of
from tests.plan.planning import planner_of, segments_of

FOLDER = Path(__file__).parent / "explanation"
WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 48, 48  # around the plot
BLUE, ORANGE, GREEN, PINK, GREY = "#2f6db5", "#c8641b", "#3a7d44", "#a8447f", "#6b7280"  # on white: 4.5 to 1
NUM_ITEMS = (1, 10, 100, 500)
QUERY_LEN, ITEM_LEN = 2000, 20


def diagrams() -> dict[str, str]:
    """The SVG files of the folder, by name."""
    return {
        "isolation-scores.svg": isolation_scores(),
        "isolation-mask.svg": isolation_mask(),
        "cascade-merge.svg": cascade_merge(),
        "cascade-work.svg": cascade_work(),
        "scheduling-steps.svg": scheduling_steps(),
    }


# Shapes


def _svg(title: str, shapes: Iterable[str], height: int = HEIGHT) -> str:
    """White below it, so that it can be read in a dark page, too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="sans-serif">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *shapes, "</svg>", ""])


def _rect(x: float, y: float, width: float, height: float, color: str, *, opacity: float = 1.0) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{color}" fill-opacity="{opacity:g}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", color: str = "#1f2937", size: int = 14) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{color}">{escape(text)}</text>'


def _line(points: Iterable[tuple[float, float]], color: str, width: float = 1.0) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'


def _legend(entries: Sequence[tuple[str, str]], y: float = 24) -> list[str]:
    """Names and colors in a row."""
    shapes, x = [], float(LEFT)
    for name, color in entries:
        shapes += [_rect(x, y - 11, 12, 12, color), _text(x + 18, y, name, anchor="start")]
        x += 44 + 7.5 * len(name)
    return shapes


class Axis(NamedTuple):
    """The vertical axis: ticks with their names, and the value at the top."""

    ticks: Sequence[tuple[float, str]]
    top: float

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top

    def shapes(self) -> list[str]:
        right = WIDTH - RIGHT
        lines = [_line([(LEFT, self.y(value)), (right, self.y(value))], "#d1d5db") for value, _ in self.ticks]
        names = [_text(LEFT - 8, self.y(value) + 5, name, anchor="end", color=GREY) for value, name in self.ticks]
        return [*lines, *names]

    def bar(self, x: float, width: float, low: float, high: float, color: str, *, opacity: float = 1.0) -> str:
        return _rect(x, self.y(high), width, self.y(low) - self.y(high), color, opacity=opacity)


def _columns(count: int) -> list[tuple[float, float]]:
    """The left edges and widths of so many columns of the plot."""
    width = (WIDTH - LEFT - RIGHT) / count
    return [(LEFT + number * width, width) for number in range(count)]


# Isolation


def isolation_scores() -> str:
    """Two lines: the score as an item, and at the end of one prompt."""
    page = (FOLDER / "isolation.md").read_text(encoding="utf-8")
    found = re.findall(r"^(\d+) others: item ([\d.]+), .* one prompt ([\d.]+)$", page, re.MULTILINE)
    axis = Axis([(value / 4, f"{value / 4:g}") for value in range(5)], 1.0)
    middles = [left + width / 2 for left, width in _columns(len(found))]
    shapes = axis.shapes() + _legend([("as an item", BLUE), ("at the end of one prompt", ORANGE)])
    for column, color in ((2, ORANGE), (1, BLUE)):
        points = [(x, axis.y(float(row[column]))) for x, row in zip(middles, found, strict=True)]
        shapes += [_line(points, color, 2.5), *(_rect(x - 4, y - 4, 8, 8, color) for x, y in points)]
    shapes += [_text(x, HEIGHT - BOTTOM + 20, row[0]) for x, row in zip(middles, found, strict=True)]
    shapes.append(_text((LEFT + WIDTH) / 2, HEIGHT - 8, "other reviews, all of them friendly", color=GREY))
    return _svg("Score of “positive” for one complaint, by the number of other reviews", shapes)


def visible_pairs(batch: ForwardBatch) -> NDArray[np.int64]:
    """[tokens, tokens]: 1 where the query (first axis) sees a key of its prefix, 2 of its own segment, else 0."""
    pairs = np.zeros((batch.num_tokens, batch.num_tokens), np.int64)
    for segment, (start, stop) in enumerate(pairwise(batch.segment_starts.tolist())):
        source = int(batch.prefix_index[segment])
        if source >= 0:
            first = int(batch.segment_starts[batch.prefixes[source].segment])
            pairs[start:stop, first : first + int(batch.prefix_lens[segment])] = 1
        pairs[start:stop, start:stop] = 2 * np.tri(stop - start, dtype=np.int64)
    return pairs


def packed_batch() -> ForwardBatch:
    """A prefix of 10 tokens and four items, in one packed sequence."""
    step = StepRunner().fill(state_of(10, [4, 6, 3, 5], "packed"))
    assert step is not None
    (forward,) = step.forwards
    return forward.batch_with_prefixes()


def isolation_mask() -> str:
    """One square for each pair of tokens that attend."""
    batch, size, left, top = packed_batch(), 14, 150, 44
    pairs, starts = visible_pairs(batch), batch.segment_starts.tolist()
    shapes = _legend([("sees the prefix", BLUE), ("sees its own tokens", ORANGE)])
    side = size * batch.num_tokens
    shapes.append(f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="none" stroke="#9ca3af"/>')
    for row, column in np.argwhere(pairs).tolist():
        is_prefix = pairs[row, column] == 1 or row < starts[1]
        place = left + size * column + 1, top + size * row + 1
        shapes.append(_rect(*place, size - 2, size - 2, BLUE if is_prefix else ORANGE))
    names = ["prefix", *(f"item {number}" for number in range(len(starts) - 2))]
    for name, (start, stop) in zip(names, pairwise(starts), strict=True):
        middle = size * (start + stop) / 2
        shapes += [_text(left - 8, top + middle + 5, name, anchor="end"), _text(left + middle, top + side + 18, name)]
    shapes.append(_text(left + side / 2, top + side + 40, "key tokens; rows are query tokens", color=GREY))
    return _svg("Attention layout of a packed sequence: a prefix and four items", shapes, top + side + 52)


# Cascade attention


def cascade_merge() -> str:
    """The weights of both parts, and of the merged softmax."""
    page = (FOLDER / "cascade-attention.md").read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert code is not None
    names: dict[str, Any] = {"print": lambda text: None}
    exec(code[1], names)
    logits, split, share = names["logits"], names["num_prefix"], float(names["prefix_share"])
    parts = np.concatenate([np.exp(part - np.logaddexp.reduce(part)) for part in (logits[:split], logits[split:])])
    merged = parts * np.where(np.arange(len(parts)) < split, share, 1 - share)
    axis = Axis([(value / 5, f"{value / 5:g}") for value in range(4)], 0.7)
    shapes = axis.shapes() + _legend([("prefix part", BLUE), ("self part", ORANGE), ("merged", GREEN)])
    for number, (left, width) in enumerate(_columns(len(parts))):
        is_prefix = number < split
        name = f"prefix {number}" if is_prefix else f"own {number - split}"
        shapes += [
            axis.bar(left + 0.15 * width, 0.32 * width, 0, parts[number], BLUE if is_prefix else ORANGE),
            axis.bar(left + 0.53 * width, 0.32 * width, 0, merged[number], GREEN),
            _text(left + width / 2, HEIGHT - BOTTOM + 20, name),
        ]
    text = f"keys; the prefix part counts for {share:.3f} of the merged weights, the self part for {1 - share:.3f}"
    return _svg("Attention weights of two parts, and merged", [*shapes, _text(WIDTH / 2, HEIGHT - 8, text, color=GREY)])


def tokens_of_plans(num_items: int) -> dict[str, int]:
    """Tokens that go through the model, by algorithm."""
    segments, planner = segments_of(QUERY_LEN, [ITEM_LEN] * num_items), planner_of(kind="gpu")
    plans = {name: planner.plan(segments, name) for name in ("serial", "packed", "prefill_extend")}
    return {name: plan.num_unit_tokens + plan.needs_prefill * QUERY_LEN for name, plan in plans.items()}


def cascade_work() -> str:
    """Groups of bars on a logarithmic axis, each with its number."""
    least = 3.0  # the decimal logarithm at the bottom
    axis = Axis([(each - least, f"{10**each:,}") for each in range(3, 7)], 3.5)
    colors = {"serial": GREY, "packed": ORANGE, "prefill_extend": BLUE}
    shapes = axis.shapes() + _legend(list(colors.items()))
    for num_items, (left, width) in zip(NUM_ITEMS, _columns(len(NUM_ITEMS)), strict=True):
        bar = 0.27 * width
        for number, (name, count) in enumerate(tokens_of_plans(num_items).items()):
            x, height = left + 0.1 * width + number * bar, log10(count) - least
            shapes.append(axis.bar(x, 0.9 * bar, 0, height, colors[name]))
            shapes.append(_text(x + 0.45 * bar, axis.y(height) - 4, f"{count:,}", size=10))
        shapes.append(_text(left + width / 2, HEIGHT - BOTTOM + 20, f"{num_items} item{'s' * (num_items > 1)}"))
    text = f"tokens through the model, query of {QUERY_LEN:,} tokens, items of {ITEM_LEN}; logarithmic"
    return _svg("Tokens through the model by algorithm", [*shapes, _text(WIDTH / 2, HEIGHT - 8, text, color=GREY)])


# Scheduling


class StepTokens(NamedTuple):
    """What a request has of a step."""

    of_blocks: int
    of_items: int


def _tokens_of(step: Step, state: RequestState) -> StepTokens:
    blocks = [part for each in step.forwards for part in each.block_parts if part.request is state]
    items = [part for each in step.forwards for part in each.scored_parts if part.request is state]
    return StepTokens(sum(part.num_tokens for part in blocks), sum(part.num_tokens for part in items))


def steps_of_requests() -> list[dict[str, StepTokens]]:
    """For each step, the tokens of every request in it. One is large; the others arrive before steps 3 and 4."""
    large, first, second = state_of(512, [10] * 400), state_of(60, [10] * 12), state_of(60, [10] * 12)
    medium = state_of(256, [10] * 60)
    arrivals = {0: {"large": large}, 2: {"small 1": first, "small 2": second}, 3: {"medium": medium}}
    runner, live, steps = StepRunner(), dict[str, RequestState](), list[dict[str, StepTokens]]()
    while live or not steps:
        live |= arrivals.get(len(steps), {})
        step = runner.run(*live.values())
        steps.append({name: _tokens_of(step, state) for name, state in live.items()})
        live = {name: state for name, state in live.items() if not state.is_launched}
    return steps


def scheduling_steps() -> str:
    """A stack of each step's tokens by request; KV blocks of the prefix are lighter than items."""
    steps = steps_of_requests()
    colors = {"large": BLUE, "small 1": ORANGE, "small 2": PINK, "medium": GREEN}
    axis = Axis([(value, f"{value:,}") for value in range(0, STEP + 1, STEP // 4)], STEP * 1.02)
    shapes = axis.shapes() + _legend([*colors.items(), ("lighter: KV blocks of the prefix", "#d1d5db")])
    for number, (step, (left, width)) in enumerate(zip(steps, _columns(len(steps)), strict=True), start=1):
        low = 0
        for name, tokens in step.items():
            for count, opacity in ((tokens.of_blocks, 0.45), (tokens.of_items, 1.0)):
                if count:
                    x = left + 0.12 * width
                    shapes.append(axis.bar(x, 0.76 * width, low, low + count, colors[name], opacity=opacity))
                low += count
        shapes.append(_text(left + width / 2, HEIGHT - BOTTOM + 20, f"step {number}"))
    text = "tokens of each step; small 1 and 2 arrive before step 3, medium before step 4"
    return _svg("Tokens of each step by request", [*shapes, _text(WIDTH / 2, HEIGHT - 8, text, color=GREY)])


if __name__ == "__main__":
    for file, content in diagrams().items():
        (FOLDER / file).write_text(content, encoding="utf-8")
