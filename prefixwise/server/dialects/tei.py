"""The dialect of Text Embeddings Inference: `POST /rerank` with `texts`."""

from __future__ import annotations

from dataclasses import replace

from prefixwise.contract.errors import InvalidRequestError, QueueFullError, RequestError, ServiceError, UnavailableError
from prefixwise.contract.parse import parse_rerank_request
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankResult
from prefixwise.server.dialects.base import Body, RerankDialect


class Tei(RerankDialect):
    """The response is a bare list, and an error is a string and a type."""

    def __init__(self, *, auto_truncate: bool) -> None:
        self._auto_truncate = auto_truncate  # of requests that do not have `truncate`

    def matches(self, body: Body) -> bool:
        """`/rerank` has two dialects; the name of the documents distinguishes them."""
        return body.get("documents") is None or body.get("texts") is not None

    def returns_documents(self, body: Body) -> bool:
        return body.get("return_text") is True

    def parse(self, body: Body) -> RerankRequest:
        request = parse_rerank_request(body, "tei")
        asked = body.get("truncate")
        return replace(request, truncate=self._auto_truncate if asked is None else asked is True)

    def result_body(self, body: Body, result: RerankResult, model: str, request_id: str) -> object:
        is_raw, with_text = body.get("raw_scores") is True, self.returns_documents(body)
        return (
            {
                "index": each.index,
                "score": each.raw_score if is_raw else each.relevance_score,
                **({"text": each.document} if with_text else {}),
            }
            for each in result.results
        )

    def error_body(self, error: RequestError) -> object:
        return {"error": error.message, "error_type": _error_type(error)}


def _error_type(error: RequestError) -> str:
    if isinstance(error, QueueFullError) or error.code == "body_memory_full":
        return "Overloaded"
    if isinstance(error, UnavailableError):
        return "Unhealthy"
    if isinstance(error, ServiceError):
        return "Backend"
    if error.code == "empty_texts":
        return "Empty"
    return "Tokenizer" if isinstance(error, InvalidRequestError) and error.code == "no_tokenizer" else "Validation"
