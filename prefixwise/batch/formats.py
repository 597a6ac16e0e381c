"""Which format a file has, by its name."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal, get_args

from prefixwise.contract.errors import BatchError

FileFormat = Literal["jsonl", "csv", "parquet"]
FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)

_BY_SUFFIX: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_GZIP = ".gz"


def is_compressed(name: str) -> bool:
    """With gzip; Parquet compresses by itself."""
    return name.lower().endswith(_GZIP)


def input_format(name: str, asked: FileFormat | None) -> FileFormat:
    """Raises BatchError for a name that says nothing, or a Parquet file in gzip."""
    file_format = asked or _by_name(name.lower().removesuffix(_GZIP))
    if file_format is None:
        raise BatchError(f"{name}: expected {_expected()} (or with .gz), or --input-format, got neither")
    if file_format == "parquet" and is_compressed(name):
        raise BatchError(f"{name}: Parquet is read as it is, not within gzip; unpack it")
    return file_format


def output_format(name: str, asked: FileFormat | None) -> FileFormat:
    """Raises BatchError for a name that says nothing, or gzip, which is not written."""
    if is_compressed(name):
        raise BatchError(f"{name}: the output is written as it is, not as gzip; expected {_expected()}")
    file_format = asked or _by_name(name.lower())
    if file_format is None:
        raise BatchError(f"{name}: expected {_expected()}, or --output-format, got neither")
    return file_format


def _by_name(name: str) -> FileFormat | None:
    return _BY_SUFFIX.get(PurePosixPath(name).suffix)


def _expected() -> str:
    return "a name that ends in " + ", ".join(_BY_SUFFIX)
