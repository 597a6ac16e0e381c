"""The plots of single runs: how long each run of the best chunk size took, and how even they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefixwise.bench.artifacts import BackendName, MatrixRow
from prefixwise.bench.report.document import Figure
from prefixwise.bench.report.figures import SHAPES
from prefixwise.bench.report.inputs import BACKEND_NAMES, BACKENDS, ReportInputs
from prefixwise.bench.report.numbers import figure, milliseconds
from prefixwise.bench.report.svg_plots import (
    Frame,
    Scale,
    linear_ticks,
    marker,
    picture,
    place,
    text,
    tick_label,
    x_axis,
)
from prefixwise.bench.rules import percentile

_LANES = Frame(height=226.0, left=108.0, top=8.0, bottom=180.0)
_MILLISECONDS = "milliseconds for the whole workload"
_PERCENT = "percent above the median"
_ASIDE = (0.0, -14.0, 14.0, -7.0, 7.0)  # runs of about the same time lie beside each other
_BOX = 26.0


def latency_figures(inputs: ReportInputs) -> tuple[Figure, ...]:
    """On one axis, and each around its own median; nothing where no run of either backend is known."""
    rows = {each: inputs.selected(each) for each in BACKENDS}
    lanes = {each: run_totals(row) for each, row in rows.items() if row is not None}
    lanes = {each: totals for each, totals in lanes.items() if totals}
    if not lanes:
        return ()
    names = {each: f"chunks of {row.client_chunk_size}" for each, row in rows.items() if row is not None}
    words = _spread_in_words(lanes)
    length, evenness = "How long single runs took", "How even the runs were"
    return (
        Figure(
            length,
            picture(_LANES, "latency", length, words, _lanes(lanes, names, _MILLISECONDS)),
            "One mark per timed run, each backend at its best chunk size. Box: the middle half; bar: the median; "
            "dashed bar: p95. The axis does not begin at zero.",
        ),
        Figure(
            evenness,
            picture(_LANES, "spread", evenness, words, _lanes(around_median(lanes), names, _PERCENT)),
            "The same runs, in percent of their own median.",
        ),
    )


def around_median(lanes: Mapping[BackendName, Sequence[float]]) -> dict[BackendName, list[float]]:
    """Each in percent of the median of its own backend, less 100."""
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
    """Of the runs that worked."""
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
        tip = f"{BACKEND_NAMES[backend]}, run {index + 1}: {figure(value)} {axis.partition(' ')[0]}"
        parts.append(marker(SHAPES[backend], at, backend, tip))
    return "".join(parts)


def _spread_in_words(lanes: Mapping[BackendName, Sequence[float]]) -> str:
    return " ".join(
        f"{BACKEND_NAMES[each]}: {len(totals)} runs from {milliseconds(min(totals))} to {milliseconds(max(totals))}, "
        f"median {milliseconds(percentile(totals, 50))}, p95 {milliseconds(percentile(totals, 95))}."
        for each, totals in lanes.items()
    )
