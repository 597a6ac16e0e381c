"""A report before it is Markdown or HTML: sections of paragraphs, lists, tables, code and metrics.

What a report says is decided once; the two renderers only decide how it looks. Markdown leaves metrics out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["plain", "code", "good", "bad", "open"]


NONE = "-"


@dataclass(frozen=True)
class Cell:
    """`code` is verbatim text; `good` and `bad` are judgements, `open` is an open one."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list in which order has no meaning."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The first column names the row; `numeric` ones after it are aligned to the right."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    numeric: bool = True


@dataclass(frozen=True)
class Code:
    """Commands, to be copied."""

    text: str


@dataclass(frozen=True)
class Chart:
    """`svg` has a hidden title and description; the caption explains the chart."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Charts:
    """Side by side where there is room."""

    charts: tuple[Chart, ...]


Block = Paragraph | Bullets | Table | Code | Charts


@dataclass(frozen=True)
class Section:
    """A heading and its blocks."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Card:
    """One main result."""

    name: str
    value: str
    detail: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Report:
    """The whole document."""

    title: str
    date: str
    passed: bool | None  # None: nothing failed, but the scores were not compared
    statements: tuple[str, ...]  # what it comes to, each a sentence or two
    cards: tuple[Card, ...]
    sections: tuple[Section, ...]

    @property
    def verdict(self) -> str:
        """The statements as one paragraph."""
        return " ".join(self.statements)


def cell_of(value: Cell | str) -> Cell:
    """A plain text as a cell."""
    return value if isinstance(value, Cell) else Cell(value)


def judged(passed: bool, good: str = "pass", bad: str = "FAIL") -> Cell:
    """A judgement in one word."""
    return Cell(good, "good") if passed else Cell(bad, "bad")


def table(
    caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell | str]], *, numeric: bool = True
) -> tuple[Block, ...]:
    """A table; empty without rows."""
    return (Table(caption, tuple(header), tuple(map(tuple, rows)), numeric),) if rows else ()


def bullets(lines: Sequence[str]) -> tuple[Block, ...]:
    """Empty without lines."""
    return (Bullets(tuple(lines)),) if lines else ()
