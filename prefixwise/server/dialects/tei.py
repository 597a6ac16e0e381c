"""The dialect of Text Embeddings Inference: `POST /rerank` with `texts`."""

from __future__ import annotations

from collections.abc import Mapping

from prefixwise.contract.errors import InvalidRequestError, QueueFullError, RequestError, ServiceError, UnavailableError
from prefixwise.contract.parse import choice, flag, present_fields
from prefixwise.contract.parse_rerank import parse_rerank_request
from prefixwise.contract.rerank import RerankRequest, RerankResult
from prefixwise.server.dialects.base import RerankDialect

_DIRECTIONS = ("Right", "Left", "right", "left")
_OURS = ("top_n", "profile", "instruction", "model", "max_tokens_per_doc")


class Tei(RerankDialect):
    """A bare list comes back, and errors are a string and a type. `truncate` is off unless it is asked for."""

    def parse(self, body: Mapping[str, object]) -> RerankRequest:
        fields = present_fields(body)
        for name in ("raw_scores", "return_text"):
            flag(fields, name)
        ours: dict[str, object] = {name: fields[name] for name in _OURS if name in fields}
        ours |= {"query": fields.get("query"), "texts": fields.get("texts")}
        ours["truncate"] = flag(fields, "truncate") or False
        ours["truncation_side"] = choice(fields, "truncation_direction", _DIRECTIONS, "Right").lower()
        return parse_rerank_request(ours, documents_field="texts")

    def render(self, body: Mapping[str, object], result: RerankResult, model: str, call_id: str) -> object:
        is_raw, with_text = body.get("raw_scores") is True, body.get("return_text") is True
        return [
            {
                "index": each.index,
                "score": each.raw_score if is_raw else each.relevance_score,
                **({"text": each.document} if with_text else {}),
            }
            for each in result.results
        ]

    def error_body(self, error: RequestError) -> object:
        return {"error": error.message, "error_type": _error_type(error)}


def is_tei(body: Mapping[str, object]) -> bool:
    """By the name of the documents, which is all that tells the dialects of `/rerank` apart."""
    return body.get("documents") is None or body.get("texts") is not None


def _error_type(error: RequestError) -> str:
    if isinstance(error, QueueFullError):
        return "Overloaded"
    if isinstance(error, UnavailableError):
        return "Unhealthy"
    if isinstance(error, ServiceError):
        return "Backend"
    return "Tokenizer" if isinstance(error, InvalidRequestError) and error.code == "no_tokenizer" else "Validation"
