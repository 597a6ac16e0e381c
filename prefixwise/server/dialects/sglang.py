"""The dialect of SGLang's `POST /v1/rerank`: a bare list, with the documents unless they are declined."""

from __future__ import annotations

from prefixwise.contract.errors import RequestError
from prefixwise.contract.parse import parse_rerank_request
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankResult
from prefixwise.server.dialects.base import Body, RerankDialect


class Sglang(RerankDialect):
    """Its requests look like Cohere's. `instruct`, which only SGLang has, or --rerank-format asks for its response."""

    def matches(self, body: Body) -> bool:
        return body.get("instruct") is not None

    def returns_documents(self, body: Body) -> bool:
        return body.get("return_documents") is not False

    def parse(self, body: Body) -> RerankRequest:
        return parse_rerank_request(body, "sglang")

    def result_body(self, body: Body, result: RerankResult, model: str, request_id: str) -> object:
        with_documents = self.returns_documents(body)
        return (
            {
                "score": each.relevance_score,
                **({"document": each.document} if with_documents else {}),
                "index": each.index,
                "meta_info": None,
            }
            for each in result.results
        )

    def error_body(self, error: RequestError) -> object:
        return {
            "object": "error",
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.status,
        }
