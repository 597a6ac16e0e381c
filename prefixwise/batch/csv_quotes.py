"""Is a byte of CSV within quotes? As Python's csv reads it: a quote opens where a cell begins, elsewhere it is text.

5" pipe,"a, b"      the first is text, the second opens, the third closes
"say ""no"" now"    two of them within quotes are one as text
"""

from __future__ import annotations

import re
from typing import Literal

# "cell start" is also where quotes have just been closed: there, too, a quote opens (again), and all else is text.
Place = Literal["cell start", "text", "quotes"]

_CELL_ENDS = (b",", b"\r")  # a line feed, which ends a cell too, ends the piece
_OPENING = re.compile(rb'[,\r]"')
_QUOTED = re.compile(rb'[^"]*+(?:""[^"]*+)*+')


def place_after(piece: bytes, place: Place) -> Place:
    """Where one is behind the piece, which begins at `place`."""
    if b'"' not in piece:  # as most of them
        return place if place == "quotes" or not piece else _place_at_end(piece)
    at = 0
    while at < len(piece):
        if place == "quotes":
            at = _end_of_quoted(piece, at)
            if at == len(piece):
                return "quotes"
            place = "cell start"
        elif place == "cell start" and piece.startswith(b'"', at):
            place = "quotes"
        elif (opening := _OPENING.search(piece, at)) is None:
            return _place_at_end(piece)
        else:
            at, place = opening.end() - 1, "quotes"
        at += 1
    return place


def _end_of_quoted(piece: bytes, at: int) -> int:
    """Of the quote that closes, or of the piece where none does."""
    text = _QUOTED.match(piece, at)
    assert text is not None  # nothing is a match, too
    return text.end()


def _place_at_end(piece: bytes) -> Place:
    return "cell start" if piece.endswith(_CELL_ENDS) else "text"
