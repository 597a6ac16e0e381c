from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.cli.engine_options import open_engine
from prefixwise.cli.score import score_table
from prefixwise.contract.result import ScoreResult, Usage
from prefixwise.engine.engine import ScoringEngine
from prefixwise.launch.options import EngineOptions
from tests.checkpoints import add_tokenizer, make_classifier
from tests.cli.conftest import FAKE_PROGRAM, REAL_PROGRAM, RunMain, num_threads, run_on_terminal, run_process
from tests.cli.engine_flags import ENGINE_ARGS, ENGINE_OPTIONS
from tests.cli.sample_request import INPUT, ITEMS, QUERY, TOO_LONG, WITH_LABELS, expected_body

# From options to the request


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (("--softmax",), {"apply_softmax": True}),
        (("--score-mode", "softmax"), {"score_mode": "softmax"}),
        (("--score-mode", "logprob"), {"score_mode": "logprob"}),
        (("--score-mode", "logit"), {"score_mode": "logit"}),
        (("--score-mode", "logit_diff"), {"score_mode": "logit_diff"}),
        (("--score-mode", "sigmoid"), {"score_mode": "sigmoid"}),
        (("--item-first",), {"item_first": True}),
        (("--suffix", " Answer: "), {"suffix": " Answer: "}),
        (("--suffix", r"\n"), {"suffix": r"\n"}),
        (("--tokenization", "joint"), {"tokenization": "joint"}),
        (("--max-tokens-per-item", "2"), {"max_tokens_per_item": 2}),
        (("--label", "q"), {"labels": ["y", "z", "q"]}),
        (
            ("--label-scoring", "sequence", "--label", "perhaps"),
            {"label_scoring": "sequence", "labels": ["y", "z", "perhaps"]},
        ),
        (
            ("--item", TOO_LONG, "--on-item-error", "report"),
            {"items": [*ITEMS, TOO_LONG], "on_item_error": "report"},
        ),
    ],
)
def test_an_option_does_what_the_field_of_the_request_does(
    run_main: RunMain, shared_engine: ScoringEngine, args: tuple[str, ...], fields: dict[str, Any]
) -> None:
    ran = run_main("score", *WITH_LABELS, *args, "--json")
    body = json.loads(ran.out)
    assert ran.status == 0
    assert body == expected_body(shared_engine, **fields)
    assert body != expected_body(shared_engine)


def test_without_options_a_score_is_a_probability_over_the_vocabulary(
    run_main: RunMain, shared_engine: ScoringEngine
) -> None:
    ran = run_main("score", *WITH_LABELS, "--json")
    assert json.loads(ran.out) == expected_body(shared_engine, score_mode="prob")
    assert ran.out.count("\n") == 1


def test_labels_may_be_token_ids(run_main: RunMain, shared_engine: ScoringEngine) -> None:
    ran = run_main("score", *INPUT, "--label-token-id", "7", "--label-token-id", "0", "--json")
    assert json.loads(ran.out) == expected_body(shared_engine, labels=None, label_token_ids=[7, 0])
    table = run_main("score", *INPUT, "--label-token-id", "7", "--label-token-id", "0").out
    assert table.split()[:3] == ["rank", "7", "0"]


@pytest.mark.parametrize("algorithm", ["serial", "packed", "prefill_extend"])
def test_the_algorithm_is_the_one_asked_for(run_main: RunMain, algorithm: str) -> None:
    ran = run_main("score", *WITH_LABELS, "--algorithm", algorithm, "--json", "--debug")
    debug = json.loads(ran.out)["debug"]
    assert (debug["algorithm"], debug["reason"]) == (algorithm, "asked for by the request")
    assert f", {algorithm}: 3 items" in ran.err


def test_backslashes_are_backslashes(run_main: RunMain, shared_engine: ScoringEngine) -> None:
    ran = run_main("score", "-q", r"a\tb", "-i", r"c\nd", "-l", "y", "--json")
    assert json.loads(ran.out) == expected_body(shared_engine, query=r"a\tb", items=[r"c\nd"], labels=["y"])


