from __future__ import annotations

import csv
import gc
import io
import json
from pathlib import Path
from typing import Any

import pytest

from prefixwise.batch.writers import COLUMNS, CsvWriter, JsonlWriter, open_writer

THIRD = 1 / 3
ROWS: list[dict[str, Any]] = [
    {"line": 1, "id": 'a,"b"\n', "scores": [[THIRD, 5e-324], [1e300, -0.0]]},
    {"line": 2, "id": 7, "scores": [[THIRD, 0.5], None], "item_errors": [{"index": 1, "code": "c", "message": "m"}]},
    {"line": 3, "results": [{"index": 1, "relevance_score": 0.1, "raw_score": -THIRD}]},
    {"line": 9, "scores": [[0.25]], "truncated": [{"index": 0, "original_tokens": 9, "kept_tokens": 2}]},
]


def test_jsonl_holds_every_bit() -> None:
    file = io.BytesIO()
    writer = JsonlWriter(file)
    writer.write(ROWS[:1])
    writer.write(ROWS[1:])
    assert [json.loads(line) for line in file.getvalue().splitlines()] == ROWS


def test_csv_has_the_same_columns_in_every_row() -> None:
    file = io.BytesIO()
    CsvWriter(file, COLUMNS[1:]).write(ROWS)
    read = list(csv.DictReader(io.StringIO(file.getvalue().decode(), newline="")))
    assert [row["id"] for row in read] == ['a,"b"\n', "7", "", ""]
    assert [json.loads(row["scores"]) if row["scores"] else None for row in read] == [row.get("scores") for row in ROWS]
    assert json.loads(read[2]["results"]) == ROWS[2]["results"]
    assert read[0]["truncated"] == ""


@pytest.mark.parametrize("with_file", [False, True])
def test_parquet_has_lists_and_every_bit(tmp_path: Path, with_file: bool) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"file": "a.jsonl", **row} for row in ROWS] if with_file else ROWS
    with (tmp_path / "a.parquet").open("wb") as file:
        writer = open_writer("parquet", file, with_file=with_file)
        writer.write(rows[:2])
        writer.write([])
        writer.write(rows[2:])
        writer.finish()
    read = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [{name: value for name, value in row.items() if value is not None} for row in read] == [
        {**row, "id": str(row["id"])} if "id" in row else row for row in rows
    ]
    assert ("file" in read[0]) == with_file


def test_parquet_without_rows_is_still_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    with (tmp_path / "a.parquet").open("wb") as file:
        open_writer("parquet", file, with_file=False).finish()
    assert parquet.read_table(tmp_path / "a.parquet").column_names == list(COLUMNS[1:])


def test_the_reported_failure_is_the_first(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    file = (tmp_path / "a.parquet").open("wb")
    with pytest.raises(KeyError, match="the cause"), open_writer("parquet", file, with_file=False) as writer:
        writer.write(ROWS)
        file.close()  # so that Arrow cannot write its end
        raise KeyError("the cause")
    del writer
    gc.collect()  # a second failure there would be a warning, which pytest takes for an error
