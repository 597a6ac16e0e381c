"""Plots as SVG text, made of small pieces: a scale turns values into places, the rest draws at places.

Colours, fonts and dashes are left to the style sheet of the page (`report_style`), so that they follow its theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from prefixwise.bench.render.document import Chart
from prefixwise.bench.render.numbers import short_number

Shape = Literal["circle", "square", "cross"]


Point = tuple[float, float]


Tick = tuple[float, str]


_RADIUS = 4.5


@dataclass(frozen=True)
class Frame:
    """The picture, and the rectangle in it where data goes. Narrow, so that its text can be read on a phone."""

    width: float = 420.0
    height: float = 306.0
    left: float = 54.0
    right: float = 406.0
    top: float = 56.0
    bottom: float = 260.0


@dataclass(frozen=True)
class Scale:
    """From a value to a place: `low` is at `start`, `high` at `end`. On a log scale, whose ends are positive, what is
    below `low` lies on it."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = map(math.log2, (low, high, max(value, low)))
        if high == low:  # one value only: in the middle
            return (self.start + self.end) / 2
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that lie in the range, at most so many."""
    if high <= low:
        return [low]
    rough = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """1, 2 and 5 times powers of ten in the range; only the powers where those would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1,)):
        ticks = [round(nice * 10.0**power, 12) for power in powers for nice in steps]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) <= most:
            return ticks
    return ticks[:: -(-len(ticks) // most)]


def tick_label(value: float) -> str:
    """Short: 0, 0.25, 1,500, 20k, 1e-05."""
    if value == 0 or 0.001 <= abs(value) < 10_000:
        return f"{value:,.10g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value / 1000:,.10g}k" if abs(value) >= 10_000 else f"{value:.0e}"


def x_axis(frame: Frame, scale: Scale, ticks: Iterable[Tick], title: str) -> str:
    """The axis below the data."""
    base = frame.bottom
    parts = [f'<path class="axis" d="M{place(frame.left)} {place(base)}H{place(frame.right)}"/>']
    for value, label in ticks:
        x = place(scale(value))
        parts.append(f'<path class="axis" d="M{x} {place(base)}v4"/>{text(x, base + 18, label, "middle")}')
    middle = place((frame.left + frame.right) / 2)
    return "".join(parts) + text(middle, base + 38, title, "middle", "axis-title")


def y_axis(frame: Frame, scale: Scale, ticks: Iterable[Tick], title: str) -> str:
    """To the left of the data, with a line across for each tick; its title lies above it, where it can be read."""
    parts = []
    for value, label in ticks:
        y = scale(value)
        parts.append(f'<path class="grid" d="M{place(frame.left)} {place(y)}H{place(frame.right)}"/>')
        parts.append(text(place(frame.left - 7), y + 4.5, label, "end"))
    return "".join(parts) + text("4", frame.top - 14, title, "start", "axis-title")


def level(frame: Frame, scale: Scale, value: float, label: str, css: str, *, below: bool = False) -> str:
    """A line across at a value, and its name above the left end of it (or below)."""
    y = scale(value)
    line = f'<path class="level {css}" d="M{place(frame.left)} {place(y)}H{place(frame.right)}"/>'
    return line + text(place(frame.left + 4), y + (14 if below else -5), label, "start", f"level-name {css}")


def polyline(points: Sequence[Point], css: str) -> str:
    """Nothing where there are fewer than two points."""
    if len(points) < 2:
        return ""
    return f'<polyline class="line {css}" points="{" ".join(f"{place(x)},{place(y)}" for x, y in points)}"/>'


def marker(shape: Shape, point: Point, css: str, tip: str = "") -> str:
    """One point; `tip` is shown when one points at it."""
    x, y = point
    r = _RADIUS
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    if shape == "circle":
        return f'<circle class="mark {css}" cx="{place(x)}" cy="{place(y)}" r="{r}">{inside}</circle>'
    if shape == "square":
        corner, side = f'x="{place(x - r)}" y="{place(y - r)}"', place(2 * r)
        return f'<rect class="mark {css}" {corner} width="{side}" height="{side}">{inside}</rect>'
    across = f"M{place(x - r)} {place(y - r)}l{2 * r} {2 * r}M{place(x - r)} {place(y + r)}l{2 * r} {-2 * r}"
    return f'<path class="cross {css}" d="{across}">{inside}</path>'


def dots(points: Iterable[Point], css: str) -> str:
    """Many points in one path, which stays small however many they are; nothing where there are none."""
    path = "".join(f"M{place(x)} {place(y)}h0" for x, y in points)
    return f'<path class="dots {css}" d="{path}"/>' if path else ""


def legend(entries: Sequence[tuple[Shape, str, str]], start: float = 10.0) -> str:
    """Along the top: a shape, its class, its name. Widths are guessed from the letters."""
    parts, x = [], start
    for shape, css, name in entries:
        parts.append(marker(shape, (x, 14.0), css) + text(place(x + 10), 18.5, name, "start"))
        x += 28 + 7.2 * len(name)
    return "".join(parts)


def text(x: str, y: float, phrase: str, anchor: Literal["start", "middle", "end"], css: str = "tick") -> str:
    """Text at a place."""
    return f'<text class="{css}" x="{x}" y="{place(y)}" text-anchor="{anchor}">{escape(phrase)}</text>'


def nothing(frame: Frame, phrase: str) -> str:
    """A message in the middle of an empty chart."""
    return text(place((frame.left + frame.right) / 2), (frame.top + frame.bottom) / 2, phrase, "middle", "nothing")


def picture(frame: Frame, name: str, title: str, description: str, body: str) -> str:
    """The whole plot, with its text alternatives. `name` is unique in the page."""
    return (
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" '
        f'aria-labelledby="{escape(name)}-title {escape(name)}-desc">'
        f'<title id="{escape(name)}-title">{escape(title)}</title>'
        f'<desc id="{escape(name)}-desc">{escape(description)}</desc>{body}</svg>'
    )


def place(value: float) -> str:
    """A coordinate, rounded to a tenth."""
    return f"{round(value, 1):g}"


_FRAME = Frame()


def line_chart(
    name: str, title: str, points: Mapping[int, float], *, across: str, up: str, unit: str, caption: str
) -> Chart:
    """One line over at least one point; x on a log scale, y from zero."""
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
    said = [f"{count}: {short_number(points[count])} {unit}" for count in counts]
    for phrase, place in zip(said, places, strict=True):
        body += marker("circle", place, "jax", phrase)
    return Chart(title, picture(_FRAME, name, title, f"By {across}: {', '.join(said)}", body), caption)
