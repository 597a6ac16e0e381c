"""Wording for error messages: what came, short enough for one line and safe to send as UTF-8."""

from __future__ import annotations

import json
import reprlib

_MAX_SHOWN = 60  # characters of a value that a message shows


def describe(value: object) -> str:
    """The value, cut short, and its type: `"x" (str)`, `[1, 2, 3, ...] (list)`."""
    return f"{_brief(value)} ({type(value).__name__})"


def quote(text: str) -> str:
    """The text in double quotes, cut short; lone surrogates, which UTF-8 cannot carry, are spelled out."""
    return json.dumps(_cut(text), ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def _brief(value: object) -> str:
    if isinstance(value, str):
        return quote(value)
    try:
        return _cut(" ".join(reprlib.repr(value).split()))
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
