"""`--output FILE` of `score` and `rerank`: the ranked rows as CSV, TSV, JSON Lines or Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, get_args

from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.read_inputs import DELIMITERS
from prefixwise.contract.result_table import distinct

OutputFormat = Literal["csv", "tsv", "jsonl", "parquet"]
_BY_SUFFIX: dict[str, OutputFormat] = {f".{name}": name for name in get_args(OutputFormat)} | {".ndjson": "jsonl"}


@dataclass(frozen=True)
class OutputFile:
    """A file and its format."""

    path: str
    format: OutputFormat

    @classmethod
    def chosen(cls, path: str | None, asked: OutputFormat | None) -> OutputFile | None:
        """None without a path. Raises CommandError for an unknown format, BatchError for a missing package."""
        if path is None:
            if asked is not None:
                raise CommandError("--output-format is for --output, which was not given", status=MISUSED)
            return None
        file_format = asked or _BY_SUFFIX.get(PurePath(path).suffix.lower())
        if file_format is None:
            expected = f"a name that ends in {', '.join(_BY_SUFFIX)}, or --output-format"
            raise CommandError(f"--output {path}: expected {expected}", status=MISUSED)
        if file_format == "parquet":
            from prefixwise.batch.writers import checked_format

            checked_format("parquet")
        return cls(path, file_format)

    def write(self, best_first: Sequence[Mapping[str, object]]) -> None:
        """Write the rows, which have the same columns, behind their rank. Raises BatchError.

        The file is complete or absent; numbers keep every bit.
        """
        from prefixwise.batch.storage import absolute, writing
        from prefixwise.batch.writers import CsvWriter, JsonlWriter

        columns = distinct(["rank", *(best_first[0] if best_first else ())])
        rows = [dict(zip(columns, (rank, *row.values()), strict=True)) for rank, row in enumerate(best_first, 1)]
        with writing(absolute(self.path)) as file:
            if self.format == "parquet":
                _write_parquet(file, {name: [row[name] for row in rows] for name in columns})
            elif self.format == "jsonl":
                JsonlWriter(file).write(rows)
            else:
                CsvWriter(file, columns, delimiter=DELIMITERS[self.format]).write(rows)


def _write_parquet(file: Any, columns: Mapping[str, Sequence[object]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(dict(columns)), file)
