from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixwise.engine.engine import ScoringEngine
from tests.cli.conftest import RunMain
from tests.cli.sample_request import QUERY, expected_body


def scored_items(run_main: RunMain, *args: str, stdin: bytes = b"") -> list[str]:
    """The items that the program understood, in the order of the request, as the table spells them."""
    ran = run_main("score", "-q", QUERY, "-l", "y", *args, stdin=stdin)
    assert ran.status == 0, ran.err
    rows = [line.split(maxsplit=2)[2].rsplit(maxsplit=1) for line in ran.out.splitlines()[1:]]
    by_index = sorted((int(row[-1]), row[0] if len(row) == 2 else "") for row in rows)
    return [text.rstrip() for _, text in by_index]


@pytest.mark.parametrize(
    ("content", "items"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb", ["a", "b"]),
        (b"\xef\xbb\xbfa\nb\n\n \n\n", ["a", "b"]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b'"a"\n', ['"a"']),
        ("a\u2028b\n".encode(), [r"a\u2028b"]),
    ],
)
def test_a_file_holds_one_item_per_line(run_main: RunMain, tmp_path: Path, content: bytes, items: list[str]) -> None:
    (tmp_path / "items.txt").write_bytes(content)
    assert scored_items(run_main, "--items-file", str(tmp_path / "items.txt")) == items


JSONL = b'"a"\n{"text": "b\\tc", "id": 7}\n\n'


