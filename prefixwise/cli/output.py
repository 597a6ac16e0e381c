"""Output: `write_data` writes data to stdout, `say` writes messages to stderr; plain tables for both.

rich decides about colour: none where the stream is not a terminal, none with NO_COLOR set. Tables are our own: aligned
columns and a header, readable in a file too. rich's tables take 0.4 ms a row, too slow for tens of thousands of rows.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console

PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended


def write_data(text: str) -> None:
    """Write to stdout and flush. Raises `typer.Exit` if the reader has closed the pipe."""
    try:
        # Line by line: with PYTHONUNBUFFERED one long write that is cut short would look like success.
        sys.stdout.writelines(text.splitlines(keepends=True))
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit: send that to /dev/null, without an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None


def say(line: str, *, style: str = "") -> None:
    """One line on stderr, never wrapped."""
    from rich.text import Text

    open_console(sys.stderr).print(Text(line, style=style))


def styled(line: str, style: str) -> str:
    """The line for stdout: with escape codes on a terminal, unchanged otherwise."""
    from rich.text import Text

    console = open_console(sys.stdout)
    with console.capture() as capture:
        console.print(Text(line, style=style), end="")
    return capture.get()


def open_console(stream: TextIO) -> Console:
    """A console without wrapping, highlighting, or markup in an item's text."""
    from rich.console import Console

    return Console(file=stream, soft_wrap=True, highlight=False, markup=False, emoji=False)


def stdout_width() -> int:
    """Columns of the terminal; without one, COLUMNS or 80."""
    return shutil.get_terminal_size().columns


def on_terminal() -> bool:
    """True if stderr is a terminal, where progress bars may be drawn."""
    return sys.stderr.isatty()


def is_read_by_program() -> bool:
    """True if stdout is no terminal."""
    return not sys.stdout.isatty()


_GAP = "  "
_CUT = "..."
_MIN_WIDTH = 16  # a column never shrinks below this
_UNSEEN = ("Cc", "Cs", "Zl", "Zp")  # control characters, lone surrogates, line and paragraph separators


@dataclass(frozen=True)
class Column:
    """A header and its cells."""

    header: str
    cells: Sequence[str]
    align_right: bool = False
    may_shrink: bool = False  # loses width when the table is wider than the terminal


def render_table(columns: Sequence[Column], width: int) -> str:
    """The table as text that ends with a newline."""
    widths = _fit([_natural_width(column) for column in columns], columns, width)
    header = _line([column.header for column in columns], columns, widths)
    rows = zip(*(column.cells for column in columns), strict=True)
    return "\n".join([styled(header, "bold"), *(_line(row, columns, widths) for row in rows), ""])


def visible(text: str) -> str:
    """The text on one line, with control characters escaped."""
    if text.isprintable():
        return text
    return "".join(_escaped(char) if unicodedata.category(char) in _UNSEEN else char for char in text)


def start_of(text: str, width: int) -> str:
    """The beginning of a long text, for a cell that may shrink: more than a line shows."""
    return visible(text[: 2 * width])


def label_name(label: str) -> str:
    """In quotes if leading or trailing spaces would be invisible."""
    return visible(label if label == label.strip() and label else f'"{label}"')


def probability(value: float) -> str:
    """Four digits after the point; smaller values in scientific notation."""
    return f"{value:.1e}" if 0 < value < 0.0001 else f"{value:.4f}"


def _escaped(char: str) -> str:
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
