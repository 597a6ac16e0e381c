"""Lines of cells as people read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], *, left: Collection[int]) -> str:
    """Every column as wide as its widest cell; those of `left` begin where the column does, the others end there."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths, left) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], left: Collection[int]) -> str:
    padded = [
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
