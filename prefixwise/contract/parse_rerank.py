"""From a decoded JSON object, or the arguments of `Scorer.rerank`, to a `RerankRequest`.

A field that is None counts as absent; unknown fields are ignored. What depends on the model and its profile is
checked where the prompt is made (`prompts/rerank.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from prefixwise.contract.describe import describe, quote
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError
from prefixwise.contract.parse import (
    ALGORITHMS,
    Fields,
    choice,
    count,
    debug_top_k,
    flag,
    missing,
    parse_model_name,
    present_fields,
)
from prefixwise.contract.parse_inputs import checked_text
from prefixwise.contract.rerank import RerankRequest, TruncationSide
from prefixwise.contract.token_ids import Place, plain

TRUNCATION_SIDES: tuple[TruncationSide, ...] = get_args(TruncationSide)
_SHOWN_KEYS = 5
MAX_PRIORITY = 999  # as Cohere's API has it


def parse_rerank_request(body: object, *, documents_field: str = "documents") -> RerankRequest:
    """Raises a `RequestError` for the first thing wrong. `documents_field`: the dialect's name of the documents."""
    fields = present_fields(body)
    if "query" not in fields:
        raise missing("query", "a string")
    if documents_field not in fields:
        raise missing(documents_field, 'a list of strings, or of objects like {"text": "..."}')
    truncate = flag(fields, "truncate")
    return RerankRequest(
        query=_query(fields),
        documents=_documents(fields[documents_field], documents_field),
        top_n=count(fields, "top_n"),
        profile=_text(fields, "profile"),
        instruction=_text(fields, "instruction"),
        max_tokens_per_doc=count(fields, "max_tokens_per_doc"),
        max_chunks_per_doc=count(fields, "max_chunks_per_doc"),
        truncate=True if truncate is None else truncate,
        truncation_side=choice(fields, "truncation_side", TRUNCATION_SIDES, "right"),
        priority=_priority(fields),
        algorithm=choice(fields, "algorithm", ALGORITHMS, "auto"),
        return_debug=flag(fields, "return_debug") or False,
        debug_top_k=debug_top_k(fields),
        model=parse_model_name(fields),
        documents_field=documents_field,
    )


def _query(fields: Fields) -> str:
    query = _text(fields, "query")
    if not query:
        message = f"query must hold at least one character, got {describe(query)}"
        raise InvalidValueError(message, code="empty_query", param="query")
    return query


def _text(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        return checked_text(value, Place(name, name))
    message = f"{name} must be a string, got {describe(value)}"
    raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)


def _documents(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        message = f'{name} must be a list of strings, or of objects like {{"text": "..."}}, got {describe(value)}'
        raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)
    if len(value) == 0:
        message = f"{name} must hold at least one document, got {describe(value)}"
        raise InvalidValueError(message, code=f"empty_{name}", param=name)
    return tuple(_document(plain(entry), name, index) for index, entry in enumerate(value))


def _document(entry: object, name: str, index: int) -> str:
    text = entry.get("text") if isinstance(entry, Mapping) else entry
    place = Place(f"{name}[{index}]", name, index)
    if isinstance(text, str):
        return checked_text(text, place)
    expected = 'a string, or an object whose "text" is one'
    got = describe(entry)
    if isinstance(entry, Mapping):
        keys = [quote(str(key)) for key in entry][:_SHOWN_KEYS]
        got = "an object with " + (", ".join(keys) or "nothing in it") + (", ..." if len(entry) > len(keys) else "")
        if "text" in entry:
            got = f'an object whose "text" is {describe(text)}'
    message = f"{place.name} must be {expected}, got {got}"
    raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name, item_index=index)


def _priority(fields: Fields) -> int:
    value = fields.get("priority", 0)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_PRIORITY:
        return value
    message = f"priority must be an integer from 0 (served first) to {MAX_PRIORITY}, got {describe(value)}"
    raise InvalidValueError(message, code="invalid_priority", param="priority")
