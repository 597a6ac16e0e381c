"""Large JSON bodies, parsed in pieces.

`orjson.loads` holds the interpreter lock until it has made an object of every value: for 64 MiB of token ids that is a
second in which `/health` is not answered, and of `{"":0},` two seconds and 2 GB. So the values of a body are counted
first, and lists and objects that are large are split at their commas and parsed piece by piece, and so are strings that
are long. NumPy finds the commas and releases the lock meanwhile.

Lone surrogates (`"\\ud800"`), which `orjson` refuses, are read: the checks of texts refuse them, and name the item.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from prefixwise.contract.errors import InvalidValueError

MAX_JSON_VALUES = 1 << 21  # values and names of one body
PIECE_BYTES = 1 << 17  # that are parsed at once, in about 10 ms

_CHUNK_BYTES = 1 << 20
_STRING_BYTES = 1 << 19  # of a long string that are parsed at once
_MAX_LEVELS = 32  # of large lists and objects in each other; no request has more than five
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_CLOSING = {ord("["): ord("]"), ord("{"): ord("}")}
_DEPTHS = np.zeros(256, np.int8)  # what a byte adds to the depth
_DEPTHS[list(b"[{")] = 1
_DEPTHS[list(b"]}")] = -1
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_IS_STRUCTURE = np.zeros(256, bool)
_IS_STRUCTURE[list(b"[]{},:")] = True


def parse_json(content: bytes) -> object:
    """As `orjson.loads`, and with lone surrogates; other threads run meanwhile.

    Raises JSONDecodeError, and too_many_values.
    """
    if len(content) <= PIECE_BYTES:
        return _loads(content)
    return _Document(content).value(_Span(0, len(content), 0, None))


def _loads(content: bytes) -> Any:
    """As `orjson.loads`, and with lone surrogates. Raises JSONDecodeError.

    `json` reads them, and much that is no JSON: so orjson must be able to read the rest.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass
    orjson.loads(_SURROGATE.sub(rb"\\ufffd", content))
    try:
        return json.loads(content, parse_int=orjson.loads)
    except RecursionError:  # before Python 3.12 its limit is lower than orjson's
        raise orjson.JSONDecodeError("too many levels of lists and objects", "", 0) from None


class _Span(NamedTuple):
    """A value, perhaps with blanks around it: its bytes, and which places of structure lie in it."""

    start: int
    stop: int
    first: int
    last: int | None  # exclusive; None: to the end


