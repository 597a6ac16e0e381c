"""An input and the parts that it is cut into: plain values, which travel to other machines."""

from __future__ import annotations

from dataclasses import dataclass

from prefixwise.batch.formats import FileFormat

MAX_ROW_BYTES = 64 << 20  # a longer row fails, and is not even read


@dataclass(frozen=True)
class InputFile:
    """One file of the input, and how to know it again."""

    url: str
    name: str
    format: FileFormat
    size: int
    version: str


@dataclass(frozen=True)
class Part:
    """Some rows of one file, small enough to be in memory: the unit of work, of writing and of resuming."""

    index: int  # its place in the job
    file: int  # which of the job's files
    start: int  # bytes, unpacked; rows in Parquet
    stop: int
    first_line: int  # of the file, from 1; in Parquet the first row
    num_rows: int


@dataclass(frozen=True)
class PartLimits:
    """How large a part may be; one row may be larger."""

    num_rows: int = 1024
    num_bytes: int = 16 << 20


@dataclass(frozen=True)
class PartRecord:
    """What is known of a part that is done."""

    index: int
    num_rows: int
    num_items: int  # of the rows that have scores
    num_failures: int  # rows
    warnings: tuple[str, ...] = ()
