"""The dialects of Cohere's API, version 1 (which Jina's is a twin of) and version 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from prefixwise.contract.describe import describe
from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.parse import flag, present_fields
from prefixwise.contract.parse_rerank import parse_rerank_request
from prefixwise.contract.rerank import RerankRequest, RerankResult
from prefixwise.server.dialects.base import RerankDialect

DOCUMENTS_PER_SEARCH_UNIT = 100  # as Cohere counts what it bills


class CohereV1(RerankDialect):
    """`POST /v1/rerank`, and `/rerank` with `documents`: for Cohere's first version, Jina, and all that follow them."""

    def parse(self, body: Mapping[str, object]) -> RerankRequest:
        _check_rank_fields(body)
        flag(present_fields(body), "return_documents")
        return parse_rerank_request(body)

    def render(self, body: Mapping[str, object], result: RerankResult, model: str, call_id: str) -> object:
        with_documents = body.get("return_documents") is True
        return {
            "id": call_id,
            "object": "list",
            "model": model,
            "results": [
                {
                    "index": each.index,
                    "relevance_score": each.relevance_score,
                    **({"document": {"text": each.document}} if with_documents else {}),
                }
                for each in result.results
            ],
            "usage": {
                "prompt_tokens": result.usage.prompt_tokens,
                "total_tokens": result.usage.total_tokens,
                "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens},
            },
            "meta": _meta("1", body, result),
        }


class CohereV2(RerankDialect):
    """`POST /v2/rerank`."""

    def parse(self, body: Mapping[str, object]) -> RerankRequest:
        _check_rank_fields(body)
        return parse_rerank_request(body)

    def render(self, body: Mapping[str, object], result: RerankResult, model: str, call_id: str) -> object:
        results = [{"index": each.index, "relevance_score": each.relevance_score} for each in result.results]
        return {"id": call_id, "results": results, "meta": _meta("2", body, result)}


def _check_rank_fields(body: Mapping[str, object]) -> None:
    """Of an object we read `text`, and a field that is left out in silence would be a wrong score."""
    value = body.get("rank_fields")
    if value not in (None, ["text"]):
        message = f'rank_fields must be ["text"], the one field that is read of a document, got {describe(value)}'
        raise InvalidValueError(message, code="invalid_rank_fields", param="rank_fields")


def _meta(version: str, body: Mapping[str, object], result: RerankResult) -> dict[str, object]:
    """What Cohere's clients know; then ours, the last three only where they hold something."""
    documents = body["documents"]
    assert isinstance(documents, list), "it was parsed"
    meta: dict[str, object] = {
        "api_version": {"version": version},
        "billed_units": {"search_units": -(-len(documents) // DOCUMENTS_PER_SEARCH_UNIT)},
        "tokens": {"input_tokens": result.usage.prompt_tokens, "output_tokens": 0},
        "cached_tokens": result.usage.cached_tokens,
        "profile": result.profile,
    }
    if result.warnings or result.truncated:
        meta["warnings"] = [*result.warnings, *truncation_warnings(result)]
    if result.truncated:
        meta["truncated"] = [asdict(each) for each in result.truncated]
    if result.debug:
        meta["debug"] = dict(result.debug)
    return meta


def truncation_warnings(result: RerankResult) -> list[str]:
    """One, where documents were cut."""
    num_cut = len(result.truncated)
    return [f"{num_cut} document(s) were longer than is read, and were cut: `truncated` says which"] if num_cut else []
