"""The charts of a comparison's report: by chunk size, single runs, score differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwise.bench.kinds.base import BACKEND_NAMES, BACKENDS, BackendName, Scores
from prefixwise.bench.kinds.chunk_size_charts import SHAPES, SizePoint, p95_of, size_ticks, throughput_of
from prefixwise.bench.kinds.comparison.inputs import ReportInputs
from prefixwise.bench.kinds.comparison.model import Comparison, PortableRow
from prefixwise.bench.kinds.comparison.verdict import thresholds
from prefixwise.bench.kinds.score_matrix import P95, THROUGHPUT, MatrixRow
from prefixwise.bench.render.document import Chart
from prefixwise.bench.render.numbers import difference, milliseconds, short_number
from prefixwise.bench.render.svg import (
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
from prefixwise.bench.rules import mean, percentile


def size_points(rows: Iterable[PortableRow], backend: BackendName, metric: str) -> list[SizePoint]:
    """The points of one backend by chunk size; sizes that it did not run are left out."""
    points = []
    for row in sorted(rows, key=lambda each: each.client_chunk_size):
        side: Mapping[str, Any] | None = row.jax if backend == "jax" else row.pytorch
        if side is not None:
            reasons = ", ".join(f"{count} x {why}" for why, count in side.get("failure_reason_counts", {}).items())
            complete = side.get("success_rate", 1.0) == 1.0
            points.append(SizePoint(row.client_chunk_size, side.get(metric), complete, reasons))
    return points


def guardrail(comparison: Comparison, backend: BackendName) -> float | None:
    """The p95 up to which a row of this backend may win; None where none is eligible."""
    eligible = []
    for row in comparison.portable_view.rows:
        side: Mapping[str, Any] = (row.jax if backend == "jax" else row.pytorch) or {}
        counts = backend == "pytorch" or row.correctness.passed
        if counts and side.get("success_rate") == 1.0 and side.get(P95) is not None:
            eligible.append(side[P95])
    return comparison.portable_view.guardrail_ratio * min(eligible) if eligible else None


def throughput_chart(comparison: Comparison) -> Chart:
    """Of both backends."""
    rows = comparison.portable_view.rows
    return throughput_of({each: size_points(rows, each, THROUGHPUT) for each in BACKENDS})


def p95_chart(comparison: Comparison) -> Chart:
    """Of both backends."""
    view = comparison.portable_view
    series = {each: size_points(view.rows, each, P95) for each in BACKENDS}
    return p95_of(series, {each: guardrail(comparison, each) for each in BACKENDS}, view.guardrail_ratio)


_LANES = Frame(height=226.0, left=108.0, top=8.0, bottom=180.0)


_MILLISECONDS = "milliseconds for the whole workload"


_PERCENT = "percent above the median"


_ASIDE = (0.0, -14.0, 14.0, -7.0, 7.0)  # runs of about the same time lie beside each other


_BOX = 26.0


def latency_charts(inputs: ReportInputs) -> tuple[Chart, ...]:
    """Single runs on one axis, and around each backend's median; empty without runs."""
    rows = {each: inputs.selected(each) for each in BACKENDS}
    lanes = {each: run_totals(row) for each, row in rows.items() if row is not None}
    lanes = {each: totals for each, totals in lanes.items() if totals}
    if not lanes:
        return ()
    names = {each: f"chunks of {row.client_chunk_size}" for each, row in rows.items() if row is not None}
    phrase = _spread_phrase(lanes)
    length, evenness = "How long single runs took", "How even the runs were"
    return (
        Chart(
            length,
            picture(_LANES, "latency", length, phrase, _lanes(lanes, names, _MILLISECONDS)),
            "One mark per timed run, each backend at its best chunk size. Box: the middle half; bar: the median; "
            "dashed bar: p95. The axis does not begin at zero.",
        ),
        Chart(
            evenness,
            picture(_LANES, "spread", evenness, phrase, _lanes(around_median(lanes), names, _PERCENT)),
            "The same runs, in percent of their own median.",
        ),
    )


def around_median(lanes: Mapping[BackendName, Sequence[float]]) -> dict[BackendName, list[float]]:
    """The deviation of each run from its backend's median, in percent."""
    medians = {each: percentile(totals, 50) for each, totals in lanes.items()}
    return {each: [100 * (total / medians[each] - 1) for total in totals] for each, totals in lanes.items()}


def _lanes(lanes: Mapping[BackendName, Sequence[float]], names: Mapping[BackendName, str], axis: str) -> str:
    every = [value for values in lanes.values() for value in values]
    pad = (max(every) - min(every)) * 0.06 or abs(max(every)) * 0.05 or 1.0
    scale = Scale(min(every) - pad, max(every) + pad, _LANES.left, _LANES.right)
    ticks = [(tick, tick_label(tick)) for tick in linear_ticks(scale.low, scale.high, 5)]
    parts = [x_axis(_LANES, scale, ticks, axis)]
    for index, (each, values) in enumerate(lanes.items()):
        y = _LANES.top + (index + 0.5) / len(lanes) * (_LANES.bottom - _LANES.top)
        parts.append(_lane(each, values, names[each], scale, y, axis))
    return "".join(parts)


