"""A row's body as a request: the command line's options are defaults for fields that the row does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, describe
from prefixwise.contract.parse import parse_rerank_request, parse_score_request, with_defaults
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.rerank_request import RerankRequest

Fields = Mapping[str, object]

_NOT_IN_BATCHES = {
    **dict.fromkeys(("return_debug", "debug_top_k"), "a batch job gives the same output every time"),
    "return_pooled_hidden_states": "a batch job's output has no column for them",
}


@dataclass(frozen=True)
class RowDefaults:
    """Values of fields that a row does not have."""

    score: Fields = field(default_factory=dict)  # of rows with items
    rerank: Fields = field(default_factory=dict)  # of rows with documents
    id_field: str = "id"  # names the row in the output; not part of the request


def parse_row(body: Fields, defaults: RowDefaults) -> ScoreRequest | RerankRequest:
    """Raises RequestError for the first fault."""
    for name, why in _NOT_IN_BATCHES.items():
        if body.get(name):
            message = f"{name} is for single requests: {why}; leave it out"
            raise InvalidValueError(message, code="conflicting_parameters", param=name)
    fields = row_fields(body, defaults)
    if "documents" not in fields:
        return parse_score_request(fields)
    if "items" in fields:
        message = "items are scored and documents are reranked: expected one of them, got both"
        raise InvalidRequestError(message, code="conflicting_parameters", param="documents")
    return parse_rerank_request(fields)


def row_fields(body: Fields, defaults: RowDefaults) -> dict[str, object]:
    """The fields of the row's request: with `documents` it is a rerank request."""
    own = {name: value for name, value in body.items() if value is not None and name != defaults.id_field}
    return dict(with_defaults(own, defaults.rerank if "documents" in own else defaults.score))


def row_id(body: Fields, id_field: str) -> object:
    """The row's id; None where it has none. Raises invalid_id for anything but a string or a finite number."""
    value = body.get(id_field)
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    message = f"{id_field} must be a string or a number, got {describe(value)}"
    raise InvalidRequestError(message, code="invalid_id", param=id_field)


def query_key(request: ScoreRequest | RerankRequest) -> tuple[bool, str | bytes]:
    """Equal for equal queries; keys can be sorted."""
    query = request.query
    return (False, query) if isinstance(query, str) else (True, query.tobytes())
