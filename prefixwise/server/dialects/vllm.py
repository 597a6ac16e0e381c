"""vLLM's dialects: `POST /score` (also at /v1/score) for pairs of texts, and `POST /generative_scoring` for items.

The profile of the model makes the prompt of a pair, as of a query and a document: vLLM's `/score` is for rerankers.
Pairs with the same first text are one request, so that they share its prefix.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from prefixwise.contract.checks import check_item_count
from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.known_fields import PAIR_NAMES
from prefixwise.contract.parse import parse_generative_request, parse_pairs
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import Usage, truncation_warnings
from prefixwise.engine.request_state import RequestState
from prefixwise.prompts.template import without_text
from prefixwise.server.context import RequestContext
from prefixwise.server.dialects.base import (
    RESULT_BYTES,
    Body,
    Call,
    Dialect,
    Prepared,
    SingleDialect,
    add_warnings,
    bounded,
    finish_rerank,
)
from prefixwise.server.service import Service

_OWN_NAMES = PAIR_NAMES - {"items"}  # which /v1/score has, too


@dataclass(frozen=True, slots=True)
class PairsCall(Call):
    """A call of `/score`, which has one request for each different first text."""

    indices: tuple[tuple[int, ...], ...] = ()  # of each request's documents: their places among the pairs
    is_raw: bool = False
    request_id: str | None = None


class VllmScore(Dialect):
    """A score for each pair, in the order of the pairs. One error fails all."""

    def matches(self, body: Body) -> bool:
        return any(body.get(name) is not None for name in _OWN_NAMES)

    def has_text(self, body: Body) -> bool:
        return True

    def prepare_call(self, service: Service, body: Body) -> Call:
        pairs = parse_pairs(body)
        first = pairs.requests[0]
        num_pairs = sum(each.num_items for each in pairs.requests)
        check_item_count(num_pairs, service.engine.config.max_items_per_request, first.documents_field)
        model = service.names.answer_to_any(first.model, strict=service.options.strict_model)
        prepared = bounded(
            self._prepare(service, request, places, model)
            for request, places in zip(pairs.requests, pairs.indices, strict=True)
        )
        is_raw = body.get("use_activation") is False
        return PairsCall(self, prepared, model, (), pairs.indices, is_raw, pairs.request_id)

    def _prepare(self, service: Service, request: RerankRequest, places: Sequence[int], model: str) -> Prepared:
        """Raises RequestError, which names a text by its place in the call."""
        try:
            rerank = service.reranker.prepare(request)
        except InvalidValueError as error:
            if error.item_index is not None:
                name, place = request.documents_field, places[error.item_index]
                message = error.message.replace(f"{name}[{error.item_index}]", f"{name}[{place}]", 1)
                raise InvalidValueError(message, code=error.code, param=error.param, item_index=place) from None
            raise
        return Prepared(self, {}, model, rerank.scoring, rerank, request.priority)

    def render_call(
        self, service: Service, context: RequestContext, call: Call, states: Sequence[RequestState]
    ) -> object:
        assert isinstance(call, PairsCall), "`prepare_call` returns one"
        scores: dict[int, float] = {}
        usages, truncated = [], []
        warnings: list[str] = []
        for prepared, state, places in zip(call.prepared, states, call.indices, strict=True):
            assert prepared.rerank is not None, "`_prepare` sets it"
            result = finish_rerank(service, prepared.rerank, state)
            for each in result.results:
                scores[places[each.index]] = each.raw_score if call.is_raw else each.relevance_score
            truncated += [replace(each, index=places[each.index]) for each in result.truncated]
            usages.append(result.usage)
            warnings += result.warnings
        notes = [*dict.fromkeys(warnings), *truncation_warnings(truncated)]
        add_warnings(context, notes)
        return {
            **_list_body("score", context, call.request_id, call.model, [scores[i] for i in range(len(scores))]),
            "usage": Usage.total(usages).to_json(),
            **({"warnings": notes} if notes else {}),
            **({"truncated": (asdict(each) for each in truncated)} if truncated else {}),
        }


class GenerativeScoring(SingleDialect):
    """The probability of the first label token after each item, by default among the label tokens alone."""

    result_bytes = RESULT_BYTES

    def has_text(self, body: Body) -> bool:
        return isinstance(body.get("query"), str)

    def prepare(self, service: Service, body: Body) -> Prepared:
        request, add_special_tokens, request_id = parse_generative_request(body)
        if not add_special_tokens:  # token ids are used as they are, without BOS
            request = without_text(request, service.engine.tokenizer)
        model = service.names.answer_to(request.model)
        kept = {"request_id": request_id}
        return Prepared(self, kept, model, service.engine.prepare(request), priority=request.priority)

    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        result = service.engine.finish(prepared.scoring, state, as_rows=True)
        add_warnings(context, result.warnings)
        scores = [
            row[0] for row in result.rows or () if row is not None
        ]  # every item has scores: on_item_error is "fail"
        request_id = prepared.body["request_id"]
        assert request_id is None or isinstance(request_id, str), "`prepare` checked it"
        return {
            **_list_body("generative-scoring", context, request_id, prepared.model, scores),
            "usage": result.usage.to_json(),
            **({"warnings": list(result.warnings)} if result.warnings else {}),
        }


def _list_body(
    prefix: str, context: RequestContext, request_id: str | None, model: str, scores: Sequence[float]
) -> dict[str, object]:
    """What both responses have. The header's id comes before the body's, as in vLLM."""
    is_sent = b"x-request-id" in context.headers or request_id is None
    return {
        "id": f"{prefix}-{context.id if is_sent else request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": ({"index": index, "object": "score", "score": score} for index, score in enumerate(scores)),
    }
