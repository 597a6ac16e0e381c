"""From a row's body to a request: what the command line says holds where the row says nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixwise.contract.describe import describe
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.parse_rerank import parse_rerank_request
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.rerank import RerankRequest

Fields = Mapping[str, object]

# A row that says one of them has said all that the others would say.
_TOGETHER = (("labels", "label_token_ids"), ("score_mode", "apply_softmax"))
_NOT_IN_BATCHES = ("return_debug", "debug_top_k")  # what they add differs from run to run


@dataclass(frozen=True)
class RowDefaults:
    """Fields of rows that do not have them."""

    score: Fields = field(default_factory=dict)  # of rows with items
    rerank: Fields = field(default_factory=dict)  # of rows with documents
    id_field: str = "id"  # names the row in the output; no part of the request


def parse_row(body: Fields, defaults: RowDefaults) -> ScoreRequest | RerankRequest:
    """Raises RequestError for the first thing wrong."""
    own = {name: value for name, value in body.items() if value is not None and name != defaults.id_field}
    for name in _NOT_IN_BATCHES:
        if own.get(name):
            message = f"{name} is for single requests, since a batch gives the same output every time; leave it out"
            raise InvalidValueError(message, code="conflicting_parameters", param=name)
    if "documents" not in own:
        return parse_score_request(_merge(own, defaults.score))
    if "items" in own:
        message = "items are scored and documents are reranked: expected one of them, got both"
        raise InvalidRequestError(message, code="conflicting_parameters", param="documents")
    return parse_rerank_request(_merge(own, defaults.rerank))


def row_id(body: Fields, id_field: str) -> object:
    """None where it has none. Raises invalid_id for what JSON has no single value for."""
    value = body.get(id_field)
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    message = f"{id_field} must be a string or a number, got {describe(value)}"
    raise InvalidRequestError(message, code="invalid_id", param=id_field)


def query_key(request: ScoreRequest | RerankRequest) -> tuple[bool, str | bytes]:
    """Equal for equal queries, and with an order among all of them."""
    query = request.query
    return (False, query) if isinstance(query, str) else (True, query.tobytes())


def _merge(own: Fields, defaults: Fields) -> dict[str, object]:
    settled = {name for names in _TOGETHER if any(each in own for each in names) for name in names}
    return {**{name: value for name, value in defaults.items() if name not in settled}, **own}