def test_a_classifier_needs_no_labels(
    run_main: RunMain, checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    names = {0: "good", 1: "bad", 2: "ugly"}
    labels = {name: row for row, name in names.items()}
    folder = add_tokenizer(make_classifier(tmp_path, checkpoint_of("qwen3"), rows, id2label=names, label2id=labels))
    monkeypatch.setattr("prefixwise.cli.run_request.open_engine", open_engine)
    model = (f"--model={folder}", "--backend=torch", "--device=cpu", "--dtype=float32")
    ran = run_main("score", "-q", "fox ", "-i", "dog", "-i", "yes", *model)
    assert ran.status == 0, ran.err
    assert ran.out.split()[:5] == ["rank", "good", "bad", "ugly", "item"]


# Errors


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((), "error: expected --query or --query-file, got neither"),
        (("-q", "x", "--query-file", "y"), "error: expected --query or --query-file, got both"),
        (("-q", "x"), "error: expected --item or --items-file, got neither"),
        (("-q", "x", "-i", "y"), "error: expected --label or --label-token-id, got neither"),
        (
            ("-q", "x", "-i", "y", "-l", "y", "--label-token-id", "1"),
            "error: expected --label or --label-token-id, got both",
        ),
        (
            ("--query-file", "-", "--items-file", "-"),
            "error: --query-file and --items-file cannot both read standard input",
        ),
        (
            ("-q", "x", "-i", "y", "--items-format", "jsonl"),
            "error: --items-format is for --items-file, which was not given",
        ),
        (
            (*WITH_LABELS, "--items-field", "text"),
            "error: --items-field is for --items-file, which was not given",
        ),
        (
            (*WITH_LABELS, "--items-file", "x.txt", "--items-field", "text"),
            "error: --items-field: a file of lines has no fields",
        ),
        ((*WITH_LABELS, "--output-format", "csv"), "error: --output-format is for --output, which was not given"),
        (
            (*WITH_LABELS, "--output", "scores.xml"),
            "error: --output scores.xml: expected a name that ends in .csv, .tsv, .jsonl, .parquet, .ndjson, or "
            "--output-format",
        ),
    ],
)
def test_options_that_do_not_go_together_are_a_usage_error(
    run_main: RunMain, args: tuple[str, ...], error: str
) -> None:
    ran = run_main("score", *args)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.splitlines()[0] == error


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (("--label", "two words"), "labels[2] must be exactly one token", "--label-scoring sequence"),
        (("--score-mode", "logit_diff", "--label", "q"), 'score_mode "logit_diff" takes 2 labels', "--label"),
        (("--item", TOO_LONG), "items[3] must fit the model's 64 tokens", "--max-tokens-per-item"),
    ],
)
def test_a_request_that_cannot_be_scored_gets_a_hint_in_options(
    run_main: RunMain, args: tuple[str, ...], error: str, hint: str
) -> None:
    ran = run_main("score", *WITH_LABELS, *args)
    first, second = ran.err.splitlines()
    assert (ran.status, ran.out) == (1, "")
    assert first.startswith(f"error: {error}")
    assert second.startswith("hint: ")
    assert hint in second


def test_an_empty_items_file_is_an_error(run_main: RunMain) -> None:
    ran = run_main("score", "-q", QUERY, "-l", "y", "--items-file", "-", stdin=b"\n\n")
    assert ran.err.splitlines() == [
        "error: items must hold at least one item, got [] (list)",
        "hint: an items file holds one item per line",
    ]


def test_an_argument_that_is_not_unicode_is_an_error(run_main: RunMain) -> None:
    ran = run_main("score", *WITH_LABELS, "--item", "\udcff")  # how Python spells the stray byte 0xff
    assert ran.status == 1
    assert ran.err.startswith("error: items[3] must be valid Unicode")


def test_a_mistake_in_the_request_does_not_wait_for_the_model(
    run_main: RunMain, asked_engines: list[EngineOptions]
) -> None:
    assert run_main("score", *WITH_LABELS, "--softmax", "--score-mode", "logit").status == 1
    assert asked_engines == []


