"""Whole inputs: to the classes of a classifier, as vLLM's `POST /classify`, and to hidden states: `/v1/embeddings`.

Both paths take one text, several, or the token ids of either, and have no query.
"""

from __future__ import annotations

import time
from base64 import b64encode
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.classify import parse_classify_request, parse_embed_request
from prefixwise.engine.classifier import Classifier
from prefixwise.engine.request_state import RequestState
from prefixwise.server.context import RequestContext
from prefixwise.server.dialects.base import RESULT_BYTES, Body, Prepared, SingleDialect, add_warnings
from prefixwise.server.service import Service


class Classify(SingleDialect):
    """The label and the numbers of all classes for every input."""

    result_bytes = RESULT_BYTES

    def has_text(self, body: Body) -> bool:
        return _has_text(body)

    def prepare(self, service: Service, body: Body) -> Prepared:
        request = parse_classify_request(body)
        model = service.names.answer_to(request.model)
        scoring = Classifier(service.engine).prepare(request)
        # Parsed: what `render` reads of it.
        read = {
            "use_activation": request.use_activation,
            "request_id": request.request_id,
            "warnings": request.warnings,
        }
        return Prepared(self, read, model, scoring, priority=request.priority)

    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        read, warnings = prepared.body, _warnings_of(prepared)
        is_activated = read["use_activation"] is True
        result = Classifier(service.engine).finish(prepared.scoring, state, use_activation=is_activated)
        add_warnings(context, warnings)
        return {
            **_list_fields("classify", context, prepared),
            "data": ({**asdict(each), "num_classes": len(result.labels)} for each in result.results),
            "labels": list(result.labels),
            "usage": result.usage.to_json(),
            **({"truncated": (asdict(each) for each in result.truncated)} if result.truncated else {}),
            **({"warnings": list(warnings)} if warnings else {}),
        }


class Embeddings(SingleDialect):
    """The hidden state after the last token of every input."""

    result_bytes = RESULT_BYTES

    def has_text(self, body: Body) -> bool:
        return _has_text(body)

    def prepare(self, service: Service, body: Body) -> Prepared:
        request = parse_embed_request(body)
        model = service.names.answer_to(request.model)
        scoring = Classifier(service.engine).prepare_embedding(request)
        # Parsed: what `render` reads of it.
        read = {
            "is_base64": body.get("encoding_format") == "base64",
            "request_id": request.request_id,
            "warnings": request.warnings,
        }
        return Prepared(self, read, model, scoring, priority=request.priority)

    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        warnings = _warnings_of(prepared)
        result = Classifier(service.engine).finish_embedding(prepared.scoring, state)
        add_warnings(context, warnings)
        encode = _base64 if prepared.body["is_base64"] is True else _numbers
        return {
            **_list_fields("embd", context, prepared),
            "data": (
                {"index": index, "object": "embedding", "embedding": encode(row)}
                for index, row in enumerate(result.embeddings)
            ),
            "usage": result.usage.to_json(),
            **({"truncated": (asdict(each) for each in result.truncated)} if result.truncated else {}),
            **({"warnings": list(warnings)} if warnings else {}),
        }


def _has_text(body: Body) -> bool:
    sent = body.get("input")
    return isinstance(sent, str) or (isinstance(sent, list) and bool(sent) and isinstance(sent[0], str))


def _warnings_of(prepared: Prepared) -> tuple[str, ...]:
    warnings = prepared.body["warnings"]
    assert isinstance(warnings, tuple), "`prepare` sets it"
    return warnings


def _list_fields(prefix: str, context: RequestContext, prepared: Prepared) -> dict[str, object]:
    """What both responses begin with."""
    sent = prepared.body["request_id"]
    is_own = b"x-request-id" in context.headers or sent is None  # the header's id comes first
    return {
        "id": f"{prefix}-{context.id if is_own else sent}",
        "object": "list",
        "created": int(time.time()),
        "model": prepared.model,
    }


def _base64(row: NDArray[np.float32]) -> str:
    return b64encode(row.astype("<f4").tobytes()).decode("ascii")


def _numbers(row: NDArray[np.float32]) -> list[float]:
    numbers: list[float] = row.tolist()
    return numbers
