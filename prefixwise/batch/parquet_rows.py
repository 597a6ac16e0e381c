"""Rows of a Parquet file by their numbers. Whoever goes forward through a row group decodes nothing twice."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from prefixwise.batch.clear_errors import clear_errors
from prefixwise.batch.needs import needed
from prefixwise.batch.parts import InputFile
from prefixwise.batch.storage import open_file
from prefixwise.contract.errors import BatchError

_BATCH_ROWS = 256
_BUFFER_BYTES = 1 << 20  # columns are read in pieces of this size, not a row group at once


def open_parquet(file: InputFile) -> Any:
    """`pyarrow.parquet.ParquetFile`. Raises BatchError."""
    with needed("pyarrow"):
        from pyarrow.parquet import ParquetFile

    opened = open_file(file.url)
    try:
        with clear_errors(file.url):
            return ParquetFile(opened, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except BatchError:
        opened.close()
        raise


class ParquetRows:
    """One open file."""

    def __init__(self, file: InputFile) -> None:
        self._file = open_parquet(file)
        self._starts = [0]  # the first row of each row group, and the number of all rows
        for number in range(self._file.num_row_groups):
            self._starts.append(self._starts[-1] + self._file.metadata.row_group(number).num_rows)
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None  # what is left of the newest
        self._next = -1  # the number of its first row

    def read(self, start: int, stop: int) -> list[dict[str, object]]:
        """Raises BatchError where the file has become shorter."""
        if stop > self._starts[-1]:
            raise BatchError(f"expected at least {stop} rows of Parquet, got {self._starts[-1]}; has the file changed?")
        group = bisect_right(self._starts, start) - 1
        if self._next < self._starts[group] or self._next > start:
            self._open(group)
        self._take(start - self._next)
        return [row for piece in self._take(stop - start) for row in piece.to_pylist()]

    def _open(self, group: int) -> None:
        groups = list(range(group, self._file.num_row_groups))
        self._batches = self._file.iter_batches(_BATCH_ROWS, row_groups=groups, use_threads=False)
        self._batch, self._next = next(self._batches), self._starts[group]

    def _take(self, num_rows: int) -> list[Any]:
        """The next so many rows, as pieces of batches."""
        pieces = []
        while num_rows:
            if not len(self._batch):
                self._batch = next(self._batches)
            piece = self._batch[:num_rows]
            pieces.append(piece)
            self._batch = self._batch[len(piece) :]
            self._next += len(piece)
            num_rows -= len(piece)
        return pieces

    def close(self) -> None:
        self._file.close()
