"""A figure of one line: what was measured by a number that was chosen."""

from __future__ import annotations

from collections.abc import Mapping

from prefixwise.bench.report.document import Figure
from prefixwise.bench.report.numbers import figure
from prefixwise.bench.report.svg_plots import (
    Frame,
    Scale,
    linear_ticks,
    marker,
    picture,
    polyline,
    tick_label,
    x_axis,
    y_axis,
)

_FRAME = Frame()


def line_figure(
    name: str, title: str, points: Mapping[int, float], *, across: str, up: str, unit: str, caption: str
) -> Figure:
    """`points`: at least one. Across on a log scale, as such numbers are doubled; up from zero."""
    counts = sorted(points)
    high = max(points.values()) * 1.05
    is_log = counts[0] > 0
    x_scale = Scale(counts[0], counts[-1], _FRAME.left + 12, _FRAME.right - 12, log=is_log)
    y_scale = Scale(0.0, high, _FRAME.bottom, _FRAME.top)
    body = y_axis(_FRAME, y_scale, [(tick, tick_label(tick)) for tick in linear_ticks(0.0, high)], up)
    x_title = f"{across} (log scale)" if is_log else across
    body += x_axis(_FRAME, x_scale, [(count, str(count)) for count in counts], x_title)
    places = [(x_scale(count), y_scale(points[count])) for count in counts]
    body += polyline(places, "jax")
    said = [f"{count}: {figure(points[count])} {unit}" for count in counts]
    for words, place in zip(said, places, strict=True):
        body += marker("circle", place, "jax", words)
    return Figure(title, picture(_FRAME, name, title, f"By {across}: {', '.join(said)}", body), caption)
