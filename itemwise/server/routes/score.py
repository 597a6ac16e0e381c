"""`POST /v1/score`: the package's own dialect, field by field what `contract/parse.py` takes."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from itemwise.contract.parse import parse_score_request
from itemwise.contract.request import ScoreRequest
from itemwise.contract.result import ScoreResult
from itemwise.server.call import Call
from itemwise.server.scoring import Dialect, answer_score
from itemwise.server.service import Service


async def score(service: Service, call: Call) -> Response:
    """Scores for every item, or one error."""

    def parse(body: dict[str, object]) -> ScoreRequest:
        request = parse_score_request(body)
        service.names.answer_to(request.model)
        return request

    def render(request: ScoreRequest, result: ScoreResult) -> bytes:
        return orjson.dumps({**result.to_json(), "model": service.names.answer_to(request.model)})

    return await answer_score(service, call, Dialect(parse, render))
