"""Splitting and reading together: at any limits all rows come back, once and with their lines; damage is reported."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.batch import formats as formats_module
from prefixwise.batch import parts as parts_module
from prefixwise.batch.formats import records
from prefixwise.batch.parts import PartLimits, Row, RowReader, split_files
from prefixwise.contract.errors import BatchError, RequestError
from tests.batch.inputs import found, rows, write_jsonl


def read_all(path: Path, limits: PartLimits) -> list[Row]:
    files = [found(path)]
    reader = RowReader(files)
    read = [row for part in split_files(files, limits) for row in reader.read(part)]
    reader.close()
    return read


@pytest.mark.parametrize("limits", [PartLimits(), PartLimits(3), PartLimits(1), PartLimits(100, 64)])
@pytest.mark.parametrize("compressed", [False, True])
def test_jsonl_comes_back_at_any_size_of_parts(tmp_path: Path, limits: PartLimits, compressed: bool) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(20))
    if compressed:
        packed = tmp_path / "b.jsonl.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    assert read_all(path, limits) == [Row(number + 1, body) for number, body in enumerate(rows(20))]


def test_parts_keep_to_their_limits(tmp_path: Path) -> None:
    files = [found(write_jsonl(tmp_path / "a.jsonl", rows(50)))]
    by_rows = split_files(files, PartLimits(8))
    assert [part.num_rows for part in by_rows] == [8] * 6 + [2]
    assert [part.first_line for part in by_rows] == [1, 9, 17, 25, 33, 41, 49]
    assert all(part.stop - part.start <= 300 for part in split_files(files, PartLimits(50, 300)))


def test_parts_of_several_files_are_numbered_through(tmp_path: Path) -> None:
    files = [found(write_jsonl(tmp_path / f"{name}.jsonl", rows(3))) for name in "ab"]
    assert [(part.index, part.file) for part in split_files(files, PartLimits(2))] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_blank_lines_are_no_rows_and_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n  \n\n{"a": 2}\n\n{"a": 3}')
    for limits in (PartLimits(), PartLimits(1), PartLimits(2)):
        assert read_all(path, limits) == [Row(2, {"a": 1}), Row(5, {"a": 2}), Row(7, {"a": 3})]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    assert read_all(path, PartLimits()) == [Row(1, {"a": 1})]
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfquery,item\nq,i\n")
    assert read_all(path, PartLimits()) == [Row(2, {"query": "q", "items": ["i"]})]


def test_an_empty_file_has_no_parts(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_bytes(b"\n")
        assert split_files([found(tmp_path / name)], PartLimits()) == []


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'"text"', b"\xff", b"[" * 100_000])
def test_a_line_that_is_no_object_is_that_rows_failure(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    first, bad, last = read_all(path, PartLimits())
    assert (first.body, last.body) == ({"a": 1}, {"a": 2})
    assert isinstance(bad.body, RequestError)
    assert (bad.line, bad.body.code) == (2, "invalid_json")
    assert "a row must be a JSON object, got " in bad.body.message


def test_a_row_that_is_too_long_fails_without_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(formats_module, "_PIECE_BYTES", 16)
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": 1}, {"a": "x" * 200}, {"a": 2}])
    first, bad, last = read_all(path, PartLimits(10, 100))
    assert (first, last) == (Row(1, {"a": 1}), Row(3, {"a": 2}))
    assert isinstance(bad.body, RequestError)
    assert (bad.line, bad.body.code) == (2, "row_too_large")


def test_a_quote_that_is_never_closed_is_one_long_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(formats_module, "_PIECE_BYTES", 16)
    path = tmp_path / "a.csv"
    path.write_bytes(b'query,item\nq,i\nq,"open\n' + b"q,i\n" * 100)
    first, bad = read_all(path, PartLimits(10, 50))
    assert first == Row(2, {"query": "q", "items": ["i"]})
    assert isinstance(bad.body, RequestError)
    assert (bad.line, bad.body.code) == (3, "row_too_large")


def test_a_file_that_has_changed_is_noticed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(4))
    files = [found(path)]
    (part,) = split_files(files, PartLimits())
    write_jsonl(path, rows(2))
    with pytest.raises(BatchError, match=r"a\.jsonl has changed since the job began: expected \d+ bytes"):
        RowReader(files).read(part)


def test_a_file_that_becomes_shorter_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(8, note="x" * (1 << 18)))  # more than any buffer
    files = [found(path)]
    first, second = split_files(files, PartLimits(4))
    reader = RowReader(files)
    reader.read(first)
    os.truncate(path, second.start)
    with pytest.raises(BatchError, match=r"expected 4 rows from line 5 on, got [01]; has it changed"):
        reader.read(second)
    reader.close()


cells = st.text(st.sampled_from('ab,"\n\r é'), max_size=6)


@settings(max_examples=60, deadline=None)
@given(table=st.lists(st.tuples(cells, cells), max_size=8), limit=st.integers(1, 4))
def test_csv_cells_may_hold_anything(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[str, str]], limit: int
) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("query", "item"), *table])
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    read = read_all(path, PartLimits(limit))
    assert [row.body for row in read] == [{"query": query, "items": [item]} for query, item in table]
    # The line of a row is that of its first character.
    content = text.getvalue().encode()
    starts = list(records(io.BytesIO(content), quoted=True))[1:]
    assert [row.line for row in read] == [content.count(b"\n", 0, each.start) + 1 for each in starts]


def test_jsonl_does_not_care_for_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"\n{"a": 1}\n')
    bad, good = read_all(path, PartLimits())
    assert isinstance(bad.body, RequestError)
    assert good == Row(2, {"a": 1})


def test_json_in_csv_cells(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "query", "items", "labels", "item_first", "suffix"])
        writer.writerow(["007", "[1]", json.dumps(["a", "b"]), "", "true", "s"])
        writer.writerow(["8", "", '["a"]', '[" yes"]', "", ""])
    assert [row.body for row in read_all(path, PartLimits())] == [
        {"id": "007", "query": "[1]", "items": ["a", "b"], "item_first": True, "suffix": "s"},
        {"id": "8", "query": "", "items": ["a"], "labels": [" yes"]},
    ]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("q,i,[1],x", "invalid_csv", "a row must have 3 cells as the first one has, got 4"),
        ("q,,nonsense", "invalid_json", 'labels must be JSON in a CSV file, got "nonsense"'),
        ('q,"i"x,', "invalid_csv", "a row must be CSV, got"),
    ],
)
def test_bad_csv_rows_say_what_is_wrong(tmp_path: Path, line: str, code: str, words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"query,item,labels\n{line}\nq,i,\n", encoding="utf-8")
    bad, good = read_all(path, PartLimits())
    assert isinstance(bad.body, RequestError)
    assert (bad.line, bad.body.code) == (2, code)
    assert words in bad.body.message
    assert good == Row(3, {"query": "q", "items": ["i"]})


def test_item_and_items_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('query,item,items\nq,i,"[""a""]"\n', encoding="utf-8")
    (row,) = read_all(path, PartLimits())
    assert isinstance(row.body, RequestError)
    assert row.body.code == "conflicting_parameters"


def test_a_header_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("query,query\na,b\n", encoding="utf-8")
    with pytest.raises(BatchError, match='expected every column once, got "query" more than once'):
        read_all(path, PartLimits())


def packed(path: Path) -> bytes:
    return gzip.compress(write_jsonl(path, rows(2_000)).read_bytes())


def test_what_is_no_gzip_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b'{"query": "q"}\n')
    with pytest.raises(BatchError, match=r"a\.jsonl\.gz: Not a gzipped file"):
        split_files([found(tmp_path / "a.jsonl.gz")], PartLimits())


def test_gzip_that_ends_too_early_is_said(tmp_path: Path) -> None:
    content = packed(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(BatchError, match=r"a\.jsonl\.gz: Compressed file ended before"):
        split_files([found(tmp_path / "a.jsonl.gz")], PartLimits())


def test_gzip_with_other_bytes_in_it_is_said(tmp_path: Path) -> None:
    content = bytearray(packed(tmp_path / "a.jsonl"))
    content[len(content) // 2 : len(content) // 2 + 64] = b"\xff" * 64
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(BatchError, match=r"a\.jsonl\.gz: "):
        split_files([found(tmp_path / "a.jsonl.gz")], PartLimits())


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
def test_damage_is_said_by_the_reader_too(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"query,item\nq,i\nq,i\n"))
    files = [found(path)]
    (part, *_) = split_files(files, PartLimits())
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
    (part,) = split_files(files, PartLimits())
    with pytest.raises(BatchError, match=r"a\.parquet: "):
        RowReader(files).read(part)
