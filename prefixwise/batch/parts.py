"""Parts: the unit of work, of writing and of resuming. Files are split into parts, and a worker reads a part's rows.

Splitting is one quick pass over line ends (or Parquet's own directory). Files and parts are plain values: they can
be sent to other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import IO, NamedTuple

from prefixwise.batch.formats import (
    BYTE_ORDER_MARK,
    MAX_ROW_BYTES,
    Body,
    FileFormat,
    ParquetRows,
    Record,
    json_body,
    open_parquet,
    read_header,
    records,
)
from prefixwise.batch.storage import file_errors, find_file, open_file
from prefixwise.contract.errors import BatchError, RequestError, RequestTooLargeError

OnRows = Callable[[int], None]  # gets the number of rows found so far


@dataclass(frozen=True)
class InputFile:
    """One file of the input, and how to recognise it."""

    url: str
    name: str
    format: FileFormat
    size: int
    version: str

    def check_unchanged(self) -> None:
        """Raises BatchError where its size or version is another than when the job began."""
        now = find_file(self.url)
        if (now.size, now.version) != (self.size, self.version):
            sizes = f"expected {self.size} bytes of version {self.version}, got {now.size} of {now.version}"
            raise BatchError(f"{self.url} has changed since the job began: {sizes}; --overwrite begins anew")


@dataclass(frozen=True)
class Part:
    """Some rows of one file, few enough to fit in memory."""

    index: int  # within the job
    file: int  # index of the job's file
    start: int  # bytes, unpacked; rows in Parquet
    stop: int
    first_line: int  # of the file, from 1; in Parquet the first row
    num_rows: int


@dataclass(frozen=True)
class PartLimits:
    """The largest size of a part; a single row may be larger."""

    num_rows: int = 1024
    num_bytes: int = 16 << 20


@dataclass(frozen=True)
class PartRecord:
    """The counts of a completed part."""

    index: int
    num_rows: int
    num_items: int  # that have scores
    num_failures: int  # rows
    warnings: tuple[str, ...] = ()


# Splitting


class _Span(NamedTuple):
    start: int
    stop: int
    first_line: int
    num_rows: int


def split_files(files: Sequence[InputFile], limits: PartLimits, on_rows: OnRows = lambda rows: None) -> list[Part]:
    """All rows of all files, each in one part, in order. Raises BatchError where a file cannot be read."""
    parts: list[Part] = []
    num_rows = 0
    for number, file in enumerate(files):
        for span in _spans(file, limits):
            parts.append(Part(len(parts), number, *span))
            num_rows += span.num_rows
            on_rows(num_rows)
    return parts


def _spans(file: InputFile, limits: PartLimits) -> Iterator[_Span]:
    with file_errors(file.url):
        yield from (_parquet_spans if file.format == "parquet" else _text_spans)(file, limits)


def _text_spans(file: InputFile, limits: PartLimits) -> Iterator[_Span]:
    is_csv = file.format == "csv"
    with open_file(file.url) as opened:
        if is_csv and any(not each.is_blank for each in records(opened, quoted=True)):
            read_header(opened, file.url)  # a bad header is an error before any row is scored
        opened.seek(0)
        rows = (each for each in records(opened, quoted=is_csv) if not each.is_blank)
        if is_csv:
            next(rows, None)  # the header
        yield from _group(rows, limits)


def _group(rows: Iterator[Record], limits: PartLimits) -> Iterator[_Span]:
    """Consecutive rows together, as many as the limits allow."""
    group: list[Record] = []
    for row in rows:
        if group and (len(group) == limits.num_rows or row.stop - group[0].start > limits.num_bytes):
            yield _span(group)
            group = []
        group.append(row)
    if group:
        yield _span(group)


def _span(group: list[Record]) -> _Span:
    return _Span(group[0].start, group[-1].stop, group[0].line, len(group))


def _parquet_spans(file: InputFile, limits: PartLimits) -> Iterator[_Span]:
    """Within row groups, by the mean size of their rows."""
    with open_parquet(file.url) as opened:
        first = 0
        for number in range(opened.num_row_groups):
            group = opened.metadata.row_group(number)
            mean_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
            max_rows = max(1, min(limits.num_rows, limits.num_bytes // mean_bytes))
            for start in range(first, first + group.num_rows, max_rows):
                stop = min(start + max_rows, first + group.num_rows)
                yield _Span(start, stop, start + 1, stop - start)
            first += group.num_rows


# Reading


@dataclass(frozen=True)
class Row:
    """A row of the input."""

    line: int
    body: Body | RequestError  # the error says why it cannot be read


class RowReader:
    """Reads parts of a job's files. Consecutive parts of one file are read without opening it again."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files = files
        self._open_file: _OpenFile | None = None
        self._number = -1  # of the open file

    def read(self, part: Part) -> list[Row]:
        """All rows of the part. Raises BatchError where the file has changed."""
        file = self._files[part.file]
        with file_errors(file.url):
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
        """Close the open file; a later `read` opens it again."""
        if self._open_file is not None:
            self._open_file.close()
            self._open_file = None


@dataclass(frozen=True)
class _OpenFile:
    read: Callable[[Part], list[Row]]
    close: Callable[[], None]


def _open(file: InputFile) -> _OpenFile:
    file.check_unchanged()
    if file.format == "parquet":
        parquet = ParquetRows(file.url)
        return _OpenFile(lambda part: _parquet_rows(parquet, part), parquet.close)
    opened = open_file(file.url)
    decode: Callable[[bytes], Body] = json_body
    if file.format == "csv":
        decode = read_header(opened, file.url).body
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
