"""The dialect of NVIDIA's NIM for reranking: `POST /v1/ranking`, whose scores are logits."""

from __future__ import annotations

from dataclasses import replace

from prefixwise.contract.parse import parse_rerank_request
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankResult
from prefixwise.server.dialects.base import Body, RerankDialect, warnings_field


class Nvidia(RerankDialect):
    """Query and passages are objects with a `text`. A passage that does not fit is cut only if `truncate` is END."""

    def parse(self, body: Body) -> RerankRequest:
        request = parse_rerank_request(body, "nvidia")
        return replace(request, truncate=body.get("truncate") == "END", cut_by='truncate: "END"')

    def result_body(self, body: Body, result: RerankResult, model: str, request_id: str) -> object:
        return {
            "rankings": ({"index": each.index, "logit": each.raw_score} for each in result.results),
            "usage": {"prompt_tokens": result.usage.prompt_tokens, "total_tokens": result.usage.total_tokens},
            **warnings_field(result),
        }
