"""`--output` of score and rerank: the same rows in every format, and as the JSON has them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunMain
from tests.cli.sample_request import ITEMS, WITH_LABELS
from tests.cli.sample_rerank import WITH_DOCUMENTS

TAB_AND_QUOTE = 'a "b"\tc\nd'  # needs quotes in every table
SCORE = ("score", *WITH_LABELS, "--item", TAB_AND_QUOTE)
RERANK = ("rerank", *WITH_DOCUMENTS, "-d", TAB_AND_QUOTE)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that is read as others read it; the numbers of a text file as numbers."""
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        return list(parquet.read_table(path).to_pylist())
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    texts = ("item", "document")
    return [{name: cell if name in texts else json.loads(cell) for name, cell in row.items()} for row in rows]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_scores_are_written_best_first_with_every_bit(run_main: RunMain, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scores.{suffix}"
    ran = run_main(*SCORE, "--output", str(path), "--json")
    expected = [
        {"rank": rank, "index": each["index"], "item": each["item"], "y": each["scores"][0], "z": each["scores"][1]}
        for rank, each in enumerate(json.loads(ran.out)["results"], 1)
    ]
    assert (ran.status, len(expected)) == (0, len(ITEMS) + 1)
    assert read_rows(path) == expected
    assert list(read_rows(path)[0]) == ["rank", "index", "item", "y", "z"]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_documents_are_written_best_first_with_every_bit(run_main: RunMain, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"ranking.{suffix}"
    ran = run_main(*RERANK, "--output", str(path), "--json")
    expected = [
        {
            "rank": rank,
            "index": each["index"],
            "document": each["document"]["text"],
            "relevance_score": each["relevance_score"],
            "raw_score": each["raw_score"],
        }
        for rank, each in enumerate(json.loads(ran.out)["results"], 1)
    ]
    assert read_rows(path) == expected


@pytest.mark.parametrize("command", [SCORE, RERANK])
def test_the_file_is_in_place_of_the_table(run_main: RunMain, tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "rows"
    ran = run_main(*command, "--output", str(path), "--output-format", "csv", "--top", "2", "--quiet")
    assert (ran.status, ran.out) == (0, "")
    assert len(read_rows(path)) == 2


def test_what_was_written_can_be_read_again(run_main: RunMain, tmp_path: Path) -> None:
    path = tmp_path / "scores.tsv"
    run_main(*SCORE, "--output", str(path))
    again = run_main("score", "-q", "q", "-l", "y", "--items-file", str(path), "--json")
    assert sorted(each["item"] for each in json.loads(again.out)["results"]) == sorted([*ITEMS, TAB_AND_QUOTE])


def test_a_mode_of_one_number_names_its_column(run_main: RunMain, tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    run_main(*SCORE, "--output", str(path), "--score-mode", "logit_diff")
    assert list(read_rows(path)[0]) == ["rank", "index", "item", "logit_diff"]


def test_a_file_that_cannot_be_written_is_one_clear_line(run_main: RunMain, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = run_main(*SCORE, "--output", str(tmp_path / "file" / "scores.csv"), "--quiet")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"error: {tmp_path}/file/scores.csv: ")
