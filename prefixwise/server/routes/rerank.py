"""`/v1/rerank`, `/v2/rerank` and `/rerank`: documents ordered by a query, for the clients that people already have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson
from starlette.responses import Response

from prefixwise.contract.rerank import RerankResult
from prefixwise.engine.job import Job
from prefixwise.server.call import Call
from prefixwise.server.dialects.base import RerankDialect
from prefixwise.server.dialects.cohere import CohereV1, CohereV2, truncation_warnings
from prefixwise.server.dialects.tei import Tei, is_tei
from prefixwise.server.scoring import Parsed, Ready, answer_score
from prefixwise.server.service import Service

Body = Mapping[str, object]

_COHERE_V1, _COHERE_V2, _TEI = CohereV1(), CohereV2(), Tei()


async def rerank_v1(service: Service, call: Call) -> Response:
    """Cohere's first version, and Jina's."""
    return await answer_score(service, call, _parser(service, call, lambda body: _COHERE_V1))


async def rerank_v2(service: Service, call: Call) -> Response:
    """Cohere's second version."""
    return await answer_score(service, call, _parser(service, call, lambda body: _COHERE_V2))


async def rerank(service: Service, call: Call) -> Response:
    """Text Embeddings Inference's, or with `documents` that of `/v1/rerank`."""
    # Which of them is known by the body, so even that the queue is full cannot be said before it was read.
    dialect_of = _parser(service, call, lambda body: _TEI if is_tei(body) else _COHERE_V1)
    return await answer_score(service, call, dialect_of, check_queue_first=False)


def _parser(service: Service, call: Call, choose: Callable[[Body], RerankDialect]) -> Callable[[Body], Parsed]:
    def parse(body: Body) -> Parsed:
        dialect = choose(body)
        call.error_body = dialect.error_body
        request = dialect.parse(body)
        model = service.names.answer_to_any(request.model, strict=service.options.strict_model)

        def prepare() -> Ready:
            prepared = service.reranker.prepare(request)

            def render(job: Job) -> bytes:
                result = service.reranker.finish(prepared, job)
                _warn(service, call, result)
                return orjson.dumps(dialect.render(body, result, model, call.id))

            return Ready(prepared.scoring, render, request.priority)

        return Parsed(is_text=True, prepare=prepare)

    return parse


def _warn(service: Service, call: Call, result: RerankResult) -> None:
    """In headers, as a bare list has no place for it and some clients drop what they do not know; and in the log."""
    for warning in result.warnings:
        service.log_once(warning)
    for warning in (*result.warnings, *truncation_warnings(result)):
        call.add_header(b"x-prefixwise-warning", warning.encode("ascii", "backslashreplace"))
