"""Rows and peers as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.text_rows import aligned

_HEADINGS = ("case", "median", "lowest - highest", "goal", "met", "")
_LEFT = (0, 5)  # columns of words
_MET = {True: "yes", False: "NO", None: "-"}


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each, under headings; every column as wide as its widest cell."""
    return aligned([_HEADINGS, *(_cells(row) for row in rows)], left=_LEFT)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    unit = row["unit"]
    bound = "-" if row["goal"] is None else f"{'<=' if row['at_most'] else '>='} {amount(row['goal'], unit)}"
    spread = f"{amount(row['lowest'], unit)} - {amount(row['highest'], unit)}"
    return (
        f"{row['name']}: {row['title']}",
        amount(row["measured"], unit),
        spread,
        bound,
        _MET[row["met"]],
        row["note"],
    )


def amount(value: float, unit: str) -> str:
    """A share as a percentage; a ratio and seconds with two digits."""
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:.2f} {unit}"


def peer_line(name: str, found: Mapping[str, Any]) -> str:
    """Its versions and settings, and what its search has tried."""
    parts = [
        ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in found[part].items())
        for part in ("versions", "settings")
    ]
    tried = [
        f"{key.replace('_', ' ')}: " + ", ".join(f"{setting} -> {rate:g}" for setting, rate in rates.items())
        for key, rates in found.items()
        if key not in ("versions", "settings")
    ]
    return f"{name}: " + "; ".join([*parts, *tried])
