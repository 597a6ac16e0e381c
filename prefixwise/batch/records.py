"""Where the rows of a JSONL or CSV file begin and end. The cutter and the reader both ask here, so they agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, NamedTuple

from prefixwise.batch.csv_quotes import Place, place_after

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PIECE_BYTES = 1 << 20  # so that a line without end does not fill the memory


class Record(NamedTuple):
    """One row as bytes of its file."""

    start: int
    stop: int
    line: int  # on which it begins, from 1
    is_blank: bool


def records(file: IO[bytes], *, quoted: bool) -> Iterator[Record]:
    """From where the file stands, which counts as byte 0 and line 1. `quoted`: line ends within quotes are CSV text."""
    offset, line = 0, 1
    while True:
        start, first, is_blank, is_complete = offset, line, True, False
        place: Place = "cell start"
        while not is_complete and (piece := file.readline(_PIECE_BYTES)):
            is_line = piece.endswith(b"\n")
            if quoted and (place == "quotes" or not is_line or b'"' in piece):  # most lines are a row, and have none
                place = place_after(piece if offset > start else piece.removeprefix(BYTE_ORDER_MARK), place)
            offset += len(piece)
            is_blank = is_blank and not piece.strip()
            if is_line:
                line += 1
                is_complete = place != "quotes"
        if offset == start:
            return
        yield Record(start, offset, first, is_blank)
