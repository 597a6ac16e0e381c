"""Writers of the output's three formats. Every format keeps numbers to the last bit.

JSONL has the fields that a row has. CSV and Parquet have the same columns in every job; lists are JSON in CSV.
"""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Self

from prefixwise.batch.formats import FileFormat
from prefixwise.batch.storage import needed

OutputRow = Mapping[str, Any]

COLUMNS = ("file", "line", "id", "scores", "results", "truncated", "item_errors")


class RowWriter(ABC):
    """Writes to an open file and leaves it open. As a context it finishes, or gives up after a failure."""

    @abstractmethod
    def write(self, rows: Sequence[OutputRow]) -> None: ...

    def finish(self) -> None:  # noqa: B027  # most formats have no footer
        """After the last row."""

    def abandon(self) -> None:  # noqa: B027  # the same
        """After a failure, which stays the reported one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()


def checked_format(file_format: FileFormat) -> FileFormat:
    """The format itself. Raises BatchError where the package that writes it is missing."""
    if file_format == "parquet":
        with needed("pyarrow"):
            import pyarrow  # noqa: F401
    return file_format


def open_writer(file_format: FileFormat, file: IO[bytes], *, with_file: bool) -> RowWriter:
    """`with_file`: rows name their input file. Raises BatchError where a package is missing."""
    columns = COLUMNS if with_file else COLUMNS[1:]
    if file_format == "jsonl":
        return JsonlWriter(file)
    return CsvWriter(file, columns) if file_format == "csv" else ParquetWriter(file, columns)


class JsonlWriter(RowWriter):
    """One JSON object per line."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, rows: Sequence[OutputRow]) -> None:
        self._file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())


class CsvWriter(RowWriter):
    """Empty cells where a row has no value."""

    def __init__(self, file: IO[bytes], columns: Sequence[str], *, delimiter: str = ",") -> None:
        self._file = file
        self._columns = columns
        self._delimiter = delimiter
        self._write_cells([columns])

    def write(self, rows: Sequence[OutputRow]) -> None:
        self._write_cells([[as_text(row.get(name)) for name in self._columns] for row in rows])

    def _write_cells(self, rows: Sequence[Sequence[str]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=self._delimiter, lineterminator="\n").writerows(rows)
        self._file.write(text.getvalue().encode("utf-8", "backslashreplace"))


def as_text(value: object) -> str:
    """Text unchanged, None as empty text, other values as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


class ParquetWriter(RowWriter):
    """One row group per call. Ids are text, because a column has one type."""

    def __init__(self, file: IO[bytes], columns: Sequence[str]) -> None:
        with needed("pyarrow"):
            import pyarrow
            import pyarrow.parquet as parquet
        self._table = pyarrow.Table
        self._schema = pyarrow.schema([(name, kind) for name, kind in _parquet_types(pyarrow) if name in columns])
        self._writer = parquet.ParquetWriter(file, self._schema)

    def write(self, rows: Sequence[OutputRow]) -> None:
        if rows:
            texts = [{**row, **_texts(row)} for row in rows]
            self._writer.write_table(self._table.from_pylist(texts, schema=self._schema))

    def finish(self) -> None:
        try:
            self._writer.close()
        finally:
            self._writer.is_open = False  # else the garbage collector closes it again, when its file is closed

    def abandon(self) -> None:
        with suppress(Exception):
            self.finish()


def _texts(row: OutputRow) -> dict[str, str]:
    """The row's text fields. Lone surrogates are escaped as in CSV, because UTF-8 cannot encode them."""
    named = {name: as_text(row[name]) for name in ("file", "id") if row.get(name) is not None}
    return {name: text.encode("utf-8", "backslashreplace").decode() for name, text in named.items()}


def _parquet_types(pyarrow: Any) -> list[tuple[str, Any]]:
    text, whole, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    result = pyarrow.struct([("index", whole), ("relevance_score", real), ("raw_score", real)])
    truncation = pyarrow.struct([("index", whole), ("original_tokens", whole), ("kept_tokens", whole)])
    item_error = pyarrow.struct([("index", whole), ("code", text), ("message", text)])
    return [
        ("file", text),
        ("line", whole),
        ("id", text),
        ("scores", pyarrow.list_(pyarrow.list_(real))),
        ("results", pyarrow.list_(result)),
        ("truncated", pyarrow.list_(truncation)),
        ("item_errors", pyarrow.list_(item_error)),
    ]
