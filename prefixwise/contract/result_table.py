"""What all results share: a result is a sequence, and shows itself as text, as HTML, as dicts and as a DataFrame."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple, TypeVar, final, overload

import numpy as np

if TYPE_CHECKING:
    import pandas

Entry = TypeVar("Entry", covariant=True)

_TEXT_ROWS, _HTML_ROWS = 10, 100  # of a result, where it is shown
_SHOWN_CHARS = 60  # of a text
_BAR = "rgba(66, 133, 244, 0.35)"  # readable on light and on dark pages


class Shown(NamedTuple):
    """What a result shows of itself before its rows."""

    title: str
    warnings: tuple[str, ...] = ()


class ResultTable(Sequence[Entry], ABC):
    """A sequence of entries, each of them also a row of a table. A new result defines the four abstract methods."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _entry(self, index: int) -> Entry:
        """The entry at this place, which is below the length."""

    @abstractmethod
    def _columns(self) -> list[str]:
        """The names of the table's columns, all different. The first is `index`, of the DataFrame, too."""

    @abstractmethod
    def _cells(self, num_rows: int) -> Iterator[Sequence[object]]:
        """The first rows, their cells in the order of the columns. A float is drawn as a bar."""

    @abstractmethod
    def _shown(self) -> Shown:
        """What stands above the table."""

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    @final
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        places = range(len(self))[index]
        return self._entry(places) if isinstance(places, int) else [self._entry(each) for each in places]

    @final
    def __iter__(self) -> Iterator[Entry]:
        return (self._entry(index) for index in range(len(self)))

    @final
    def to_dicts(self) -> list[dict[str, object]]:
        """The entries as dicts.

        Returns:
            One dict for each entry, with the columns of `to_pandas`, and `index` first.
        """
        names = self._columns()
        return [dict(zip(names, row, strict=True)) for row in self._cells(len(self))]

    @final
    def to_pandas(self) -> pandas.DataFrame:
        """The entries as a table.

        Returns:
            A `pandas.DataFrame` whose index is the entry's index in the request.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame.from_records(self.to_dicts(), index="index", columns=self._columns())

    @final
    def __repr__(self) -> str:
        """A heading and the first rows."""
        rows = [self._columns(), *([_short(cell) for cell in row] for row in self._cells(_TEXT_ROWS))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        title, warnings = self._shown()
        notes = [f"warning: {warning}" for warning in warnings]
        return "\n".join([title, *(line.rstrip() for line in lines), *self._more(_TEXT_ROWS), *notes])

    @final
    def _repr_html_(self) -> str:
        """The result in a notebook: scores are bars."""
        rows = list(self._cells(_HTML_ROWS))
        bounds = [_bounds([cell for cell in column if isinstance(cell, float)]) for column in zip(*rows, strict=True)]
        head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in self._columns())
        body = "".join(f"<tr>{''.join(map(_html_cell, row, bounds))}</tr>" for row in rows)
        title, warnings = self._shown()
        notes = [*self._more(_HTML_ROWS), *(f"warning: {warning}" for warning in warnings)]
        below = "".join(f"<div>{escape(note)}</div>" for note in notes)
        return f"<div><b>{escape(title)}</b><table><tr>{head}</tr>{body}</table>{below}</div>"

    def _more(self, num_shown: int) -> list[str]:
        return [f"... {len(self) - num_shown:,} more"] if len(self) > num_shown else []


def distinct(names: Iterable[str]) -> list[str]:
    """The names; one that occurred before gets its place behind it."""
    found: dict[str, None] = {}
    for place, name in enumerate(names):
        while name in found:
            name = f"{name} ({place})"
        found[name] = None
    return list(found)


def _short(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    if isinstance(cell, np.ndarray):
        return np.array2string(cell, precision=4, threshold=0)
    text = "" if cell is None else str(cell).replace("\n", " ")
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _bounds(numbers: Sequence[float]) -> tuple[float, float]:
    """Of a column's bars: 0 and 1 for probabilities, else the least and the largest number."""
    least, most = min(numbers, default=0.0), max(numbers, default=1.0)
    return (0.0, 1.0) if least >= 0 and most <= 1 else (least, most)


def _html_cell(cell: object, bounds: tuple[float, float]) -> str:
    if not isinstance(cell, float):
        return f'<td style="text-align:left">{escape(_short(cell))}</td>'
    least, most = bounds
    percent = 100 * (cell - least) / (most - least) if most > least else 0.0
    bar = f"background:linear-gradient(90deg,{_BAR} {percent:.1f}%,transparent {percent:.1f}%)"
    return f'<td style="text-align:left;min-width:7em;{bar}">{_short(cell)}</td>'
