from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixwise.cli.engine_options import open_engine
from prefixwise.cli.rerank import rerank_json, rerank_table
from prefixwise.contract.result import RerankedDocument, RerankResult, Truncation, Usage
from prefixwise.engine.engine import ScoringEngine
from prefixwise.launch.options import EngineOptions
from tests.cli.conftest import FAKE_PROGRAM, RunMain, run_on_terminal
from tests.cli.engine_flags import ENGINE_ARGS, ENGINE_OPTIONS
from tests.cli.fake_program import FAKE_PROFILE, NO_PROFILE
from tests.cli.sample_request import TOO_LONG
from tests.cli.sample_rerank import (
    DOCUMENTS,
    PROFILE_FILE,
    QUERY,
    WITH_DOCUMENTS,
    expected_ranking,
    ranking,
    write_profile,
)

TWO_CHUNKS = "fox " * 60  # does not fit once, does twice

# From options to the request


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (("--top", "2"), {"top_n": 2}),
        (("--instruction", "Is it a dog?"), {"instruction": "Is it a dog?"}),
        (("--max-tokens-per-doc", "2"), {"max_tokens_per_doc": 2}),
        (("-d", TWO_CHUNKS), {"documents": [*DOCUMENTS, TWO_CHUNKS]}),
        (
            ("-d", TWO_CHUNKS, "--max-chunks-per-doc", "2"),
            {"documents": [*DOCUMENTS, TWO_CHUNKS], "max_chunks_per_doc": 2},
        ),
    ],
)
def test_an_option_does_what_the_field_of_the_request_does(
    run_main: RunMain, shared_engine: ScoringEngine, args: tuple[str, ...], fields: dict[str, Any]
) -> None:
    ran = run_main("rerank", *WITH_DOCUMENTS, *args, "--json")
    found = ranking(json.loads(ran.out))
    assert ran.status == 0
    assert found == expected_ranking(shared_engine, **fields)
    assert found != expected_ranking(shared_engine)


def test_chunks_are_read_where_one_would_be_cut(run_main: RunMain) -> None:
    cut = run_main("rerank", "-q", QUERY, "-d", TWO_CHUNKS, "--json")
    chunked = run_main("rerank", "-q", QUERY, "-d", TWO_CHUNKS, "--max-chunks-per-doc", "2", "--json")
    assert "truncated" in json.loads(cut.out)
    assert "truncated" not in json.loads(chunked.out)
    assert "1 document, " in chunked.err


def test_without_options_the_documents_are_ranked(run_main: RunMain, shared_engine: ScoringEngine) -> None:
    ran = run_main("rerank", *WITH_DOCUMENTS, "--json")
    assert ranking(json.loads(ran.out)) == expected_ranking(shared_engine)


@pytest.mark.parametrize("algorithm", ["serial", "packed", "prefill_extend"])
def test_the_algorithm_is_the_one_asked_for(run_main: RunMain, algorithm: str) -> None:
    ran = run_main("rerank", *WITH_DOCUMENTS, "--algorithm", algorithm, "--json", "--debug")
    assert json.loads(ran.out)["debug"]["algorithm"] == algorithm
    assert f", {algorithm}, profile fake-yes-no: 3 documents" in ran.err


# Query and documents from files


@pytest.mark.parametrize(
    ("args", "stdin"),
    [
        (("--query-file", "QUERY", "--documents-file", "-"), "\n".join(DOCUMENTS)),
        (("--query-file", "-", "--documents-file", "DOCUMENTS.jsonl"), f"{QUERY}\n"),
        (("-q", QUERY, "--documents-file", "-", "--documents-format", "jsonl"), "\n".join(map(json.dumps, DOCUMENTS))),
        (("-q", QUERY, "-d", DOCUMENTS[0], "--documents-file", "-"), "\n".join(DOCUMENTS[1:])),
    ],
)
def test_query_and_documents_may_come_from_files(
    run_main: RunMain,
    shared_engine: ScoringEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    stdin: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("QUERY").write_text(f"{QUERY}\n")
    rows = [json.dumps({"text": document, "id": 7}) for document in DOCUMENTS]
    Path("DOCUMENTS.jsonl").write_text("\n".join(rows))
    ran = run_main("rerank", *args, "--json", stdin=stdin.encode())
    assert ran.status == 0, ran.err
    assert ranking(json.loads(ran.out)) == expected_ranking(shared_engine)


# Errors


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((), "error: expected --query or --query-file, got neither"),
        (("-q", "x"), "error: expected --document or --documents-file, got neither"),
        (
            ("--query-file", "-", "--documents-file", "-"),
            "error: --query-file and --documents-file cannot both read standard input",
        ),
        (
            ("-q", "x", "-d", "y", "--documents-format", "jsonl"),
            "error: --documents-format is for --documents-file, which was not given",
        ),
    ],
)
def test_options_that_do_not_go_together_are_a_usage_error(
    run_main: RunMain, args: tuple[str, ...], error: str
) -> None:
    ran = run_main("rerank", *args)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.splitlines()[0] == error


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (("-d", TOO_LONG, "--no-truncate"), "documents[3] must fit: expected at most", "omit --no-truncate"),
        (("-q", TOO_LONG), "query and instruction must leave room", "a shorter --query"),
        (("--instruction", TOO_LONG), "query and instruction must leave room", "--instruction"),
        (("--profile", "qwen3-reranker"), 'profile "qwen3-reranker" needs the special tokens', "`prefixwise profiles`"),
        (("--profile", "qwen"), 'no profile is called "qwen"; expected bge-', "`prefixwise profiles`"),
        (("--profile", "no/such.toml"), "no/such.toml cannot be read: No such file", "`prefixwise profiles`"),
    ],
)
def test_a_request_that_cannot_be_scored_gets_a_hint_in_options(
    run_main: RunMain, args: tuple[str, ...], error: str, hint: str
) -> None:
    ran = run_main("rerank", *WITH_DOCUMENTS, *args)
    first, second = ran.err.splitlines()
    assert (ran.status, ran.out) == (1, "")
    assert first.startswith(f"error: {error}")
    assert second.startswith("hint: ")
    assert hint in second


