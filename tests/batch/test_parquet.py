"""Rows of Parquet files, in any order of parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwise.batch.parts import PartLimits, Row, RowReader, split_files
from prefixwise.contract.errors import BatchError
from tests.batch.inputs import found, rows

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NUM_ROWS = 1000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet") / "in.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows(NUM_ROWS)), path, row_group_size=300)
    return path


@pytest.mark.parametrize("limits", [PartLimits(), PartLimits(7), PartLimits(1000, 1000)])
def test_all_rows_come_back(path: Path, limits: PartLimits) -> None:
    files = [found(path)]
    reader = RowReader(files)
    read = [row for part in split_files(files, limits) for row in reader.read(part)]
    reader.close()
    assert read == [Row(number + 1, body) for number, body in enumerate(rows(NUM_ROWS))]


def test_parts_end_with_row_groups_and_keep_to_their_limits(path: Path) -> None:
    parts = split_files([found(path)], PartLimits(200))
    assert [part.num_rows for part in parts] == [200, 100, 200, 100, 200, 100, 100]
    assert max(part.num_rows for part in split_files([found(path)], PartLimits(1000, 1000))) < 100


def test_parts_may_be_read_in_any_order(path: Path) -> None:
    files = [found(path)]
    parts = split_files(files, PartLimits(100))
    reader = RowReader(files)
    for number in (5, 1, 2, 9, 9, 0, 8):
        assert [row.line for row in reader.read(parts[number])] == list(range(100 * number + 1, 100 * number + 101))
    reader.close()


def test_what_is_not_parquet_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"nonsense")
    with pytest.raises(BatchError, match=r"a\.parquet: "):
        split_files([found(tmp_path / "a.parquet")], PartLimits())
