"""The dialect of Infinity's `POST /rerank`: Cohere's, with `raw_scores` and `object: "rerank"`."""

from __future__ import annotations

import time

from prefixwise.contract.parse import parse_rerank_request
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankResult
from prefixwise.server.dialects.base import Body, RerankDialect, warnings_field


class Infinity(RerankDialect):
    """Its clients always send `raw_scores`, which no other API has beside `documents`."""

    def matches(self, body: Body) -> bool:
        return body.get("documents") is not None and body.get("raw_scores") is not None

    def returns_documents(self, body: Body) -> bool:
        return body.get("return_documents") is True

    def parse(self, body: Body) -> RerankRequest:
        return parse_rerank_request(body, "infinity")

    def result_body(self, body: Body, result: RerankResult, model: str, request_id: str) -> object:
        is_raw, with_documents = body.get("raw_scores") is True, self.returns_documents(body)
        return {
            "object": "rerank",
            "results": (
                {
                    "relevance_score": each.raw_score if is_raw else each.relevance_score,
                    "index": each.index,
                    **({"document": each.document} if with_documents else {}),
                }
                for each in result.results
            ),
            "model": model,
            "usage": {"prompt_tokens": result.usage.prompt_tokens, "total_tokens": result.usage.total_tokens},
            "id": request_id,
            "created": int(time.time()),
            **warnings_field(result),
        }
