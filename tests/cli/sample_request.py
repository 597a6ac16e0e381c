"""One small request for the fake model, as arguments of the program and as the engine's own answer."""

from __future__ import annotations

import json
from typing import Any

from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from tests.cli.fake_program import MAX_CONTEXT_LEN

QUERY = "Is this document relevant? "
ITEMS = ["The quick brown fox", "the lazy dog", "naïve café"]
LABELS = ["y", "z"]
INPUT = ("--query", QUERY, "--item", ITEMS[0], "--item", ITEMS[1], "--item", ITEMS[2])
WITH_LABELS = (*INPUT, "--label", "y", "--label", "z")
TOO_LONG = "fox " * MAX_CONTEXT_LEN


def expected_body(engine: ScoringEngine, **fields: Any) -> Any:
    """The engine's own answer as JSON, and the items best first; fields change the request of `WITH_LABELS`."""
    request = {"query": QUERY, "items": ITEMS, "labels": LABELS, **fields}
    body = json.loads(json.dumps(engine.score(parse_score_request(request)).to_json()))
    scored = [(index, row) for index, row in enumerate(body["scores"]) if row is not None]
    best_first = sorted(scored, key=lambda pair: -pair[1][0])
    return {
        **body,
        "results": [{"index": index, "item": request["items"][index], "scores": row} for index, row in best_first],
    }
