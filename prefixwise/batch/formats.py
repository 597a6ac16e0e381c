"""The input formats: which one a file has, where its rows begin and end, and a row as the body of a request.

    jsonl     one JSON object per line
    csv       query,item,id          one pair per row
              query,items,labels     items and labels are JSON lists
    parquet   columns as in CSV, lists as lists

The splitter and the reader (`parts.py`) both take the borders of rows from here, so they agree.
"""

from __future__ import annotations

import csv
import io
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, Literal, NamedTuple, get_args

from prefixwise.batch.storage import file_errors, is_gzip, needed, open_file
from prefixwise.contract.errors import BatchError, InvalidRequestError, describe, quote
from prefixwise.contract.fields import Choice, Text
from prefixwise.contract.request import SCORE_FIELDS
from prefixwise.contract.rerank_request import rerank_fields

FileFormat = Literal["jsonl", "csv", "parquet"]
FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)

Body = dict[str, object]  # of a request

MAX_ROW_BYTES = 64 << 20  # a longer row fails unread
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BY_SUFFIX: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_PIECE_BYTES = 1 << 20  # a longer line is read in pieces, so that memory stays bounded


def input_format(name: str, asked: FileFormat | None) -> FileFormat:
    """`asked`, or the format that the name shows. Raises BatchError for an unknown suffix, or Parquet in gzip."""
    file_format = asked or _by_suffix(name.lower().removesuffix(".gz"))
    if file_format is None:
        raise BatchError(f"{name}: expected {_expected()} (or with .gz), or --input-format, got neither")
    if file_format == "parquet" and is_gzip(name):
        raise BatchError(f"{name}: Parquet is read as it is, not within gzip; unpack it")
    return file_format


def output_format(name: str, asked: FileFormat | None) -> FileFormat:
    """`asked`, or the format that the name shows. Raises BatchError for an unknown suffix, or gzip."""
    if is_gzip(name):
        raise BatchError(f"{name}: the output is written as it is, not as gzip; expected {_expected()}")
    file_format = asked or _by_suffix(name.lower())
    if file_format is None:
        raise BatchError(f"{name}: expected {_expected()}, or --output-format, got neither")
    return file_format


def _by_suffix(name: str) -> FileFormat | None:
    return _BY_SUFFIX.get(PurePosixPath(name).suffix)


def _expected() -> str:
    return "a name that ends in " + ", ".join(_BY_SUFFIX)


# Borders of rows in JSONL and CSV


class Record(NamedTuple):
    """One row as a range of bytes."""

    start: int
    stop: int
    line: int  # of its first byte, from 1
    is_blank: bool


def records(file: IO[bytes], *, quoted: bool) -> Iterator[Record]:
    """Rows from the file's position on, which counts as byte 0 and line 1. `quoted`: it is CSV, where a line end within
    quotes is text."""
    offset, line = 0, 1
    while True:
        start, first, is_blank, is_complete = offset, line, True, False
        state = _CELL_START
        while not is_complete and (piece := file.readline(_PIECE_BYTES)):
            is_line = piece.endswith(b"\n")
            if quoted and (b'"' in piece or (not is_line and state != _QUOTES)):  # most lines have no quotes
                state = _csv_state(piece if offset > start else piece.removeprefix(BYTE_ORDER_MARK), state)
            offset += len(piece)
            is_blank = is_blank and not piece.strip()
            if is_line:
                line += 1
                is_complete = state != _QUOTES
        if offset == start:
            return
        yield Record(start, offset, first, is_blank)


# The state of the standard library's CSV reader between two pieces of a row, as text that brings a new reader there.
_CELL_START, _TEXT, _QUOTES = "", "x", '"'


def _csv_state(piece: bytes, state: str) -> str:
    """The reader's state after the piece.

    Parts are cut at byte offsets, and csv.reader reports none. It also holds a whole row in memory, and a quote that is
    never closed makes the rest of a file one row. So a new reader gets one piece at a time, behind its state. Quotes
    are open at the end if it asks for another line. A carriage return ends a cell, as a comma does.
    """
    text = state + piece.removesuffix(b"\n").replace(b"\r", b",").decode("latin-1")
    if _leaves_quotes_open(text):
        return _QUOTES
    return _CELL_START if piece.endswith(b"\n") or _leaves_quotes_open(text + '"') else _TEXT


def _leaves_quotes_open(text: str) -> bool:
    """Whether csv.reader asks for another line to complete the row."""
    reader = _csv_reader(iter((text, "")))
    next(reader)
    return bool(reader.line_num > 1)


def _csv_reader(lines: Iterator[str], *, strict: bool = False) -> Any:
    csv.field_size_limit(MAX_ROW_BYTES)  # the default is 131,072 characters
    return csv.reader(lines, strict=strict)


# JSONL


