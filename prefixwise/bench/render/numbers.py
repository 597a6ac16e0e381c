"""Numbers for people. A dash where there is none."""

from __future__ import annotations

from prefixwise.bench.render.document import NONE

_NO_DIFFERENCE = 0.05  # percent: less is shown as 0.0


def short_number(value: float | None) -> str:
    """About four digits: 12,346 or 123.5 or 1.23 or 0.0012."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.2g}"


def milliseconds(value: float | None) -> str:
    """With its unit; in seconds from 10 s on."""
    if value is None:
        return NONE
    return f"{value / 1000:,.1f} s" if value >= 10_000 else f"{short_number(value)} ms"


def percent(value: float | None) -> str:
    """A change, with its sign."""
    if value is None:
        return NONE
    return "0.0%" if abs(value) < _NO_DIFFERENCE else f"{value:+,.1f}%"


def share(part: int, whole: int) -> str:
    """Two counts and their ratio."""
    return f"{part} of {whole} ({part / whole:.1%})" if whole else f"{part} of {whole}"


def difference(value: float | None) -> str:
    """A score difference: small ones with an exponent, an exact zero as 0."""
    if value is None:
        return NONE
    return "0" if value == 0 else f"{value:.1e}" if value < 0.001 else f"{value:.4f}"


def ratio(value: float | None) -> str:
    """A factor, like 2.50x."""
    return NONE if value is None else f"{value:.2f}x"


def change_percent(value: float | None, base: float | None) -> float | None:
    """From `base` to `value`; None where either is missing or there is nothing to compare with."""
    return None if value is None or not base else 100 * (value - base) / base
