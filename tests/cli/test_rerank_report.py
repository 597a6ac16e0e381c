from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prefixwise.cli.rerank_report import rerank_json, rerank_table
from prefixwise.contract.rerank import RerankedDocument, RerankResult
from prefixwise.contract.result import Truncation, Usage
from tests.cli.conftest import FAKE_PROGRAM, RunMain, run_on_terminal
from tests.cli.fake_program import NO_PROFILE
from tests.cli.sample_rerank import QUERY, WITH_DOCUMENTS

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
    ran = run_main("rerank", *WITH_DOCUMENTS, "--max-tokens-per-doc", "2", "--top-n", "1", "--quiet")
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
