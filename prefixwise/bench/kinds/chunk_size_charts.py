"""Charts by chunk size: throughput and p95 latency, of one backend or of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefixwise.bench.kinds.base import BACKEND_NAMES, BackendName
from prefixwise.bench.render.document import Chart
from prefixwise.bench.render.numbers import milliseconds, short_number
from prefixwise.bench.render.svg import (
    Frame,
    Point,
    Scale,
    Shape,
    Tick,
    legend,
    level,
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

SHAPES: Mapping[BackendName, Shape] = {"jax": "circle", "pytorch": "square"}


_FRAME = Frame()


_INSET = 12.0  # between the edge of the data and the first point


_TICK_GAP = 24.0


_SHORTEST_MS = 0.001  # a log scale has no zero


@dataclass(frozen=True)
class SizePoint:
    """One chunk size of one backend; `value` is None where it failed."""

    size: int
    value: float | None
    complete: bool  # all runs worked
    reasons: str


Series = Mapping[BackendName, Sequence[SizePoint]]


def unbroken(points: Sequence[SizePoint]) -> list[list[SizePoint]]:
    """Consecutive sizes that worked: no line crosses a failed one."""
    found: list[list[SizePoint]] = [[]]
    for point in points:
        if point.value is None:
            found.append([])
        else:
            found[-1].append(point)
    return [run for run in found if run]


def throughput_of(series: Series) -> Chart:
    """Throughput by chunk size, on a scale from zero."""
    values = _values(series)
    title = "Throughput by chunk size"
    caption = "Items scored per second, all runs of a chunk size; higher is better."
    if not values:
        return _empty("throughput", title, caption)
    high = max(values) * 1.05
    scale = Scale(0.0, high, _FRAME.bottom, _FRAME.top)
    ticks = [(tick, tick_label(tick)) for tick in linear_ticks(0.0, high)]
    body = y_axis(_FRAME, scale, ticks, "items per second") + _draw(series, scale, "items/s")
    drawn = picture(_FRAME, "throughput", title, _peaks(series), body)
    return Chart(title, drawn, caption + _marks_phrase(series))


def p95_of(series: Series, rails: Mapping[BackendName, float | None], ratio: float) -> Chart:
    """p95 by chunk size, on a log scale: values span a factor of a hundred. `ratio`: of the guardrails."""
    values = _values(series)
    title = "p95 latency by chunk size"
    caption = "Time for the whole workload, 95th percentile, log scale; lower is better."
    if not values:
        return _empty("p95", title, caption)
    caption += _rails_phrase(ratio, rails)
    known = [rail for rail in rails.values() if rail is not None]
    low = max(min([*values, *known]) * 0.7, _SHORTEST_MS)
    high = max(max([*values, *known]) * 1.4, low)
    scale = Scale(low, high, _FRAME.bottom, _FRAME.top, log=True)
    ticks = [(tick, tick_label(tick)) for tick in log_ticks(low, high)]
    body = y_axis(_FRAME, scale, ticks, "milliseconds (log scale)") + _draw_rails(scale, rails)
    body += _draw(series, scale, "ms")
    drawn = picture(_FRAME, "p95", title, _lowest(series, rails), body)
    return Chart(title, drawn, caption + _marks_phrase(series))


def _rails_phrase(ratio: float, rails: Mapping[BackendName, float | None]) -> str:
    """The caption of the guardrails; empty without any."""
    if all(rail is None for rail in rails.values()):
        return ""
    return f" Dashed: the guardrail, {ratio:g} x the best p95 of the backend. A row above it cannot win."


def _draw_rails(scale: Scale, rails: Mapping[BackendName, float | None]) -> str:
    """Label the higher guardrail above its line and the lower one below, so that labels never overlap."""
    ordered = sorted((value, each) for each, value in rails.items() if value is not None)
    return "".join(
        level(_FRAME, scale, value, f"{BACKEND_NAMES[each]} guardrail", each, below=place == 0 and len(ordered) > 1)
        for place, (value, each) in enumerate(ordered)
    )


def _draw(series: Series, scale: Scale, unit: str) -> str:
    sizes = sorted({point.size for points in series.values() for point in points})
    across = Scale(sizes[0], sizes[-1], _FRAME.left + _INSET, _FRAME.right - _INSET, log=True)
    parts = [x_axis(_FRAME, across, size_ticks(sizes, across), "items in one call (log2 scale)")]
    entries: list[tuple[Shape, str, str]] = [(SHAPES[each], each, BACKEND_NAMES[each]) for each in series]
    if any(point.value is None for points in series.values() for point in points):
        entries.append(("cross", "failed", "failed"))
    for each, points in series.items():
        for run in unbroken(points):
            parts.append(polyline([_at(across, scale, point) for point in run], each))
        parts += [_mark(each, point, across, scale, unit) for point in points]
    return "".join(parts) + legend(entries)


def size_ticks(sizes: Sequence[int], scale: Scale) -> list[Tick]:
    """Ticks whose labels do not overlap: 256 and 500 fit, 500 and 512 do not."""
    ticks: list[Tick] = []
    for size in sizes:
        if not ticks or scale(size) - scale(ticks[-1][0]) >= _TICK_GAP:
            ticks.append((size, str(size)))
    return ticks


def _mark(backend: BackendName, point: SizePoint, across: Scale, scale: Scale, unit: str) -> str:
    where = f"{BACKEND_NAMES[backend]}, chunk size {point.size}"
    if point.value is None:
        aside = -5.0 if backend == "jax" else 5.0  # both may have failed
        at = (across(point.size) + aside, _FRAME.bottom - 8)
        return marker("cross", at, f"failed {backend}", f"{where}: failed {point.reasons}".strip())
    css = backend if point.complete else f"{backend} hollow"
    some = "" if point.complete else f"; some runs failed: {point.reasons}"
    return marker(SHAPES[backend], _at(across, scale, point), css, f"{where}: {short_number(point.value)} {unit}{some}")


def _at(across: Scale, scale: Scale, point: SizePoint) -> Point:
    return across(point.size), scale(point.value or 0.0)


def _values(series: Series) -> list[float]:
    return [point.value for points in series.values() for point in points if point.value is not None]


def _empty(name: str, title: str, caption: str) -> Chart:
    phrase = "no chunk size worked"
    return Chart(title, picture(_FRAME, name, title, f"Nothing to show: {phrase}.", nothing(_FRAME, phrase)), caption)


def _peaks(series: Series) -> str:
    """The text alternative of the chart."""
    parts = []
    for each, points in series.items():
        good = [(point.value, point.size) for point in points if point.value is not None]
        best = (
            f"highest at chunk size {max(good)[1]}, {short_number(max(good)[0])} items/s"
            if good
            else "failed everywhere"
        )
        parts.append(f"{BACKEND_NAMES[each]}: {best}.")
    return " ".join([*parts, "The table below has every value."])


def _lowest(series: Series, rails: Mapping[BackendName, float | None]) -> str:
    parts = []
    for each, points in series.items():
        good = [(point.value, point.size) for point in points if point.value is not None]
        best = f"lowest at chunk size {min(good)[1]}, {milliseconds(min(good)[0])}" if good else "failed everywhere"
        rail = "" if rails[each] is None else f"; guardrail {milliseconds(rails[each])}"
        parts.append(f"{BACKEND_NAMES[each]}: {best}{rail}.")
    return " ".join([*parts, "The table below has every value."])


def _marks_phrase(series: Series) -> str:
    points = [point for each in series.values() for point in each]
    phrase = " Crosses: no run worked." if any(point.value is None for point in points) else ""
    partial = any(point.value is not None and not point.complete for point in points)
    return phrase + (" Hollow: some runs failed." if partial else "")
