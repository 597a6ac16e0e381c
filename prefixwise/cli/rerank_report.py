"""The answer of `prefixwise rerank` as text: a table or JSON for stdout, notes and a summary for stderr."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from prefixwise.cli.report_notes import how_much, load_time, tell_cut, tell_warning, what_ran
from prefixwise.cli.text_table import Column, probability, render_table, start_of

if TYPE_CHECKING:
    from prefixwise.cli.run_request import Finished
    from prefixwise.contract.rerank import RerankedDocument, RerankResult


def rerank_json(result: RerankResult, *, with_debug: bool) -> str:
    """One line; the last three keys only when they hold something."""
    body: dict[str, object] = {
        "model": result.model,
        "profile": result.profile,
        "results": [_document_json(document) for document in result.results],
        "usage": result.usage.to_json(),
    }
    if result.truncated:
        body["truncated"] = [asdict(truncation) for truncation in result.truncated]
    if result.warnings:
        body["warnings"] = list(result.warnings)
    if with_debug and result.debug:
        body["debug"] = dict(result.debug)
    return json.dumps(body) + "\n"


def _document_json(document: RerankedDocument) -> dict[str, object]:
    return {
        "index": document.index,
        "relevance_score": document.relevance_score,
        "raw_score": document.raw_score,
        "document": {"text": document.document},
    }


def rerank_table(result: RerankResult, width: int) -> str:
    """The documents best first, their text cut to the width."""
    documents = result.results
    columns = [
        Column("rank", [str(rank) for rank in range(1, len(documents) + 1)], align_right=True),
        Column("relevance", [probability(each.relevance_score) for each in documents], align_right=True),
        Column("index", [str(each.index) for each in documents], align_right=True),
        Column("document", [start_of(each.document, width) for each in documents], may_shrink=True),
    ]
    return render_table(columns, width)


def tell_notes(finished: Finished[RerankResult]) -> None:
    """What the profile has to say, and which documents were cut short."""
    result = finished.result
    for warning in result.warnings:
        tell_warning(warning)
    tell_cut(result.truncated, finished.num_items, "document")


def summary_line(finished: Finished[RerankResult]) -> str:
    """What ran where and by which profile, and how long it took."""
    result = finished.result
    ran = f"{what_ran(result.model, finished, result.debug)}, profile {result.profile}"
    speed = f"{finished.num_items / finished.run_seconds:,.1f} documents/s"
    return f"{ran}: {how_much(finished, 'document', result.usage)}, {speed} {load_time(finished)}"
