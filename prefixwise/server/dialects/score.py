"""The package's own dialect, `POST /v1/score`: its fields are those of `contract/parse.py`."""

from __future__ import annotations

from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.request_state import RequestState
from prefixwise.server.context import RequestContext
from prefixwise.server.dialects.base import Body, Dialect, Prepared
from prefixwise.server.service import Service


class Score(Dialect):
    """Scores for every item, or one error."""

    def has_text(self, body: Body) -> bool:
        return isinstance(body.get("query"), str)

    def prepare(self, service: Service, body: Body) -> Prepared:
        request = parse_score_request(body)
        model = service.names.answer_to(request.model)
        return Prepared(self, body, model, service.engine.prepare(request))

    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        return {**service.engine.finish(prepared.scoring, state).to_json(), "model": prepared.model}
