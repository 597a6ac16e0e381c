"""Reads query and items from files and standard input, as exactly the text that the model gets."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.contract.errors import describe, quote

ItemsFormat = Literal["lines", "jsonl"]

STDIN = "-"
_JSONL_EXPECTED = 'expected a JSON string or an object with a string "text"'


def check_sources(
    query: str | None,
    query_file: str | None,
    items: Sequence[str],
    items_file: str | None,
    items_format: ItemsFormat | None,
    *,
    noun: str = "item",
) -> None:
    """Check that there is exactly one query, at least one item, and one reader of standard input. Raises CommandError.

    `noun`: the verb's word for an item, and the stem of its options.
    """
    one, file, file_format = f"--{noun}", f"--{noun}s-file", f"--{noun}s-format"
    if (query is None) == (query_file is None):
        got = "neither" if query is None else "both"
        raise CommandError(f"expected --query or --query-file, got {got}", status=MISUSED)
    if not items and items_file is None:
        hint = f"{one} TEXT may be repeated; {file} - reads standard input"
        raise CommandError(f"expected {one} or {file}, got neither", hint=hint, status=MISUSED)
    if items_file is None and items_format is not None:
        raise CommandError(f"{file_format} is for {file}, which was not given", status=MISUSED)
    if query_file == items_file == STDIN:
        raise CommandError(f"--query-file and {file} cannot both read standard input", status=MISUSED)


def read_query(query: str | None, query_file: str | None) -> str:
    """The query from the command line or its file."""
    if query_file is None:
        assert query is not None, "check_sources ensures one of the two"
        return query
    # Editors end a file with a newline, which is not part of the query.
    return _read_text(query_file).removesuffix("\n").removesuffix("\r")


def read_items(items: Sequence[str], items_file: str | None, items_format: ItemsFormat | None) -> list[str]:
    """The items of the command line, then those of the file."""
    if items_file is None:
        return list(items)
    lines = _read_lines(items_file)
    if (items_format or _format_of(items_file)) == "lines":
        return [*items, *lines]
    places = (f"{_title(items_file)}:{number}" for number in range(1, len(lines) + 1))
    return [*items, *map(_jsonl_item, lines, places)]


def _format_of(file: str) -> ItemsFormat:
    return "jsonl" if Path(file).suffix.lower() == ".jsonl" else "lines"


def _read_lines(file: str) -> list[str]:
    """Lines end at a line feed only, so an item may contain Unicode's other separators."""
    lines = [line.removesuffix("\r") for line in _read_text(file).split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def _jsonl_item(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{place}: {_JSONL_EXPECTED}, got {quote(line)}: {error}") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise CommandError(f"{place}: {_JSONL_EXPECTED}, got {describe(value)}")
    return text


def _read_text(file: str) -> str:
    """The file as UTF-8, without a byte-order mark."""
    try:
        content = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {_title(file)}: {error.strerror}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CommandError(
            f"{_title(file)}:{line}: expected UTF-8, got the byte 0x{content[error.start]:02x}"
        ) from None


def _title(file: str) -> str:
    return "standard input" if file == STDIN else file
