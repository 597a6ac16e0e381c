"""From files to parts, in one quick pass that looks at line ends (or Parquet's own directory) and at nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prefixwise.batch.clear_errors import clear_errors
from prefixwise.batch.csv_cells import read_header
from prefixwise.batch.parquet_rows import open_parquet
from prefixwise.batch.parts import InputFile, Part, PartLimits
from prefixwise.batch.records import Record, records
from prefixwise.batch.storage import open_file

OnRows = Callable[[int], None]  # rows found so far


class _Span(NamedTuple):
    start: int
    stop: int
    first_line: int
    num_rows: int


def cut(files: Sequence[InputFile], limits: PartLimits, on_rows: OnRows = lambda rows: None) -> list[Part]:
    """All rows of all files, each in one part, in their order. Raises BatchError where a file cannot be read."""
    parts: list[Part] = []
    num_rows = 0
    for number, file in enumerate(files):
        for span in _spans(file, limits):
            parts.append(Part(len(parts), number, *span))
            num_rows += span.num_rows
            on_rows(num_rows)
    return parts


def _spans(file: InputFile, limits: PartLimits) -> Iterator[_Span]:
    with clear_errors(file.url):
        yield from (_parquet_spans if file.format == "parquet" else _text_spans)(file, limits)


def _text_spans(file: InputFile, limits: PartLimits) -> Iterator[_Span]:
    is_csv = file.format == "csv"
    with open_file(file.url) as opened:
        if is_csv and any(not each.is_blank for each in records(opened, quoted=True)):
            read_header(opened, file.url)  # names that nobody can read are told now
        opened.seek(0)
        rows = (each for each in records(opened, quoted=is_csv) if not each.is_blank)
        if is_csv:
            next(rows, None)  # the names of the columns
        yield from group(rows, limits)


def group(rows: Iterator[Record], limits: PartLimits) -> Iterator[_Span]:
    """Neighbours together, as many as the limits allow."""
    held: list[Record] = []
    for row in rows:
        if held and (len(held) == limits.num_rows or row.stop - held[0].start > limits.num_bytes):
            yield _span(held)
            held = []
        held.append(row)
    if held:
        yield _span(held)


def _span(held: list[Record]) -> _Span:
    return _Span(held[0].start, held[-1].stop, held[0].line, len(held))


def _parquet_spans(file: InputFile, limits: PartLimits) -> Iterator[_Span]:
    """Within row groups, by the average size of their rows."""
    with open_parquet(file) as opened:
        first = 0
        for number in range(opened.num_row_groups):
            about = opened.metadata.row_group(number)
            mean_bytes = max(1, about.total_byte_size // max(1, about.num_rows))
            most = max(1, min(limits.num_rows, limits.num_bytes // mean_bytes))
            for start in range(first, first + about.num_rows, most):
                stop = min(start + most, first + about.num_rows)
                yield _Span(start, stop, start + 1, stop - start)
            first += about.num_rows
