"""The dialects of Cohere's API, version 1 (which Jina's equals) and version 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prefixwise.contract.parse import parse_rerank_request
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankResult, truncation_warnings
from prefixwise.server.dialects.base import Body, RerankDialect

DOCUMENTS_PER_SEARCH_UNIT = 100  # as Cohere bills them


class CohereV1(RerankDialect):
    """`POST /v1/rerank`, and `/rerank` with `documents`: for clients of Cohere's version 1 and of Jina."""

    returns_objects = True

    def returns_documents(self, body: Body) -> bool:
        return body.get("return_documents") is True

    def parse(self, body: Body) -> RerankRequest:
        return parse_rerank_request(body, "cohere_v1")

    def result_body(self, body: Body, result: RerankResult, model: str, request_id: str) -> object:
        return {
            "id": request_id,
            "object": "list",
            "model": model,
            "results": _results(body, result, with_documents=self.returns_documents(body)),
            "usage": {
                "prompt_tokens": result.usage.prompt_tokens,
                "total_tokens": result.usage.total_tokens,
                "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens},
            },
            "meta": _meta("1", body, result),
        }


class CohereV2(RerankDialect):
    """`POST /v2/rerank`."""

    returns_objects = True

    def returns_documents(self, body: Body) -> bool:
        return body.get("return_documents") is True

    def parse(self, body: Body) -> RerankRequest:
        return parse_rerank_request(body, "cohere_v2")

    def result_body(self, body: Body, result: RerankResult, model: str, request_id: str) -> object:
        results = _results(body, result, with_documents=self.returns_documents(body))
        return {"id": request_id, "results": results, "meta": _meta("2", body, result)}


def _results(body: Body, result: RerankResult, *, with_documents: bool) -> Iterator[dict[str, object]]:
    """vLLM's clients may ask for the scores before the mapping to 0 .. 1, by `use_activation`."""
    is_raw, with_raw = body.get("use_activation") is False, body.get("return_raw_scores") is True
    documents = _sent_documents(body)
    return (
        {
            "index": each.index,
            "relevance_score": each.raw_score if is_raw else each.relevance_score,
            **({"raw_score": each.raw_score} if with_raw else {}),
            **({"document": _as_object(documents[each.index])} if with_documents else {}),
        }
        for each in result.results
    )


def _sent_documents(body: Body) -> list[object]:
    documents = body["documents"]
    assert isinstance(documents, list), "`parse` checked it"
    return documents


def _as_object(document: object) -> object:
    """A document that was sent as an object comes back with all of its fields."""
    return {"text": document} if isinstance(document, str) else document


def _meta(version: str, body: Body, result: RerankResult) -> dict[str, object]:
    """Cohere's fields, then ours; the last three only if they are not empty."""
    meta: dict[str, object] = {
        "api_version": {"version": version},
        "billed_units": {"search_units": -(-len(_sent_documents(body)) // DOCUMENTS_PER_SEARCH_UNIT)},
        "tokens": {"input_tokens": result.usage.prompt_tokens, "output_tokens": 0},
        "cached_tokens": result.usage.cached_tokens,
        "profile": result.profile,
    }
    if result.warnings or result.truncated:
        meta["warnings"] = [*result.warnings, *truncation_warnings(result.truncated)]
    if result.truncated:
        meta["truncated"] = (asdict(each) for each in result.truncated)
    if result.debug:
        meta["debug"] = dict(result.debug)
    return meta
