"""The dialect of Voyage's `POST /v1/rerank`: `top_k` and `truncation`, answered by a list called `data`."""

from __future__ import annotations

from prefixwise.contract.parse import parse_rerank_request
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankResult
from prefixwise.server.dialects.base import Body, RerankDialect, warnings_field


class Voyage(RerankDialect):
    """`top_k` or `truncation` beside `documents` distinguishes it; its own client always sends `truncation`."""

    def matches(self, body: Body) -> bool:
        has_own = body.get("top_k") is not None or body.get("truncation") is not None
        return body.get("documents") is not None and has_own

    def returns_documents(self, body: Body) -> bool:
        return body.get("return_documents") is True

    def parse(self, body: Body) -> RerankRequest:
        return parse_rerank_request(body, "voyage")

    def result_body(self, body: Body, result: RerankResult, model: str, request_id: str) -> object:
        with_documents = self.returns_documents(body)
        return {
            "object": "list",
            "data": (
                {
                    "index": each.index,
                    "relevance_score": each.relevance_score,
                    **({"document": each.document} if with_documents else {}),
                }
                for each in result.results
            ),
            "model": model,
            "usage": {"total_tokens": result.usage.total_tokens},
            **warnings_field(result),
        }
