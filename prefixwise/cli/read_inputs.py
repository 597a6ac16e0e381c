"""Reads query and items from files and standard input, as exactly the text that the model gets.

lines     one item per line
jsonl     one item per line, a JSON string or an object with a field
csv, tsv  one item per row, under a column; the first row has the names of the columns
parquet   one item per row, in a column
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.contract.errors import describe, quote

ItemsFormat = Literal["lines", "jsonl", "csv", "tsv", "parquet"]

STDIN = "-"
DELIMITERS = {"csv": ",", "tsv": "\t"}
_BY_SUFFIX: dict[str, ItemsFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_MAX_SHOWN = 80  # characters of a line in a message
_MAX_CELL = 64 << 20  # characters; the standard library's limit is 131,072


@dataclass(frozen=True)
class ItemsSource:
    """Where the items of a request come from: those of the command line, then those of the file."""

    noun: str  # "item" or "document": the verb's word for an item, and the stem of its options
    given: Sequence[str]
    file: str | None
    format: ItemsFormat | None  # None: by the file's name
    field: str | None  # None: one of `usual_fields`

    def check(self) -> None:
        """Raises CommandError for options that do not fit together."""
        one, file = f"--{self.noun}", f"--{self.noun}s-file"
        if not self.given and self.file is None:
            hint = f"{one} TEXT may be repeated; {file} - reads standard input"
            raise CommandError(f"expected {one} or {file}, got neither", hint=hint, status=MISUSED)
        for name, value in (("format", self.format), ("field", self.field)):
            if self.file is None and value is not None:
                raise CommandError(f"--{self.noun}s-{name} is for {file}, which was not given", status=MISUSED)
        if self.field is not None and self.file_format == "lines":
            hint = f"--{self.noun}s-format names the format of the file"
            raise CommandError(f"--{self.noun}s-field: a file of lines has no fields", hint=hint, status=MISUSED)

    @property
    def file_format(self) -> ItemsFormat:
        """As asked, or as the file's name shows; any other name is a file of lines."""
        return self.format or _BY_SUFFIX.get(Path(self.file or "").suffix.lower(), "lines")

    @property
    def usual_fields(self) -> tuple[str, ...]:
        """The field or column that holds the text is one of these, if the command line names none."""
        return (self.noun, "text")

    def read(self) -> list[str]:
        """All items, in order. Raises CommandError, which names the line at fault, and BatchError."""
        if self.file is None:
            return list(self.given)
        return [*self.given, *self._read_file(self.file)]

    def _read_file(self, file: str) -> list[str]:
        if self.file_format == "parquet":
            return self._read_parquet(file)
        text = _read_text(file)
        if self.file_format in DELIMITERS:
            return list(self._csv_items(text, _title(file)))
        lines = _lines(text)
        if self.file_format == "lines":
            return lines
        return [self._jsonl_item(line, f"{_title(file)}:{number}") for number, line in enumerate(lines, 1)]

    def _jsonl_item(self, line: str, place: str) -> str:
        names = (self.field,) if self.field is not None else self.usual_fields
        wanted = " or ".join(f'"{name}"' for name in names)
        expected = f"expected a JSON string or an object with a string {wanted}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"{place}: {expected}, got {quote(line)}: {error}") from None
        text = next((value[name] for name in names if name in value), None) if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise CommandError(f"{place}: {expected}, got {line.strip()[:_MAX_SHOWN]}", hint=self._hint)
        return text

    def _csv_items(self, text: str, title: str) -> Iterator[str]:
        csv.field_size_limit(_MAX_CELL)
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=DELIMITERS[self.file_format], strict=True)
        try:
            names = [name.strip() for name in next((row for row in rows if row), [])]
            column = self._column(names, title)
            for row in rows:
                if row and len(row) != len(names):
                    expected = f"expected {len(names)} cells as the first row has, got {len(row)}"
                    raise CommandError(f"{title}:{rows.line_num}: {expected}")
                if row:  # no blank line
                    yield row[column]
        except csv.Error as error:
            raise CommandError(f"{title}:{rows.line_num}: {error}") from None

    def _read_parquet(self, file: str) -> list[str]:
        from prefixwise.batch.formats import open_parquet
        from prefixwise.batch.storage import file_errors

        if file == STDIN:
            raise CommandError("Parquet is read from a file: expected its path, got standard input", status=MISUSED)
        opened = open_parquet(file)
        with file_errors(file):
            names = opened.schema_arrow.names
            name = names[self._column(names, file)]
            texts: list[str] = opened.read(columns=[name]).column(name).to_pylist()
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise CommandError(f"{file}: row {number}: expected text in {quote(name)}, got {describe(text)}")
        return texts

    def _column(self, names: Sequence[str], title: str) -> int:
        """The position of the column with the text. Raises CommandError."""
        wanted = self.usual_fields if self.field is None else (self.field,)
        found = next((name for name in wanted if name in names), None)
        if found is None:
            expected = " or ".join(quote(name) for name in wanted)
            got = ", ".join(quote(name) for name in names) or "an empty file"
            raise CommandError(f"{title}: expected a column {expected}, got {got}", hint=self._hint)
        if names.count(found) > 1:
            raise CommandError(f"{title}: expected one column {quote(found)}, got {names.count(found)}")
        return names.index(found)

    @property
    def _hint(self) -> str:
        one = f"--{self.noun}s"
        return f"{one}-field NAME names the field; {one}-format lines takes every line as one {self.noun}"


def check_sources(query: str | None, query_file: str | None, items: ItemsSource) -> None:
    """Check that there is one query, at least one item, and one reader of standard input. Raises CommandError."""
    if (query is None) == (query_file is None):
        got = "neither" if query is None else "both"
        raise CommandError(f"expected --query or --query-file, got {got}", status=MISUSED)
    items.check()
    if query_file == items.file == STDIN:
        both = f"--query-file and --{items.noun}s-file"
        raise CommandError(f"{both} cannot both read standard input", status=MISUSED)


def read_query(query: str | None, query_file: str | None) -> str:
    """The query from the command line or its file."""
    if query_file is None:
        assert query is not None, "check_sources ensures one of the two"
        return query
    # Editors end a file with a newline, which is not part of the query.
    return _read_text(query_file).removesuffix("\n").removesuffix("\r")


def _lines(text: str) -> list[str]:
    """Lines end at a line feed only, so an item may contain Unicode's other separators."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


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
