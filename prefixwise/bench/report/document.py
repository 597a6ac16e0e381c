"""A report before it is Markdown or HTML: sections of paragraphs, lists, tables, code and figures.

What a report says is decided once; the two renderers only decide how it looks. Markdown leaves figures out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["plain", "code", "good", "bad", "open"]
NONE = "-"


@dataclass(frozen=True)
class Cell:
    """`code` is shown letter by letter; `good` and `bad` are judgements, `open` is where none can be made."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Paragraph:
    """Plain words."""

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
class Figure:
    """`svg` has its own title and description, which are not seen; the caption says how to read it."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Figures:
    """Side by side where there is room."""

    figures: tuple[Figure, ...]


Block = Paragraph | Bullets | Table | Code | Figures


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Card:
    """One figure that people look for first."""

    name: str
    value: str
    detail: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Report:
    """All of it."""

    title: str
    date: str
    passed: bool | None  # None: nothing failed, but the scores were not compared
    statements: tuple[str, ...]  # what it comes to, each a sentence or two
    cards: tuple[Card, ...]
    sections: tuple[Section, ...]

    @property
    def verdict(self) -> str:
        """In one paragraph."""
        return " ".join(self.statements)


def cell_of(value: Cell | str) -> Cell:
    """Most cells are plain text and are written as such."""
    return value if isinstance(value, Cell) else Cell(value)


def judged(passed: bool, good: str = "pass", bad: str = "FAIL") -> Cell:
    """A judgement in one word."""
    return Cell(good, "good") if passed else Cell(bad, "bad")


def table(
    caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell | str]], *, numeric: bool = True
) -> tuple[Block, ...]:
    """Nothing where there are no rows."""
    return (Table(caption, tuple(header), tuple(map(tuple, rows)), numeric),) if rows else ()
