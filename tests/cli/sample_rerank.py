"""One small rerank request for the fake model, as arguments of the program and as the engine's own answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefixwise.contract.parse import parse_rerank_request
from prefixwise.contract.result import RerankResult
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.reranker import Reranker

QUERY = "fox?"
DOCUMENTS = ["The quick brown fox", "the lazy dog", "naïve café"]
WITH_DOCUMENTS = ("--query", QUERY, "-d", DOCUMENTS[0], "-d", DOCUMENTS[1], "-d", DOCUMENTS[2])

PROFILE_FILE = """
name = "mine"
relevance = "logit"
labels = ["y"]

[prompt]
body = ["{query}", "{document}"]
"""


def expected(engine: ScoringEngine, **fields: Any) -> RerankResult:
    """What the engine itself answers; fields change the request of `WITH_DOCUMENTS`."""
    request = parse_rerank_request({"query": QUERY, "documents": DOCUMENTS, **fields})
    return Reranker(engine).rerank(request)


def ranking(body: Any) -> list[tuple[int, float]]:
    """Of the JSON that the program wrote: which document, how relevant."""
    return [(entry["index"], entry["relevance_score"]) for entry in body["results"]]


def expected_ranking(engine: ScoringEngine, **fields: Any) -> list[tuple[int, float]]:
    return [(entry.index, entry.relevance_score) for entry in expected(engine, **fields).results]


def write_profile(folder: Path, content: str = PROFILE_FILE) -> str:
    path = folder / "mine.toml"
    path.write_text(content)
    return str(path)
