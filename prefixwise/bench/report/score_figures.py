"""The plots of scores: how far JAX's are from PyTorch's, item by item and chunk size by chunk size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prefixwise.bench.artifacts import Comparison, PortableRow, Scores
from prefixwise.bench.report.agreement import thresholds
from prefixwise.bench.report.document import Figure
from prefixwise.bench.report.figures import size_ticks
from prefixwise.bench.report.inputs import BACKENDS, ReportInputs
from prefixwise.bench.report.numbers import difference
from prefixwise.bench.report.svg_plots import (
    Frame,
    Scale,
    Shape,
    dots,
    legend,
    level,
    linear_ticks,
    log_ticks,
    marker,
    picture,
    place,
    polyline,
    text,
    tick_label,
    x_axis,
    y_axis,
)
from prefixwise.bench.rules import mean

_FRAME = Frame(left=62.0)
_ZERO_STRIP = 24.0  # below the log scale, which has no zero
_ZERO = _FRAME.bottom - 5
_SMALLEST = 1e-12
_SERIES: tuple[tuple[Shape, str, str], ...] = (("circle", "largest", "largest"), ("square", "mean", "mean"))


@dataclass(frozen=True)
class ScorePair:
    """Both backends' scores of one row."""

    where: str
    jax: Scores
    pytorch: Scores

    def item_differences(self) -> list[float]:
        """For each item the label that is furthest off."""
        pairs = zip(self.jax, self.pytorch, strict=True)
        return [max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs]


def furthest_row(inputs: ReportInputs) -> ScorePair | None:
    """The chunk size whose scores differ most: if its are good, all are. None where no scores can be compared."""
    jax, pytorch = (inputs.matrix(each, "portable") for each in BACKENDS)
    compared = [row for row in inputs.comparison.portable_view.rows if row.correctness.max_abs_diff is not None]
    for row in sorted(compared, key=lambda each: -(each.correctness.max_abs_diff or 0.0)):
        sides = [None if file is None else file.row(row.client_chunk_size) for file in (jax, pytorch)]
        scores = [side.reference_scores for side in sides if side is not None and side.reference_scores]
        if len(scores) == 2 and [len(each) for each in scores[0]] == [len(each) for each in scores[1]]:
            return ScorePair(f"chunk size {row.client_chunk_size}", scores[0], scores[1])
    return None


def item_figure(inputs: ReportInputs) -> Figure | None:
    """A dot for each item; those that are equal to the last bit lie on a strip below the scale."""
    pair = furthest_row(inputs)
    if pair is None:
        return None
    found = pair.item_differences()
    scale = log_scale([*found, *_bounds(inputs.comparison)])
    across = Scale(1, max(len(found), 2), _FRAME.left + 6, _FRAME.right - 6)
    ticks = [(tick, tick_label(tick)) for tick in linear_ticks(1, max(len(found), 2)) if tick == int(tick)]
    points = [(across(index), height(scale, value)) for index, value in enumerate(found, 1)]
    # The dots come last: no name of a line hides one.
    body = _axes(scale, inputs.comparison) + x_axis(_FRAME, across, ticks, "item") + dots(points, "difference")
    equal = sum(value <= _SMALLEST for value in found)
    words = (
        f"{len(found)} items: the largest difference is {difference(max(found))}, the mean {difference(mean(found))}; "
        f"{equal} are equal."
    )
    caption = f"One dot per item (its label that is furthest off), {pair.where}: the row that differs most. {words}"
    title = f"Score differences by item, {pair.where}"
    return Figure(title, picture(_FRAME, "items", title, words, body), caption)


def size_figure(comparison: Comparison) -> Figure | None:
    """The largest and the mean difference of each chunk size; None where nothing was compared."""
    every = sorted(comparison.portable_view.rows, key=lambda row: row.client_chunk_size)
    rows = [row for row in every if row.correctness.max_abs_diff is not None]
    if not rows:
        return None
    found = {css: [_of(row, css) for row in rows] for _, css, _ in _SERIES}
    scale = log_scale([*found["largest"], *found["mean"], *_bounds(comparison)])
    sizes = [row.client_chunk_size for row in rows]
    across = Scale(sizes[0], sizes[-1], _FRAME.left + 12, _FRAME.right - 12, log=True)
    parts = [
        _axes(scale, comparison),
        x_axis(_FRAME, across, size_ticks(sizes, across), "items in one call (log2 scale)"),
    ]
    for shape, css, name in _SERIES:
        points = [(across(size), height(scale, value)) for size, value in zip(sizes, found[css], strict=True)]
        parts.append(polyline(points, css))
        for size, value, point in zip(sizes, found[css], points, strict=True):
            parts.append(marker(shape, point, css, f"chunk size {size}: {name} {difference(value)}"))
    worst = max(rows, key=lambda row: _of(row, "largest"))
    words = (
        f"{len(rows)} chunk sizes: the largest difference is {difference(_of(worst, 'largest'))}, at chunk size "
        f"{worst.client_chunk_size}."
    )
    title = "Score differences by chunk size"
    svg = picture(_FRAME, "sizes", title, words, "".join(parts) + legend(_SERIES))
    return Figure(title, svg, "Largest and mean difference of all scores of a chunk size, each with its bound.")


def _of(row: PortableRow, css: str) -> float:
    found = row.correctness
    return (found.max_abs_diff if css == "largest" else found.mean_abs_diff) or 0.0


def log_scale(values: Iterable[float]) -> Scale:
    """Whole powers of ten around those that are not zero."""
    positive = [value for value in values if value > _SMALLEST] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive) * 1.5))
    return Scale(10.0**low, 10.0**high, _FRAME.bottom - _ZERO_STRIP, _FRAME.top, log=True)


def height(scale: Scale, value: float) -> float:
    """On the scale, or on the strip below it."""
    return scale(value) if value > _SMALLEST else _ZERO


def _bounds(comparison: Comparison) -> list[float]:
    return [bound for bound in thresholds(comparison) if bound]


def _axes(scale: Scale, comparison: Comparison) -> str:
    """With the bounds."""
    ticks = [(tick, f"{tick:g}") for tick in log_ticks(scale.low, scale.high)]
    drawn = y_axis(_FRAME, scale, ticks, "|JAX - PyTorch| (log scale)")
    drawn += text(place(_FRAME.left - 7), _ZERO + 4.5, "0", "end")
    largest, of_mean = thresholds(comparison)
    if largest:
        drawn += level(_FRAME, scale, largest, f"largest at most {largest:g}", "bound")
    if of_mean:
        drawn += level(_FRAME, scale, of_mean, f"mean at most {of_mean:g}", "bound", below=True)
    return drawn
