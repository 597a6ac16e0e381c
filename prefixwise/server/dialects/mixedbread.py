"""The dialect of Mixedbread's `POST /v1/reranking`: the documents are the `input`."""

from __future__ import annotations

from prefixwise.contract.parse import parse_rerank_request
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankResult
from prefixwise.server.dialects.base import Body, RerankDialect, warnings_field


class Mixedbread(RerankDialect):
    """Also `POST /v1/rerank`, where `input` distinguishes it."""

    returns_objects = True

    def matches(self, body: Body) -> bool:
        return body.get("input") is not None and body.get("documents") is None

    def returns_documents(self, body: Body) -> bool:
        return body.get("return_input") is True

    def parse(self, body: Body) -> RerankRequest:
        return parse_rerank_request(body, "mixedbread")

    def result_body(self, body: Body, result: RerankResult, model: str, request_id: str) -> object:
        inputs, with_input = body["input"], self.returns_documents(body)
        assert isinstance(inputs, list), "`parse` checked it"
        return {
            "object": "list",
            "model": model,
            "data": (
                {
                    "index": each.index,
                    "score": each.relevance_score,
                    **({"input": inputs[each.index]} if with_input else {}),
                    "object": "rank_result",
                }
                for each in result.results
            ),
            "usage": {
                "prompt_tokens": result.usage.prompt_tokens,
                "total_tokens": result.usage.total_tokens,
                "completion_tokens": 0,
            },
            "top_k": len(result.results),
            "return_input": with_input,
            **warnings_field(result),
        }
