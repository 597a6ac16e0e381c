"""Charts over the time of a run, with a mark for every fault and restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.recording import Disruption
from prefixwise.bench.render.document import Chart
from prefixwise.bench.render.numbers import short_number
from prefixwise.bench.render.svg import (
    Frame,
    Point,
    Scale,
    Shape,
    legend,
    linear_ticks,
    log_ticks,
    marker,
    nothing,
    picture,
    polyline,
    tick_label,
    x_axis,
    y_axis,
)

_FRAME = Frame()
_SHAPES: tuple[Shape, ...] = ("circle", "square", "cross")


@dataclass(frozen=True)
class Series:
    """One line, in pieces: none crosses a restart. Points are (seconds, value)."""

    name: str
    css: str  # a class of the report's style: jax (blue), pytorch (orange), mean (grey)
    pieces: Sequence[Sequence[Point]]

    @property
    def points(self) -> list[Point]:
        return [point for piece in self.pieces for point in piece]


@dataclass(frozen=True)
class Plot:
    """What a chart over time shows."""

    name: str
    title: str
    unit: str
    caption: str
    is_log: bool = False


def time_chart(plot: Plot, series: Sequence[Series], disruptions: Sequence[Disruption], seconds: float) -> Chart:
    """The lines; above them a grey circle for each fault that was survived, a red cross for each end of a process."""
    values = [value for each in series for _, value in each.points]
    if not values:
        return Chart(plot.title, picture(_FRAME, plot.name, plot.title, "no data", nothing(_FRAME, "no data")), "")
    low = max(min(values) * 0.8, 0.01) if plot.is_log else 0.0
    high = max(values) * (3.0 if plot.is_log else 1.2) or 1.0
    up = Scale(low, high, _FRAME.bottom, _FRAME.top, log=plot.is_log)
    across = Scale(0.0, seconds / 60, _FRAME.left, _FRAME.right)
    ticks = log_ticks(low, high) if plot.is_log else linear_ticks(0.0, high)
    body = y_axis(_FRAME, up, [(tick, tick_label(tick)) for tick in ticks], plot.unit)
    minutes = [(tick, tick_label(tick)) for tick in linear_ticks(0.0, seconds / 60)]
    body += x_axis(_FRAME, across, minutes, "minutes")
    for each in series:
        for piece in each.pieces:
            body += polyline([(across(time / 60), up(value)) for time, value in piece], each.css)
    body += "".join(_mark(each, across) for each in disruptions)
    entries = [(shape, each.css, each.name) for shape, each in zip(_SHAPES, series, strict=False)]
    body += legend(entries)
    return Chart(plot.title, picture(_FRAME, plot.name, plot.title, _description(series), body), plot.caption)


def _mark(disruption: Disruption, across: Scale) -> str:
    is_end = disruption.is_end
    tip = f"{disruption.kind} at {disruption.begin / 60:.1f} min: {disruption.found}"
    point = (across(disruption.begin / 60), _FRAME.top + 5)
    return marker("cross" if is_end else "circle", point, "bound" if is_end else "failed", tip)


def _description(series: Sequence[Series]) -> str:
    parts = []
    for each in series:
        values = [value for _, value in each.points]
        if values:
            first, most, last = values[0], max(values), values[-1]
            parts.append(
                f"{each.name}: first {short_number(first)}, most {short_number(most)}, last {short_number(last)}"
            )
    return "; ".join(parts)
