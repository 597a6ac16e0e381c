"""The format of a file by its name, and rows of CSV, which end where Python's csv ends them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from prefixwise.batch import formats as formats_module
from prefixwise.batch.formats import FileFormat, input_format, output_format, parse_record, records
from prefixwise.batch.parts import PartLimits, Row, split_files
from prefixwise.contract.errors import BatchError, RequestError
from tests.batch.inputs import found
from tests.batch.test_parts import read_all


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.jsonl", "jsonl"), ("a.ndjson.gz", "jsonl"), ("A.CSV", "csv"), ("a.csv.gz", "csv"), ("a.b.parquet", "parquet")],
)
def test_the_name_says_the_format(name: str, expected: FileFormat) -> None:
    assert input_format(name, None) == expected


def test_what_is_asked_for_comes_before_the_name() -> None:
    assert input_format("a.txt", "csv") == "csv"
    assert output_format("a.txt", "parquet") == "parquet"


@pytest.mark.parametrize("name", ["a.txt", "a", "jsonl", "a.parquet.gz"])
def test_other_names_are_refused_for_input(name: str) -> None:
    with pytest.raises(BatchError, match=name):
        input_format(name, None)


@pytest.mark.parametrize("name", ["a.txt", "a", "a.jsonl.gz"])
def test_other_names_are_refused_for_output(name: str) -> None:
    with pytest.raises(BatchError, match=r"expected a name that ends in \.jsonl, "):
        output_format(name, None)


def write_csv(folder: Path, content: bytes) -> Path:
    path = folder / "a.csv"
    path.write_bytes(content)
    return path


def our_rows(content: bytes) -> list[list[str]]:
    found = [each for each in records(io.BytesIO(content), quoted=True) if not each.is_blank]
    return [parse_record(content[each.start : each.stop]) for each in found]


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from(["a", ",", '"', '""', ',"', '",', "\n", "\r\n"]), max_size=24).map("".join),
    piece_bytes=st.sampled_from([1, 2, 3, 1 << 20]),
)
@example(text='a"\na\n', piece_bytes=1)  # the quote begins a piece, and not a cell
def test_rows_are_those_of_pythons_csv(text: str, piece_bytes: int) -> None:
    try:
        expected = [cells for cells in csv.reader(io.StringIO(text, newline=""), strict=True) if cells]
    except csv.Error:
        assume(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats_module, "_PIECE_BYTES", piece_bytes)
        assert our_rows(text.encode()) == expected


def test_a_quote_within_a_cell_is_text(tmp_path: Path) -> None:
    path = write_csv(tmp_path, b'query,item\nq1,5" pipe\nq2,second\nq3,4" tube\nq4,x\n')
    for limits in (PartLimits(), PartLimits(1)):
        assert read_all(path, limits) == [
            Row(2, {"query": "q1", "items": ['5" pipe']}),
            Row(3, {"query": "q2", "items": ["second"]}),
            Row(4, {"query": "q3", "items": ['4" tube']}),
            Row(5, {"query": "q4", "items": ["x"]}),
        ]


def test_a_header_in_quotes_may_follow_a_byte_order_mark(tmp_path: Path) -> None:
    path = write_csv(tmp_path, b'\xef\xbb\xbf"query","it\nem"\nq,i\n')
    assert read_all(path, PartLimits()) == [Row(3, {"query": "q", "it\nem": "i"})]


def test_a_file_whose_lines_end_otherwise_is_refused(tmp_path: Path) -> None:
    path = write_csv(tmp_path, b"query,item\rq1,one\rq2,two\r")
    with pytest.raises(BatchError, match=r"a\.csv: .* one row of CSV, got 3 in .*lines must end with"):
        split_files([found(path)], PartLimits())


def test_a_line_that_is_several_rows_is_that_rows_failure(tmp_path: Path) -> None:
    path = write_csv(tmp_path, b"query,item\nq1,one\rq2,two\nq3,three\n")
    bad, good = read_all(path, PartLimits())
    assert isinstance(bad.body, RequestError)
    assert (bad.line, bad.body.code) == (2, "invalid_csv")
    assert "a row must be one row of CSV, got 2 in " in bad.body.message
    assert good == Row(3, {"query": "q3", "items": ["three"]})