class _Document:
    """A body and the places of its brackets, commas and colons, except for those in strings."""

    def __init__(self, content: bytes) -> None:
        data = np.frombuffer(content, np.uint8)
        self._content = content
        self._places = _structure(data)
        self._kinds = data[self._places]
        self._depths = np.cumsum(_DEPTHS[self._kinds], dtype=np.int32)  # after each place

    def value(self, span: _Span, level: int = 0) -> object:
        """Raises JSONDecodeError."""
        last = len(self._places) if span.last is None else span.last
        if span.stop - span.start <= PIECE_BYTES:
            return _loads(self._content[span.start : span.stop])
        if last == span.first:
            return _scalar(self._content[span.start : span.stop].strip())
        if level == _MAX_LEVELS:
            raise self._error("too many levels of large lists and objects", span.start)
        self._check_brackets(span, last)
        inner, depth = slice(span.first + 1, last - 1), self._depths[span.first]
        is_comma = (self._kinds[inner] == _COMMA) & (self._depths[inner] == depth)
        ends = np.append(np.flatnonzero(is_comma) + inner.start, last - 1)  # of the entries
        if len(ends) == 1 and not self._text(span.first, last - 1).strip():
            return [] if self._kinds[span.first] == ord("[") else {}
        if self._kinds[span.first] == ord("["):
            return self._list(span.first, ends, level)
        return self._object(span.first, ends, level)

    def _list(self, before: int, ends: NDArray[np.int64], level: int) -> list[object]:
        found: list[object] = []
        for begin, end in self._groups(before, ends):
            opening = before if begin == 0 else int(ends[begin - 1])
            closing = int(ends[end - 1])
            if end - begin == 1:
                found.append(self.value(self._between(opening, closing), level + 1))
                continue
            entries = _loads(b"[" + self._text(opening, closing) + b"]")
            found += entries
        return found

    def _object(self, before: int, ends: NDArray[np.int64], level: int) -> dict[str, object]:
        found: dict[str, object] = {}
        for begin, end in self._groups(before, ends):
            opening = before if begin == 0 else int(ends[begin - 1])
            closing = int(ends[end - 1])
            if end - begin > 1:
                found |= _loads(b"{" + self._text(opening, closing) + b"}")
                continue
            if closing == opening + 1 or self._kinds[opening + 1] != _COLON:
                raise self._error("a name and a colon expected", int(self._places[opening]) + 1)
            name = _scalar(self._text(opening, opening + 1).strip())
            if not isinstance(name, str):
                raise self._error("a name expected", int(self._places[opening]) + 1)
            found[name] = self.value(self._between(opening + 1, closing), level + 1)
        return found

    def _groups(self, before: int, ends: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Consecutive entries that are parsed together: those of about a piece, or one that is larger."""
        stops, groups, begin, start = self._places[ends], [], 0, int(self._places[before])
        while begin < len(ends):
            end = max(begin + 1, int(np.searchsorted(stops, start + PIECE_BYTES, side="right")))
            groups.append((begin, end))
            begin, start = end, int(stops[end - 1])
        return groups

    def _check_brackets(self, span: _Span, last: int) -> None:
        """The span is one list or object, with nothing but blanks around it."""
        opening, closing, depth = self._kinds[span.first], self._kinds[last - 1], self._depths[span.first]
        around = (
            self._content[span.start : self._places[span.first]] + self._content[self._places[last - 1] + 1 : span.stop]
        )
        is_one = self._depths[last - 1] == depth - 1 and self._depths[span.first : last - 1].min() >= depth
        if around.strip() or _CLOSING.get(int(opening)) != int(closing) or not is_one:
            raise self._error("brackets that do not match", span.start)

    def _between(self, opening: int, closing: int) -> _Span:
        return _Span(int(self._places[opening]) + 1, int(self._places[closing]), opening + 1, closing)

    def _text(self, opening: int, closing: int) -> bytes:
        return self._content[self._places[opening] + 1 : self._places[closing]]

    def _error(self, message: str, place: int) -> orjson.JSONDecodeError:
        return orjson.JSONDecodeError(f"{message} at byte {place}", "", 0)


def _scalar(content: bytes) -> object:
    """A long string, or anything that is no list and no object. Raises JSONDecodeError."""
    stop = len(content) - 1
    if not (content.startswith(b'"') and content.endswith(b'"') and stop > 0):
        return orjson.loads(content)
    parts, start = [], 1
    while start < stop:
        end = _string_cut(content, start, start + _STRING_BYTES) if start + _STRING_BYTES < stop else stop
        parts.append(_loads(b'"' + content[start:end] + b'"'))
        start = end
    return "".join(parts)


def _string_cut(content: bytes, start: int, end: int) -> int:
    """The last place up to `end` that is not within a character, nor within an escape or a pair of them."""
    while end > start and 0x80 <= content[end] < 0xC0:  # the rest of a character in UTF-8
        end -= 1
    escape = _last_escape(content, start, end)
    if escape is not None and escape + (6 if content[escape + 1] == ord("u") else 2) > end:
        end = escape
        escape = _last_escape(content, start, end)
    if escape == end - 6 and _HIGH_SURROGATE.match(content, escape):
        end = escape
    return end if end > start else start + _STRING_BYTES  # broken JSON: the piece is refused


def _last_escape(content: bytes, start: int, end: int) -> int | None:
    """The place of the backslash of the last escape that begins before `end`; None if it ends long before."""
    place = content.rfind(b"\\", max(start, end - 6), end)
    if place < 0:
        return None
    run = place + 1 - start - len(content[start : place + 1].rstrip(b"\\"))
    return place if run % 2 else place - 1  # a backslash may be escaped itself


def _structure(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The places of brackets, commas and colons outside of strings. Raises too_many_values."""
    found: list[NDArray[np.int64]] = []
    num_values, in_string, is_escaped = 0, False, False
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = data[start : start + _CHUNK_BYTES]
        is_quote, is_escaped = _quotes(chunk, is_escaped)
        is_within = (np.cumsum(is_quote, dtype=np.uint8) & 1).astype(bool) ^ in_string
        in_string = bool(is_within[-1])
        places = np.flatnonzero(_IS_STRUCTURE[chunk] & ~is_within)
        num_values += int(np.count_nonzero(_DEPTHS[chunk[places]] >= 0))
        if num_values > MAX_JSON_VALUES:
            message = f"the body must have at most {MAX_JSON_VALUES} values and names, got more; send smaller requests"
            raise InvalidValueError(message, code="too_many_values")
        found.append(places + start)
    return np.concatenate(found)


def _quotes(chunk: NDArray[np.uint8], is_escaped: bool) -> tuple[NDArray[np.bool_], bool]:
    """Which bytes begin or end a string, and whether the byte behind them is escaped. `is_escaped`: the first is."""
    is_quote = chunk == _QUOTE
    slashes = np.flatnonzero(chunk == _BACKSLASH)
    if is_escaped:
        is_quote[0] = False
        slashes = slashes[slashes > 0]
    if not len(slashes):
        return is_quote, False
    begins_run = np.append(True, np.diff(slashes) > 1)
    run_starts = np.maximum.accumulate(np.where(begins_run, slashes, 0))
    escaped = slashes[(slashes - run_starts) % 2 == 0] + 1  # every other one of a run is escaped itself
    is_quote[escaped[escaped < len(chunk)]] = False
    return is_quote, bool(escaped[-1] == len(chunk))
