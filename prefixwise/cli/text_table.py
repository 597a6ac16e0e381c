"""Plain tables for stdout: aligned columns, a header, nothing else, so that they read well in a file too.

rich's own tables take 0.4 ms a row, which is too slow for the tens of thousands that a request may have.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from prefixwise.cli.output import styled

_GAP = "  "
_CUT = "..."
_MIN_WIDTH = 16  # a column is never shortened below this, however narrow the terminal
_UNSEEN = ("Cc", "Cs", "Zl", "Zp")  # control characters, half pairs, line and paragraph separators


@dataclass(frozen=True)
class Column:
    """A header and its cells."""

    header: str
    cells: Sequence[str]
    align_right: bool = False
    may_shrink: bool = False  # gives up its width when the table is wider than the terminal


def render_table(columns: Sequence[Column], width: int) -> str:
    """The table as text that ends in a line end."""
    widths = _fit([_natural_width(column) for column in columns], columns, width)
    header = _line([column.header for column in columns], columns, widths)
    rows = zip(*(column.cells for column in columns), strict=True)
    return "\n".join([styled(header, "bold"), *(_line(row, columns, widths) for row in rows), ""])


def visible(text: str) -> str:
    """The text on one line: what would move the cursor or colour the terminal is spelled out."""
    if text.isprintable():
        return text
    return "".join(_spelled_out(char) if unicodedata.category(char) in _UNSEEN else char for char in text)


def start_of(text: str, width: int) -> str:
    """More than a line can show, less than a whole document, to be a cell that may shrink."""
    return visible(text[: 2 * width])


def label_name(label: str) -> str:
    """In quotes where its spaces would be lost on the reader."""
    return visible(label if label == label.strip() and label else f'"{label}"')


def probability(value: float) -> str:
    """Four digits after the point, and those that are smaller by their exponent."""
    return f"{value:.1e}" if 0 < value < 0.0001 else f"{value:.4f}"


def _spelled_out(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _natural_width(column: Column) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, [column.header, *column.cells]))


def _fit(natural: list[int], columns: Sequence[Column], width: int) -> list[int]:
    excess = sum(natural) + len(_GAP) * (len(columns) - 1) - width
    return [
        max(own - max(excess, 0), min(own, _MIN_WIDTH)) if column.may_shrink else own
        for own, column in zip(natural, columns, strict=True)
    ]


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    parts = [_cell(cell, column, width) for cell, column, width in zip(cells, columns, widths, strict=True)]
    return _GAP.join(parts).rstrip()


def _cell(text: str, column: Column, width: int) -> str:
    from rich.cells import cell_len, set_cell_size

    own = cell_len(text)
    if own > width:
        return set_cell_size(text, width - len(_CUT)) + _CUT
    padding = " " * (width - own)
    return padding + text if column.align_right else text + padding
