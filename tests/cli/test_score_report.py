from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixwise.cli.score_report import score_table
from prefixwise.contract.result import ScoreResult, Usage
from tests.cli.conftest import FAKE_PROGRAM, RunMain, run_on_terminal, run_process
from tests.cli.sample_request import QUERY, TOO_LONG, WITH_LABELS


def ranking(scores: list[list[float] | None], items: list[str], **fields: Any) -> ScoreResult:
    labels = fields.pop("labels", (" yes", "no"))
    mode = fields.pop("score_mode", "softmax")
    return ScoreResult(scores, items, labels, mode, "some-model", Usage(10), **fields)


def test_the_table_is_ranked_and_aligned() -> None:
    result = ranking([[0.25, 0.75], [0.99999, 0.00001], None, [0.5, 0.5]], ["worst", "best", "none", "second"])
    assert score_table(result, None, 80).splitlines() == [
        'rank  " yes"       no  item    index',
        "   1  1.0000  1.0e-05  best        1",
        "   2  0.5000   0.5000  second      3",
        "   3  0.2500   0.7500  worst       0",
    ]


def test_a_mode_of_one_number_names_its_column() -> None:
    result = ranking([[-12.34567], [3.0]], ["a", "b"], score_mode="logit_diff")
    assert score_table(result, None, 80).splitlines() == [
        "rank  logit_diff  item  index",
        "   1       3.000  b         1",
        "   2     -12.346  a         0",
    ]


@pytest.mark.parametrize("item", ["word " * 100, "漢字" * 100, "\x1b[31m" * 100, "👩‍👩‍👧 " * 100])
def test_an_item_is_cut_to_the_width_and_cannot_control_the_terminal(item: str) -> None:
    from rich.cells import cell_len

    header, row = score_table(ranking([[1.0, 0.0]], [item]), None, 60).splitlines()
    assert cell_len(header) == 60
    assert cell_len(row) == 60
    assert "..." in row
    assert "\x1b" not in row


def test_items_stay_on_their_line(run_main: RunMain) -> None:
    ran = run_main("score", "-q", QUERY, "-l", "y", "-i", "a\nb\tc", "-i", "[bold]d[/bold]")
    assert len(ran.out.splitlines()) == 3
    assert r"a\nb\tc" in ran.out
    assert "[bold]d[/bold]" in ran.out


def test_top_keeps_the_best(run_main: RunMain) -> None:
    every_row = run_main("score", *WITH_LABELS).out.splitlines()
    ran = run_main("score", *WITH_LABELS, "--top", "2")
    assert [row.split() for row in ran.out.splitlines()] == [row.split() for row in every_row[:3]]
    assert "3 items" in ran.err


def test_the_summary_names_what_ran_and_quiet_drops_it(run_main: RunMain) -> None:
    ran = run_main("score", *WITH_LABELS, "--algorithm", "serial")
    assert ran.err.startswith("fake-model with fake on cpu, float32, serial: 3 items, ")
    assert ran.err.count("\n") == 1
    assert run_main("score", *WITH_LABELS, "--quiet").err == ""


def test_cut_items_are_noted_on_stderr(run_main: RunMain) -> None:
    ran = run_main("score", *WITH_LABELS, "--max-tokens-per-item", "2", "--quiet")
    assert ran.err == "warning: 3 of 3 items cut to 2 tokens: index 0, 1, 2\n"


def test_failed_items_are_noted_on_stderr_and_not_ranked(run_main: RunMain) -> None:
    too_long = [arg for _ in range(7) for arg in ("--item", TOO_LONG)]
    ran = run_main("score", *WITH_LABELS, *too_long, "--on-item-error", "report", "--quiet")
    notes = ran.err.splitlines()
    assert (ran.status, len(ran.out.splitlines()), len(notes)) == (0, 1 + 3, 6)
    assert notes[0].startswith("warning: no score: items[3] must fit")
    assert notes[-1] == "warning: no score for 2 more items; --json lists them all"


def test_an_answer_without_any_score_is_an_empty_table(run_main: RunMain) -> None:
    ran = run_main("score", "-q", QUERY, "-l", "y", "-i", TOO_LONG, "--on-item-error", "report")
    assert ran.out.splitlines() == ["rank  y  item  index"]
    assert "fake-model with fake on cpu, float32: 1 item, " in ran.err


def test_debug_is_shown_when_asked_for(run_main: RunMain) -> None:
    assert "debug" not in json.loads(run_main("score", *WITH_LABELS, "--json").out)
    table, with_debug = run_main("score", *WITH_LABELS), run_main("score", *WITH_LABELS, "--debug", "--quiet")
    assert with_debug.out == table.out
    keys = [line.partition(":")[0] for line in with_debug.err.splitlines()]
    assert keys == ["algorithm", "reason", "mask", "chunks", "batches[0]", "cached_tokens", "milliseconds"]


def many_items(tmp_path: Path, count: int) -> tuple[str, ...]:
    file = tmp_path / f"{count}.txt"
    file.write_text("".join(f"fox {index}\n" for index in range(count)))
    return (
        *FAKE_PROGRAM,
        "score",
        "-q",
        QUERY,
        "-l",
        "y",
        "--items-file",
        str(file),
        "--token-budget",
        "400",
    )


def test_many_items_get_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    assert "300/300" in run_on_terminal(many_items(tmp_path, 300)).err
    few = run_on_terminal(many_items(tmp_path, 200)).err
    assert "/200" not in few
    assert "loading the embedded model ..." in few
    assert run_on_terminal([*many_items(tmp_path, 300), "--quiet"]).err == ""
    piped = run_process(many_items(tmp_path, 300)).err
    assert piped.startswith("fake-model with fake on cpu")
    assert piped.count("\n") == 1


def test_the_table_is_plain_where_stdout_is_no_terminal(tmp_path: Path) -> None:
    ran = run_on_terminal(many_items(tmp_path, 3), COLUMNS="40")
    header, *rows = ran.out.splitlines()
    assert header.split() == ["rank", "y", "item", "index"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert "\x1b" not in ran.out
