"""The dialect of vLLM's `POST /classify`: whole inputs to the classes of a classifier."""

from __future__ import annotations

import time
from dataclasses import asdict

from prefixwise.contract.classify import parse_classify_request
from prefixwise.engine.classifier import Classifier
from prefixwise.engine.request_state import RequestState
from prefixwise.server.context import RequestContext
from prefixwise.server.dialects.base import RESULT_BYTES, Body, Prepared, SingleDialect, add_warnings
from prefixwise.server.service import Service


class Classify(SingleDialect):
    """The label and the numbers of all classes for every input."""

    result_bytes = RESULT_BYTES

    def has_text(self, body: Body) -> bool:
        sent = body.get("input")
        return isinstance(sent, str) or (isinstance(sent, list) and bool(sent) and isinstance(sent[0], str))

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
        read, warnings = prepared.body, prepared.body["warnings"]
        assert isinstance(warnings, tuple), "`prepare` sets it"
        is_activated = read["use_activation"] is True
        result = Classifier(service.engine).finish(prepared.scoring, state, use_activation=is_activated)
        add_warnings(service, context, warnings)
        is_sent = b"x-request-id" in context.headers or read["request_id"] is None  # the header's id comes first
        return {
            "id": f"classify-{context.id if is_sent else read['request_id']}",
            "object": "list",
            "created": int(time.time()),
            "model": prepared.model,
            "data": ({**asdict(each), "num_classes": len(result.labels)} for each in result.results),
            "usage": result.usage.to_json(),
            **({"truncated": (asdict(each) for each in result.truncated)} if result.truncated else {}),
            **({"warnings": list(warnings)} if warnings else {}),
        }