def json_body(line: bytes) -> Body:
    """Raises invalid_json."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = quote(line.strip().decode("utf-8", "backslashreplace"))
        raise InvalidRequestError(f"a row must be a JSON object, got {shown}: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"a row must be a JSON object, got {describe(value)}", code="invalid_json")
    return value


# CSV: a cell is text where the field is text, else JSON. An empty cell is no value, except in query and item.

_ITEM = "item"  # the only item of its row
_MAY_BE_EMPTY = ("query", _ITEM)
_TEXT_FIELDS = ("query", "suffix")  # token ids are not possible in CSV
_JSON_FIELDS = frozenset(
    field.name
    for field in (*SCORE_FIELDS, *rerank_fields("native"))
    if not isinstance(field.kind, Text | Choice) and field.name not in _TEXT_FIELDS
)


@dataclass(frozen=True)
class CsvColumns:
    """The names in a file's first row."""

    names: tuple[str, ...]

    def body(self, record: bytes) -> Body:
        """Raises invalid_csv for another number of cells, invalid_json for a cell that must be JSON and is not."""
        cells = parse_record(record)
        if len(cells) != len(self.names):
            message = f"a row must have {len(self.names)} cells as the first one has, got {len(cells)}"
            raise InvalidRequestError(message, code="invalid_csv")
        named = zip(self.names, cells, strict=True)
        body = {name: _value(name, cell) for name, cell in named if cell or name in _MAY_BE_EMPTY}
        return _with_item_as_items(body)


def read_header(file: IO[bytes], url: str) -> CsvColumns:
    """Read the first row of the file. Raises BatchError where it has none, or names a column twice."""
    file.seek(0)
    header = next((each for each in records(file, quoted=True) if not each.is_blank), None)
    if header is None:
        raise BatchError(f"{url}: expected the names of columns in its first row, got an empty file")
    file.seek(header.start)
    content = file.read(min(header.stop - header.start, MAX_ROW_BYTES))
    try:
        names = tuple(name.strip() for name in parse_record(content.removeprefix(BYTE_ORDER_MARK)))
    except InvalidRequestError as error:
        raise BatchError(f"{url}: the names of its columns: {error.message}") from None
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise BatchError(f"{url}: expected every column once, got {quote(repeated[0])} more than once")
    return CsvColumns(names)


def parse_record(record: bytes) -> list[str]:
    """The cells of one row. Raises invalid_csv, also for more than one row.

    Bytes that are not UTF-8 become surrogates, which every request refuses.
    """
    text = record.decode("utf-8", "surrogateescape")
    try:
        rows = [cells for cells in _csv_reader(io.StringIO(text, newline=""), strict=True) if cells]
    except csv.Error as error:
        raise InvalidRequestError(f"a row must be CSV, got {quote(text)}: {error}", code="invalid_csv") from None
    if len(rows) > 1:
        got = f"{len(rows)} in {quote(text)}; lines must end with \\n or \\r\\n, not with \\r alone"
        raise InvalidRequestError(f"a row must be one row of CSV, got {got}", code="invalid_csv")
    return rows[0] if rows else []


def _value(name: str, cell: str) -> object:
    if name not in _JSON_FIELDS:
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        message = f"{name} must be JSON in a CSV file, got {quote(cell)}: {error}"
        raise InvalidRequestError(message, code="invalid_json", param=name) from None


def _with_item_as_items(body: Body) -> Body:
    if _ITEM not in body:
        return body
    if "items" in body:
        message = "item and items exclude each other: expected one of them, got both"
        raise InvalidRequestError(message, code="conflicting_parameters", param="items")
    return {**{name: value for name, value in body.items() if name != _ITEM}, "items": [body[_ITEM]]}


# Parquet

_BATCH_ROWS = 256
_BUFFER_BYTES = 1 << 20  # columns are read in pieces of this size, not a row group at once


def open_parquet(url: str) -> Any:
    """`pyarrow.parquet.ParquetFile`. Raises BatchError."""
    with needed("pyarrow"):
        from pyarrow.parquet import ParquetFile

    opened = open_file(url)
    try:
        with file_errors(url):
            file = ParquetFile(opened, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            counts = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            if min(counts, default=0) < 0 or sum(counts) != file.metadata.num_rows:
                raise BatchError(f"{url} is damaged: it says {file.metadata.num_rows} rows, its groups {counts[:8]}")
            return file
    except BatchError:
        opened.close()
        raise


class ParquetRows:
    """Rows of an open Parquet file by number. Reading forward decodes each row once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._file = open_parquet(url)
        self._starts = [0]  # the first row of each row group, then the number of all rows
        for number in range(self._file.num_row_groups):
            self._starts.append(self._starts[-1] + self._file.metadata.row_group(number).num_rows)
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None  # the unread rest of the newest batch
        self._next = -1  # the number of its first row

    def read(self, start: int, stop: int) -> list[Body]:
        """Raises BatchError where the file has become shorter."""
        if stop > self._starts[-1]:
            expected = f"expected at least {stop} rows of Parquet, got {self._starts[-1]}"
            raise BatchError(f"{self._url}: {expected}; has the file changed?")
        group = bisect_right(self._starts, start) - 1
        if self._next < self._starts[group] or self._next > start:
            self._open(group)
        self._take(start - self._next)
        return [row for piece in self._take(stop - start) for row in piece.to_pylist()]

    def _open(self, group: int) -> None:
        groups = list(range(group, self._file.num_row_groups))
        self._batches = self._file.iter_batches(_BATCH_ROWS, row_groups=groups, use_threads=False)
        self._batch, self._next = self._next_batch(), self._starts[group]

    def _next_batch(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            raise BatchError(f"{self._url} is damaged: it holds fewer rows than it says")
        return batch

    def _take(self, num_rows: int) -> list[Any]:
        """The next `num_rows` rows, as pieces of batches."""
        pieces = []
        while num_rows:
            if not len(self._batch):
                self._batch = self._next_batch()
            piece = self._batch[:num_rows]
            pieces.append(piece)
            self._batch = self._batch[len(piece) :]
            self._next += len(piece)
            num_rows -= len(piece)
        return pieces

    def close(self) -> None:
        self._file.close()
