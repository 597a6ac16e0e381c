"""From a part to its rows: each a request's body and its line, or the reason why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import IO

from prefixwise.batch.clear_errors import clear_errors
from prefixwise.batch.csv_cells import read_header
from prefixwise.batch.parquet_rows import ParquetRows
from prefixwise.batch.parts import MAX_ROW_BYTES, InputFile, Part
from prefixwise.batch.records import BYTE_ORDER_MARK, records
from prefixwise.batch.storage import open_file
from prefixwise.batch.unchanged import check_unchanged
from prefixwise.contract.describe import describe, quote
from prefixwise.contract.errors import BatchError, InvalidRequestError, RequestError, RequestTooLargeError

Body = dict[str, object]


@dataclass(frozen=True)
class Row:
    """A line of the input."""

    line: int
    body: Body | RequestError  # the error says why it cannot be read


class RowReader:
    """Reads parts of a job's files; those that follow each other in a file are read in one go."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files = files
        self._open_file: _OpenFile | None = None
        self._number = -1  # of the open file

    def read(self, part: Part) -> list[Row]:
        """All rows of the part. Raises BatchError where the file is not what it was."""
        file = self._files[part.file]
        with clear_errors(file.url):
            rows = self._opened(part.file).read(part)
        if len(rows) != part.num_rows:
            expected = f"expected {part.num_rows} rows from line {part.first_line} on"
            raise BatchError(f"{file.url}: {expected}, got {len(rows)}; has it changed?")
        return rows

    def _opened(self, number: int) -> _OpenFile:
        if number != self._number or self._open_file is None:
            self.close()
            self._open_file, self._number = _open(self._files[number]), number
        return self._open_file

    def close(self) -> None:
        """What is open; a later `read` opens it again."""
        if self._open_file is not None:
            self._open_file.close()
            self._open_file = None


@dataclass(frozen=True)
class _OpenFile:
    read: Callable[[Part], list[Row]]
    close: Callable[[], None]


def _open(file: InputFile) -> _OpenFile:
    check_unchanged(file)
    if file.format == "parquet":
        parquet = ParquetRows(file)
        return _OpenFile(lambda part: _parquet_rows(parquet, part), parquet.close)
    opened = open_file(file.url)
    decode: Callable[[bytes], Body] = json_body
    if file.format == "csv":
        columns = read_header(opened, file.url)
        decode = columns.body
    return _OpenFile(lambda part: _text_rows(opened, part, decode, quoted=file.format == "csv"), opened.close)


def _parquet_rows(parquet: ParquetRows, part: Part) -> list[Row]:
    bodies = parquet.read(part.start, part.stop)
    return [Row(part.first_line + index, body) for index, body in enumerate(bodies)]


def _text_rows(file: IO[bytes], part: Part, decode: Callable[[bytes], Body], *, quoted: bool) -> list[Row]:
    size = part.stop - part.start
    if size > MAX_ROW_BYTES:  # parts are smaller, so it is a single row
        message = f"a row must have at most {MAX_ROW_BYTES} bytes, got {size}; is a line end or a quote missing?"
        return [Row(part.first_line, RequestTooLargeError(message, code="row_too_large"))]
    file.seek(part.start)
    content = file.read(size)
    rows = (each for each in records(BytesIO(content), quoted=quoted) if not each.is_blank)
    return [_row(part.first_line + each.line - 1, content[each.start : each.stop], decode) for each in rows]


def _row(line: int, content: bytes, decode: Callable[[bytes], Body]) -> Row:
    try:
        return Row(line, decode(content.removeprefix(BYTE_ORDER_MARK)))
    except RequestError as error:
        return Row(line, error)


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