def test_an_empty_documents_file_is_an_error(run_main: RunMain) -> None:
    ran = run_main("rerank", "-q", QUERY, "--documents-file", "-", stdin=b"\n\n")
    assert ran.err.splitlines() == [
        "error: documents must hold at least one document, got [] (list)",
        "hint: a documents file holds one document per line",
    ]


def test_a_mistake_in_the_request_does_not_wait_for_the_model(
    run_main: RunMain, asked_engines: list[EngineOptions]
) -> None:
    ran = run_main("rerank", "-q", "", "-d", "x")
    assert (ran.status, asked_engines) == (1, [])
    assert ran.err.startswith("error: query must hold at least one character")


def test_a_mistake_in_a_profile_does_not_wait_for_the_model(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("prefixwise.cli.run_request.open_engine", open_engine)
    path = write_profile(tmp_path, PROFILE_FILE.replace("logit", "log it").replace("labels", "label"))
    ran = run_main("rerank", *WITH_DOCUMENTS, "--profile", path, "--model", "no such model")
    first, second = ran.err.splitlines()
    assert first.startswith(f"error: {path} is not a profile: relevance must be one of softmax, ")
    assert "; label is unknown; did you mean labels?" in first
    assert second.startswith("hint: `prefixwise profiles` lists")
    assert (ran.status, ran.out) == (1, "")


# The engine's options


def test_a_profile_of_one_s_own_makes_the_prompts(run_main: RunMain, tmp_path: Path) -> None:
    path = write_profile(tmp_path)
    theirs = json.loads(run_main("rerank", *WITH_DOCUMENTS, "--json").out)
    ran = run_main("rerank", *WITH_DOCUMENTS, "--profile", path, "--json")
    ours = json.loads(ran.out)
    assert (theirs["profile"], ours["profile"]) == (FAKE_PROFILE.name, "mine")
    assert (theirs["warnings"], "warnings" in ours) == ([NO_PROFILE], False)
    assert ranking(ours) != ranking(theirs)
    assert ", profile mine: 3 documents" in ran.err


def test_an_instruction_that_a_profile_has_no_place_for_is_an_error(run_main: RunMain, tmp_path: Path) -> None:
    ran = run_main("rerank", *WITH_DOCUMENTS, "--profile", write_profile(tmp_path), "--instruction", "x")
    assert ran.err.splitlines() == [
        'error: profile "mine" takes no instruction, got "x"',
        "hint: omit --instruction, or choose another --profile",
    ]


def test_engine_options_reach_the_engine(asked_engines: list[EngineOptions], run_main: RunMain) -> None:
    run_main("rerank", *WITH_DOCUMENTS, *ENGINE_ARGS.split(), "--profile", "plain")
    run_main("rerank", *WITH_DOCUMENTS)
    assert asked_engines == [replace(ENGINE_OPTIONS, profile="plain"), EngineOptions()]


def test_a_delimiter_is_the_profile_s_business(run_main: RunMain) -> None:
    ran = run_main("rerank", *WITH_DOCUMENTS, "--delimiter-token-id", "6")
    assert (ran.status, ran.err.splitlines()[0]) == (2, "error: No such option: --delimiter-token-id")


# The real thing


def test_the_embedded_model_reranks_out_of_the_box(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows its capitals, and nobody trained it to rerank. `score` has it in a process of its own."""
    documents = b"Bananas are rich in potassium.\nThe capital of France is Paris.\n"
    command = ["rerank", "-q", "What is the capital of France?", "--documents-file", "-"]
    with closing(open_engine(EngineOptions(), None)) as engine, monkeypatch.context() as patch:
        patch.setattr(engine, "close", lambda: None)  # it serves both runs
        patch.setattr("prefixwise.cli.run_request.open_engine", lambda options, on_program: engine)
        as_json, table = (run_main(*command, *how, stdin=documents) for how in (("--json",), ()))
    assert (table.status, as_json.status) == (0, 0), table.err + as_json.err
    body = json.loads(as_json.out)
    (best, relevance), (worst, low) = ranking(body)
    assert (best, worst) == (1, 0)
    assert table.out.splitlines() == [
        "rank  relevance  index  document",
        f"   1     {relevance:.4f}      1  The capital of France is Paris.",
        f"   2     {low:.4f}      0  Bananas are rich in potassium.",
    ]
    assert body["profile"] == "chat-yes-no"
    warning, summary = table.err.splitlines()
    assert warning == f"warning: {body['warnings'][0]}"
    assert summary.startswith("SmolLM2-135M-Instruct")
    assert ", profile chat-yes-no: 2 documents, " in summary


BEST = RerankedDocument(3, "best", 0.99999, 11.5)
WORST = RerankedDocument(12, "worst", 0.00001, -11.5)


def result(*documents: RerankedDocument, **fields: Any) -> RerankResult:
    return RerankResult(list(documents), "some-model", "some-profile", Usage(10, 4), **fields)


def test_the_table_is_ranked_and_aligned() -> None:
    assert rerank_table(result(BEST, WORST), 80).splitlines() == [
        "rank  relevance  index  document",
        "   1     1.0000      3  best",
        "   2    1.0e-05     12  worst",
    ]


@pytest.mark.parametrize("document", ["word " * 100, "漢字" * 100, "\x1b[31m" * 100])
def test_a_document_is_cut_to_the_width_and_cannot_control_the_terminal(document: str) -> None:
    from rich.cells import cell_len

    _, row = rerank_table(result(RerankedDocument(0, document, 0.5, 0.0)), 60).splitlines()
    assert cell_len(row) in (59, 60)  # a character of two cells may not fill the last one
    assert row.endswith("...")
    assert "\x1b" not in row


def test_json_is_one_line_and_leaves_out_what_is_empty() -> None:
    text = rerank_json(result(BEST), with_debug=True)
    assert text.count("\n") == 1
    assert json.loads(text) == {
        "model": "some-model",
        "profile": "some-profile",
        "results": [{"index": 3, "relevance_score": 0.99999, "raw_score": 11.5, "document": {"text": "best"}}],
        "usage": {
            "prompt_tokens": 10,
            "total_tokens": 10,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_json_has_what_was_cut_what_to_know_and_how_it_was_computed() -> None:
    full = result(BEST, truncated=(Truncation(3, 9, 8),), warnings=("beware",), debug={"algorithm": "packed"})
    body = json.loads(rerank_json(full, with_debug=True))
    assert body["truncated"] == [{"index": 3, "original_tokens": 9, "kept_tokens": 8}]
    assert (body["warnings"], body["debug"]) == (["beware"], {"algorithm": "packed"})
    assert "debug" not in json.loads(rerank_json(full, with_debug=False))


def test_the_summary_names_what_ran_and_quiet_drops_it(run_main: RunMain) -> None:
    ran = run_main("rerank", *WITH_DOCUMENTS, "--algorithm", "serial")
    warning, summary = ran.err.splitlines()
    assert warning == f"warning: {NO_PROFILE}"
    assert re.fullmatch(
        r"fake-model with fake on cpu, float32, serial, profile fake-yes-no: "
        r"3 documents, \d+ tokens in \d\.\d\d s, [\d,]+\.\d documents/s \(model loaded in \d\.\d s\)",
        summary,
    )
    assert run_main("rerank", *WITH_DOCUMENTS, "--quiet").err == f"warning: {NO_PROFILE}\n"


def test_cut_documents_are_noted_on_stderr(run_main: RunMain) -> None:
    ran = run_main("rerank", *WITH_DOCUMENTS, "--max-tokens-per-doc", "2", "--top", "1", "--quiet")
    assert ran.err.splitlines()[1:] == ["warning: 3 of 3 documents cut to 2 tokens: index 0, 1, 2"]


def test_debug_is_shown_when_asked_for(run_main: RunMain) -> None:
    assert "debug" not in json.loads(run_main("rerank", *WITH_DOCUMENTS, "--json").out)
    assert "debug" in json.loads(run_main("rerank", *WITH_DOCUMENTS, "--json", "--debug").out)
    table, with_debug = run_main("rerank", *WITH_DOCUMENTS), run_main("rerank", *WITH_DOCUMENTS, "--debug", "--quiet")
    assert with_debug.out == table.out
    keys = [line.partition(":")[0] for line in with_debug.err.splitlines()[1:]]
    assert keys == ["algorithm", "reason", "mask", "chunks", "batches[0]", "cached_tokens", "milliseconds"]


def test_many_documents_get_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("".join(f"fox {index}\n" for index in range(300)))
    command = [*FAKE_PROGRAM, "rerank", "-q", QUERY, "--documents-file", str(tmp_path / "many.txt")]
    shown = run_on_terminal([*command, "--token-budget", "400"]).err
    assert "loading the embedded model ..." in shown
    assert "300/300" in shown
