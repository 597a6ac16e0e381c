"""A report on a terminal: tables as aligned columns, other blocks as plain lines. Charts are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prefixwise.bench.render.document import Block, Bullets, Charts, Code, Paragraph, Table, cell_of

_GAP = "  "


def terminal_lines(blocks: Iterable[Block]) -> Iterator[str]:
    """One line each, without control characters of the text."""
    for block in blocks:
        match block:
            case Paragraph(text):
                yield visible(text)
            case Bullets(items):
                yield from (f"- {visible(item)}" for item in items)
            case Code(text):
                yield from map(visible, text.splitlines())
            case Table():
                yield from _table_lines(block)
            case Charts():
                pass


def _table_lines(table: Table) -> Iterator[str]:
    from rich.cells import cell_len

    if table.caption:
        yield f"{visible(table.caption)}:"
    rows = [tuple(map(visible, table.header))]
    rows += [tuple(visible(cell_of(value).text) for value in row) for row in table.rows]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield _line(row, [width - cell_len(text) for width, text in zip(widths, row, strict=True)], table)


def _line(row: Sequence[str], paddings: Sequence[int], table: Table) -> str:
    """The first column to the left, numbers to the right."""
    cells = [
        " " * padding + text if place and table.numeric else text + " " * padding
        for place, (text, padding) in enumerate(zip(row, paddings, strict=True))
    ]
    return _GAP.join(cells).rstrip()


def visible(text: str) -> str:
    """On one line, with control characters spelled out: none moves the cursor or colours the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
