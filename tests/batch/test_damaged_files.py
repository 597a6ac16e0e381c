"""Files that cannot be read to their end: one clear line that names them, when they are cut and when they are read."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from prefixwise.batch.cut import cut
from prefixwise.batch.parts import PartLimits
from prefixwise.batch.rows import RowReader
from prefixwise.contract.errors import BatchError
from tests.batch.inputs import found, rows, write_jsonl


def packed(path: Path) -> bytes:
    return gzip.compress(write_jsonl(path, rows(2_000)).read_bytes())


def test_what_is_no_gzip_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b'{"query": "q"}\n')
    with pytest.raises(BatchError, match=r"a\.jsonl\.gz: Not a gzipped file"):
        cut([found(tmp_path / "a.jsonl.gz")], PartLimits())


def test_gzip_that_ends_too_early_is_said(tmp_path: Path) -> None:
    content = packed(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(BatchError, match=r"a\.jsonl\.gz: Compressed file ended before"):
        cut([found(tmp_path / "a.jsonl.gz")], PartLimits())


def test_gzip_with_other_bytes_in_it_is_said(tmp_path: Path) -> None:
    content = bytearray(packed(tmp_path / "a.jsonl"))
    content[len(content) // 2 : len(content) // 2 + 64] = b"\xff" * 64
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(BatchError, match=r"a\.jsonl\.gz: "):
        cut([found(tmp_path / "a.jsonl.gz")], PartLimits())


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
def test_damage_is_said_by_the_reader_too(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"query,item\nq,i\nq,i\n"))
    files = [found(path)]
    (part, *_) = cut(files, PartLimits())
    time = path.stat().st_mtime_ns
    path.write_bytes(b"x" * path.stat().st_size)  # of the same size and time, as on a bad disk
    os.utime(path, ns=(time, time))
    with pytest.raises(BatchError, match=rf"{name}: Not a gzipped file"):
        RowReader(files).read(part)


def test_a_damaged_page_of_parquet_is_said(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows(500)), path)
    content = bytearray(path.read_bytes())
    content[4:2_000] = b"\xff" * 1_996  # the pages; the directory is at the end
    path.write_bytes(content)
    files = [found(path)]
    (part,) = cut(files, PartLimits())
    with pytest.raises(BatchError, match=r"a\.parquet: "):
        RowReader(files).read(part)