def test_jsonl_is_told_by_the_suffix(run_main: RunMain, tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_bytes(JSONL)
    file = str(tmp_path / "items.jsonl")
    assert scored_items(run_main, "--items-file", file) == ["a", r"b\tc"]
    assert scored_items(run_main, "--items-file", file, "--items-format", "lines")[0] == '"a"'


def test_jsonl_is_told_by_the_option(run_main: RunMain) -> None:
    assert scored_items(run_main, "--items-file", "-", stdin=JSONL)[0] == '"a"'
    assert scored_items(run_main, "--items-file", "-", "--items-format", "jsonl", stdin=JSONL) == [
        "a",
        r"b\tc",
    ]


@pytest.mark.parametrize(
    ("name", "content", "args"),
    [
        ("items.csv", b'\xef\xbb\xbfid,item\r\n7,"a ""b"", c"\r\n\r\n8,d\r\n', ()),
        ("items.CSV", b'id, text \n7,"a ""b"", c"\n8,d\n', ()),
        ("items.tsv", b'id\titem\n7\t"a ""b"", c"\n8\td\n', ()),
        ("items.csv", b'item,body\n7,"a ""b"", c"\n8,d\n', ("--items-field", "body")),
        ("items", b'item\n"a ""b"", c"\nd\n', ("--items-format", "csv")),
        ("items.jsonl", b'{"body": "a \\"b\\", c"}\n"d"\n', ("--items-field", "body")),
        ("items.ndjson", b'{"item": "a \\"b\\", c", "text": "x"}\n{"text": "d"}\n', ()),
    ],
)
def test_a_row_of_a_table_holds_one_item_and_the_header_none(
    run_main: RunMain, tmp_path: Path, name: str, content: bytes, args: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert scored_items(run_main, "--items-file", str(tmp_path / name), *args) == ['a "b", c', "d"]


def test_parquet_is_read_by_its_column(run_main: RunMain, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "items.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["a", "b"], "other": ["c", None]}), path)
    assert scored_items(run_main, "--items-file", str(path)) == ["a", "b"]
    for field, error in (("id", 'row 1: expected text in "id", got 1 (int)'), ("other", "row 2: expected text in")):
        ran = run_main("score", "-q", QUERY, "-l", "y", "--items-file", str(path), "--items-field", field)
        assert (ran.status, ran.err.startswith(f"error: {path}: {error}")) == (1, True), ran.err
    path.write_bytes(b"PAR1")
    ran = run_main("score", "-q", QUERY, "-l", "y", "--items-file", str(path))
    assert (ran.status, ran.err.startswith(f"error: {path}: ")) == (1, True), ran.err
    assert run_main("score", "-q", "x", "-l", "y", "--items-file", "-", "--items-format", "parquet").status == 2


def test_the_file_s_items_come_after_those_of_the_command_line(run_main: RunMain) -> None:
    items = scored_items(run_main, "--items-file", "-", "--item", "x", "--item", "y", stdin=b"a\nb\n")
    assert items == ["x", "y", "a", "b"]


@pytest.mark.parametrize("line_end", ["", "\n", "\r\n"])
def test_a_query_file_loses_its_last_line_end_only(
    run_main: RunMain, shared_engine: ScoringEngine, tmp_path: Path, line_end: str
) -> None:
    query = "Is this\na fox? \n"
    (tmp_path / "query").write_bytes((query + line_end).encode())
    ran = run_main("score", "--query-file", str(tmp_path / "query"), "-i", "x", "-l", "y", "--json")
    meant = query if line_end else query.removesuffix("\n")
    assert json.loads(ran.out) == expected_body(shared_engine, query=meant, items=["x"], labels=["y"])


def test_the_query_may_come_from_standard_input(run_main: RunMain, shared_engine: ScoringEngine) -> None:
    ran = run_main("score", "--query-file", "-", "-i", "x", "-l", "y", "--json", stdin=b"fox?\n")
    assert json.loads(ran.out) == expected_body(shared_engine, query="fox?", items=["x"], labels=["y"])


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("items.txt", b"a\nb\xff\n", ":2: expected UTF-8, got the byte 0xff"),
        (
            "items.jsonl",
            b'"a"\n{b\n',
            ':2: expected a JSON string or an object with a string "item" or "text", got "{b"',
        ),
        ("items.jsonl", b'"a"\n\n"b"\n', ":2: expected a JSON string"),
        ("items.jsonl", b"5\n", ':1: expected a JSON string or an object with a string "item" or "text", got 5'),
        (
            "items.jsonl",
            b'{"text": null}\n',
            ':1: expected a JSON string or an object with a string "item" or "text", got {"text": null}',
        ),
        ("items.csv", b"title,body\na,b\n", ': expected a column "item" or "text", got "title", "body"'),
        ("items.csv", b"The quick brown fox\nthe lazy dog\n", ': expected a column "item" or "text", got "The quick'),
        ("items.csv", b"", ': expected a column "item" or "text", got an empty file'),
        ("items.csv", b"item,item\na,b\n", ': expected one column "item", got 2'),
        ("items.csv", b"id,item\n1,a\n\n2,b,c\n", ":4: expected 2 cells as the first row has, got 3"),
        ("items.csv", b'item\n"a\n', ":2: unexpected end of data"),
        ("items.tsv", b"id,item\n1,a\n", ': expected a column "item" or "text", got "id,item"'),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_line(
    run_main: RunMain, tmp_path: Path, name: str, content: bytes, error: str
) -> None:
    (tmp_path / name).write_bytes(content)
    ran = run_main("score", "-q", QUERY, "-l", "y", "--items-file", str(tmp_path / name))
    assert (ran.status, ran.out) == (1, "")
    first, *hint = ran.err.splitlines()
    assert first.startswith(f"error: {tmp_path / name}{error}")
    assert all(line.startswith("hint: --items-field NAME names the field") for line in hint)


def test_a_file_that_cannot_be_read_is_an_error(run_main: RunMain, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    ran = run_main("score", "-q", QUERY, "-l", "y", "--items-file", missing)
    assert (ran.status, ran.err) == (1, f"error: cannot read {missing}: No such file or directory\n")
    ran = run_main("score", "--query-file", str(tmp_path), "-l", "y", "-i", "x")
    assert (ran.status, ran.err) == (1, f"error: cannot read {tmp_path}: Is a directory\n")
    ran = run_main("score", "--query-file", "two\nlines \x1b[31m", "-l", "y", "-i", "x")
    assert ran.err == "error: cannot read two lines \\x1b[31m: No such file or directory\n"