# The engine's options


def test_engine_options_reach_the_engine(asked_engines: list[EngineOptions], run_main: RunMain) -> None:
    run_main("score", *WITH_LABELS, *ENGINE_ARGS.split(), "--delimiter-token-id", "6")
    run_main("score", *WITH_LABELS)
    assert asked_engines == [replace(ENGINE_OPTIONS, delimiter_token_id=6), EngineOptions()]


def test_one_request_of_one_s_own_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EngineOptions] = []
    monkeypatch.setattr("prefixwise.launch.loading.load_engine", lambda options, on_program: asked.append(options))
    open_engine(EngineOptions("m", chunk_size=3))
    unlimited = EngineOptions("m", chunk_size=3, max_items_per_request=sys.maxsize, max_queued_tokens=sys.maxsize)
    assert asked == [unlimited]


@pytest.mark.parametrize(
    ("args", "num_chunks", "num_batches", "mask"),
    [
        ((), 1, 1, "segment"),
        (("--token-budget", "1"), 3, 3, "segment"),
        (("--chunk-size", "2"), 2, 1, "segment"),
        (("--mask", "dense"), 1, 1, "dense"),
    ],
)
def test_engine_options_shape_the_plan(
    run_main: RunMain, args: tuple[str, ...], num_chunks: int, num_batches: int, mask: str
) -> None:
    ran = run_main("score", *WITH_LABELS, "--algorithm", "packed", "--json", "--debug", *args)
    debug = json.loads(ran.out)["debug"]
    assert (debug["chunks"], len(debug["batches"]), debug["mask"]) == (num_chunks, num_batches, mask)


def test_a_delimiter_collision_is_reported_with_a_hint(run_main: RunMain, shared_engine: ScoringEngine) -> None:
    assert shared_engine.tokenizer is not None
    delimiter = str(shared_engine.tokenizer.encode("é")[-1])
    ran = run_main("score", *WITH_LABELS, "--delimiter-token-id", delimiter)
    first, second = ran.err.splitlines()
    assert first.startswith("error: items[2] must not hold the delimiter token")
    assert second.startswith("hint: omit --delimiter-token-id")


# The real thing


def test_the_embedded_model_scores_standard_input() -> None:
    """Nothing is faked: bit for bit the answer of `Scorer`, on the stream where it belongs."""
    with Scorer(dtype="float32") as scorer:
        asked: dict[str, Any] = {"labels": [" yes", " no"], "apply_softmax": True, "algorithm": "serial"}
        direct = scorer.score("Is this about food? ", ["pizza", "tax law"], **asked)
    labels = ["--label", " yes", "--label", " no", "--softmax"]
    how = ["--dtype", "float32", "--algorithm", "serial", "--json"]
    command = [*REAL_PROGRAM, "score", "-q", "Is this about food? ", "--items-file", "-", *labels, *how]
    ran = run_process(command, stdin=b"pizza\ntax law\n", OMP_NUM_THREADS=num_threads())
    assert ran.status == 0, ran.err
    body = json.loads(ran.out)
    assert [each["item"] for each in body.pop("results")] == [each.item for each in direct.ranked()]
    assert body == json.loads(json.dumps(direct.to_json()))
    assert ran.err.splitlines()[-1].startswith("SmolLM2-135M-Instruct")  # below what libtpu may write
    assert "float32, serial: 2 items" in ran.err


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


def test_json_has_the_texts_best_first_and_top_keeps_the_best(run_main: RunMain) -> None:
    every = json.loads(run_main("score", *WITH_LABELS, "--json").out)
    best = json.loads(run_main("score", *WITH_LABELS, "--json", "--top", "2").out)
    assert best["results"] == every["results"][:2]
    assert best["scores"] == every["scores"]
    assert sorted(each["item"] for each in every["results"]) == sorted(ITEMS)
    firsts = [each["scores"][0] for each in every["results"]]
    assert firsts == sorted(firsts, reverse=True)
    assert all(every["scores"][each["index"]] == each["scores"] for each in every["results"])


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
