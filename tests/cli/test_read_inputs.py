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
            ':2: expected a JSON string or an object with a string "text", got "{b"',
        ),
        ("items.jsonl", b'"a"\n\n"b"\n', ":2: expected a JSON string"),
        ("items.jsonl", b"5\n", ':1: expected a JSON string or an object with a string "text", got 5 (int)'),
        ("items.jsonl", b'{"text": null}\n', ":1: expected a JSON string"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_line(
    run_main: RunMain, tmp_path: Path, name: str, content: bytes, error: str
) -> None:
    (tmp_path / name).write_bytes(content)
    ran = run_main("score", "-q", QUERY, "-l", "y", "--items-file", str(tmp_path / name))
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"error: {tmp_path / name}{error}")
    assert ran.err.count("\n") == 1


def test_a_file_that_cannot_be_read_is_an_error(run_main: RunMain, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    ran = run_main("score", "-q", QUERY, "-l", "y", "--items-file", missing)
    assert (ran.status, ran.err) == (1, f"error: cannot read {missing}: No such file or directory\n")
    ran = run_main("score", "--query-file", str(tmp_path), "-l", "y", "-i", "x")
    assert (ran.status, ran.err) == (1, f"error: cannot read {tmp_path}: Is a directory\n")
    ran = run_main("score", "--query-file", "two\nlines \x1b[31m", "-l", "y", "-i", "x")
    assert ran.err == "error: cannot read two lines \\x1b[31m: No such file or directory\n"