def run_totals(row: MatrixRow) -> list[float]:
    """The total times of the runs that worked."""
    return [run.total_e2e_ms for run in row.run_records if run.ok and run.total_e2e_ms is not None]


def _lane(backend: BackendName, values: Sequence[float], name: str, scale: Scale, y: float, axis: str) -> str:
    p25, p50, p75, p95 = (scale(percentile(values, percent)) for percent in (25, 50, 75, 95))
    top = place(y - _BOX)
    parts = [
        text("6", y - 2, BACKEND_NAMES[backend], "start", "lane"),
        text("6", y + 15, name, "start", "tick small"),
        f'<rect class="box {backend}" x="{place(p25)}" y="{top}" width="{place(p75 - p25)}" height="{2 * _BOX:g}"/>',
        f'<path class="median {backend}" d="M{place(p50)} {top}v{2 * _BOX:g}"/>',
        f'<path class="level {backend}" d="M{place(p95)} {top}v{2 * _BOX:g}"/>',
    ]
    for index, value in enumerate(values):
        at = (scale(value), y + _ASIDE[index % len(_ASIDE)])
        tip = f"{BACKEND_NAMES[backend]}, run {index + 1}: {short_number(value)} {axis.partition(' ')[0]}"
        parts.append(marker(SHAPES[backend], at, backend, tip))
    return "".join(parts)


def _spread_phrase(lanes: Mapping[BackendName, Sequence[float]]) -> str:
    return " ".join(
        f"{BACKEND_NAMES[each]}: {len(totals)} runs from {milliseconds(min(totals))} to {milliseconds(max(totals))}, "
        f"median {milliseconds(percentile(totals, 50))}, p95 {milliseconds(percentile(totals, 95))}."
        for each, totals in lanes.items()
    )


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
        """The largest difference over the labels, for each item."""
        pairs = zip(self.jax, self.pytorch, strict=True)
        return [max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs]


def furthest_row(inputs: ReportInputs) -> ScorePair | None:
    """The chunk size whose scores differ most; None where no scores can be compared."""
    jax, pytorch = (inputs.matrix(each, "portable") for each in BACKENDS)
    compared = [row for row in inputs.comparison.portable_view.rows if row.correctness.max_abs_diff is not None]
    for row in sorted(compared, key=lambda each: -(each.correctness.max_abs_diff or 0.0)):
        sides = [None if file is None else file.row(row.client_chunk_size) for file in (jax, pytorch)]
        scores = [side.reference_scores for side in sides if side is not None and side.reference_scores]
        if len(scores) == 2 and [len(each) for each in scores[0]] == [len(each) for each in scores[1]]:
            return ScorePair(f"chunk size {row.client_chunk_size}", scores[0], scores[1])
    return None


def item_chart(inputs: ReportInputs) -> Chart | None:
    """A dot per item; items with equal scores lie on a strip below the scale."""
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
    phrase = (
        f"{len(found)} items: the largest difference is {difference(max(found))}, the mean {difference(mean(found))}; "
        f"{equal} are equal."
    )
    caption = f"One dot per item (its label that is furthest off), {pair.where}: the row that differs most. {phrase}"
    title = f"Score differences by item, {pair.where}"
    return Chart(title, picture(_FRAME, "items", title, phrase, body), caption)


def size_chart(comparison: Comparison) -> Chart | None:
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
    phrase = (
        f"{len(rows)} chunk sizes: the largest difference is {difference(_of(worst, 'largest'))}, at chunk size "
        f"{worst.client_chunk_size}."
    )
    title = "Score differences by chunk size"
    svg = picture(_FRAME, "sizes", title, phrase, "".join(parts) + legend(_SERIES))
    return Chart(title, svg, "Largest and mean difference of all scores of a chunk size, each with its bound.")


def _of(row: PortableRow, css: str) -> float:
    found = row.correctness
    return (found.max_abs_diff if css == "largest" else found.mean_abs_diff) or 0.0


def log_scale(values: Iterable[float]) -> Scale:
    """A scale of whole powers of ten around the nonzero values."""
    positive = [value for value in values if value > _SMALLEST] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive) * 1.5))
    return Scale(10.0**low, 10.0**high, _FRAME.bottom - _ZERO_STRIP, _FRAME.top, log=True)


def height(scale: Scale, value: float) -> float:
    """The y place on the scale, or on the strip for zero below it."""
    return scale(value) if value > _SMALLEST else _ZERO


def _bounds(comparison: Comparison) -> list[float]:
    return [bound for bound in thresholds(comparison) if bound]


def _axes(scale: Scale, comparison: Comparison) -> str:
    """The y axis, with the bounds."""
    ticks = [(tick, f"{tick:g}") for tick in log_ticks(scale.low, scale.high)]
    drawn = y_axis(_FRAME, scale, ticks, "|JAX - PyTorch| (log scale)")
    drawn += text(place(_FRAME.left - 7), _ZERO + 4.5, "0", "end")
    largest, of_mean = thresholds(comparison)
    if largest:
        drawn += level(_FRAME, scale, largest, f"largest at most {largest:g}", "bound")
    if of_mean:
        drawn += level(_FRAME, scale, of_mean, f"mean at most {of_mean:g}", "bound", below=True)
    return drawn
