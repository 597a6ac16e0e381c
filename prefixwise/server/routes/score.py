"""`POST /v1/score`: the package's own dialect, field by field what `contract/parse.py` takes."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.job import Job
from prefixwise.server.call import Call
from prefixwise.server.scoring import Parsed, Ready, answer_score
from prefixwise.server.service import Service


async def score(service: Service, call: Call) -> Response:
    """Scores for every item, or one error."""
    engine = service.engine

    def parse(body: dict[str, object]) -> Parsed:
        request = parse_score_request(body)
        model = service.names.answer_to(request.model)

        def prepare() -> Ready:
            prepared = engine.prepare(request)

            def render(job: Job) -> bytes:
                return orjson.dumps({**engine.finish(prepared, job).to_json(), "model": model})

            return Ready(prepared, render)

        return Parsed(request.is_text, prepare)

    return await answer_score(service, call, parse)
