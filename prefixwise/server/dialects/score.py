"""The package's own dialects of `POST /v1/score`: one request, or `requests`, many of them. Their fields are those of
`contract/parse.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson

from prefixwise.contract.checks import check_item_count
from prefixwise.contract.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidValueError,
    RequestError,
    UnavailableError,
)
from prefixwise.contract.fields import text
from prefixwise.contract.parse import ManyRequests, parse_requests, parse_score_request
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.result import ScoreResult, Usage
from prefixwise.engine.prepare import MAX_SCORES_PER_REQUEST
from prefixwise.engine.request_state import RequestState
from prefixwise.server.context import RequestContext
from prefixwise.server.dialects.base import (
    Body,
    Call,
    Dialect,
    Prepared,
    SingleDialect,
    add_warnings,
    bounded,
    map_tokenizer_error,
)
from prefixwise.server.service import Service

_END_THE_CALL = (CancelledError, DeadlineExceededError, UnavailableError)  # errors that one request does not have alone


class Score(SingleDialect):
    """Scores for every item, or one error."""

    def has_text(self, body: Body) -> bool:
        return isinstance(body.get("query"), str)

    def prepare(self, service: Service, body: Body) -> Prepared:
        return self.prepare_request(service, parse_score_request(body))

    def prepare_request(self, service: Service, request: ScoreRequest) -> Prepared:
        """Raises RequestError, TokenizerError."""
        model = service.names.answer_to(request.model)
        return Prepared(self, {}, model, service.engine.prepare(request), priority=request.priority)

    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        result = service.engine.finish(prepared.scoring, state, as_rows=True)
        add_warnings(context, result.warnings)
        return {**result.fields(), "model": prepared.model}


class ScoreMany(Dialect):
    """The responses to all `requests` in their order; a wrong one gets its error. Fields beside them are defaults."""

    def __init__(self) -> None:
        self._one = Score()

    def matches(self, body: Body) -> bool:
        return body.get("requests") is not None

    def has_text(self, body: Body) -> bool:
        requests = body["requests"]
        return isinstance(requests, list) and any(
            isinstance(each, dict) and self._one.has_text(each) for each in requests
        )

    def prepare_call(self, service: Service, body: Body) -> Call:
        many = parse_requests(body)
        _check_size(many, service.options.max_request_bytes)
        model = service.names.answer_to(text(many.defaults, "model"))
        parsed = [_parse(each) for each in many.bodies]
        _check_totals([each for each in parsed if isinstance(each, ScoreRequest)], service)
        requests = bounded(self._prepare(service, each) if isinstance(each, ScoreRequest) else each for each in parsed)
        return Call(self, requests, model, many.warnings)

    def _prepare(self, service: Service, request: ScoreRequest) -> Prepared | RequestError:
        try:
            with map_tokenizer_error():
                return self._one.prepare_request(service, request)
        except RequestError as error:
            return error

    def render_call(
        self, service: Service, context: RequestContext, call: Call, states: Sequence[RequestState]
    ) -> object:
        results: list[ScoreResult] = []
        data: list[dict[str, object]] = []
        done = iter(states)
        for request in call.requests:
            outcome = _finish(service, request, next(done)) if isinstance(request, Prepared) else request
            if isinstance(outcome, ScoreResult):
                results.append(outcome)
                data.append(outcome.fields())
            else:
                data.append(outcome.to_body())
        add_warnings(context, [*call.warnings, *(warning for each in results for warning in each.warnings)])
        return {
            "object": "list",
            "model": call.model,
            "data": iter(data),
            "usage": Usage.total(each.usage for each in results).to_json(),
            **({"warnings": list(call.warnings)} if call.warnings else {}),
        }


def _parse(body: object) -> ScoreRequest | RequestError:
    try:
        return parse_score_request(body)
    except RequestError as error:
        return error


def _check_size(many: ManyRequests, max_bytes: int) -> None:
    """Each request counts with its defaults: it is checked and tokenized with them."""
    try:
        size = len(orjson.dumps(many.defaults)) * len(many.bodies)
    except orjson.JSONEncodeError as error:
        message = f"the fields beside requests must hold valid Unicode in few levels of lists and objects, got: {error}"
        raise InvalidValueError(message, code="invalid_unicode", param="requests") from None
    if size > max_bytes:
        message = (
            f"the fields beside requests, once for each of {len(many.bodies)}, must have at most {max_bytes} bytes "
            f"(--max-request-bytes), got {size}; send fewer requests in one call"
        )
        raise InvalidValueError(message, code="too_many_requests", param="requests")


def _check_totals(requests: Sequence[ScoreRequest], service: Service) -> None:
    """All requests of a call are in memory at the same time, like the items of one."""
    check_item_count(sum(each.num_items for each in requests), service.engine.config.max_items_per_request, "requests")
    model = service.engine.backend.config
    num_scores = sum(each.num_items * (each.num_labels or model.num_classes) for each in requests)
    num_scores += sum(each.num_items * model.model_size for each in requests if each.return_pooled_hidden_states)
    if num_scores > MAX_SCORES_PER_REQUEST:
        message = (
            f"scores and hidden states of all requests must be at most {MAX_SCORES_PER_REQUEST} numbers, got "
            f"{num_scores}; send fewer requests in one call"
        )
        raise InvalidValueError(message, code="too_many_scores", param="requests")


def _finish(service: Service, prepared: Prepared, state: RequestState) -> ScoreResult | RequestError:
    try:
        return replace(service.engine.finish(prepared.scoring, state, as_rows=True), model=prepared.model)
    except _END_THE_CALL:
        raise
    except RequestError as error:
        return error
