"""A server's calls: the JSON that a client sends, and what it makes of the response.

body -> parse.py (wrong requests are not sent) -> Call -> POST -> the result or the error of a `Scorer`
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from prefixwise.contract.classify import parse_classify_request, parse_embed_request
from prefixwise.contract.errors import (
    AuthenticationError,
    DeadlineExceededError,
    ForbiddenError,
    InternalError,
    InvalidRequestError,
    InvalidValueError,
    MethodNotAllowedError,
    MissingParameterError,
    ModelNotFoundError,
    NotFoundError,
    QueueFullError,
    RequestError,
    RequestTooLargeError,
    ServiceError,
    UnavailableError,
    VocabularyError,
)
from prefixwise.contract.fields import present_fields
from prefixwise.contract.inputs import plain
from prefixwise.contract.judge import JudgeRequest, parse_judge_request
from prefixwise.contract.judge_result import Judgement, JudgeResult
from prefixwise.contract.methods import Body
from prefixwise.contract.parse import parse_rerank_request, parse_score_request
from prefixwise.contract.ragged import IdLists
from prefixwise.contract.request import ScoreRequest
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import (
    Classification,
    ClassifyResult,
    EmbedResult,
    ItemError,
    RerankedDocument,
    RerankResult,
    ScoreResult,
    Truncation,
    Usage,
)

Json = dict[str, Any]
Result = TypeVar("Result")

# Calls


class Call(NamedTuple, Generic[Result]):
    """A checked request, and what makes a result of its response."""

    path: str
    content: bytes
    num_items: int
    read: Callable[[Json], Result]


def score_call(body: Body) -> Call[ScoreResult]:
    """Raises RequestError, as the other calls do."""
    fields = present_fields(body)
    request = parse_score_request(fields)
    return Call("/v1/score", _json(fields), request.num_items, partial(score_result, request))


def rerank_call(body: Body) -> Call[RerankResult]:
    """`POST /rerank`: of the rerank routes, it reads our fields whatever format the server prefers."""
    fields = present_fields(body)
    request = parse_rerank_request(fields)
    content = _json({**fields, "return_raw_scores": True})
    return Call("/rerank", content, request.num_items, partial(rerank_result, request))


def judge_call(body: Body) -> Call[JudgeResult]:
    """`POST /v1/judge`."""
    fields = present_fields(body)
    request = parse_judge_request(fields)
    return Call("/v1/judge", _json(fields), request.num_items, partial(judge_result, request))


def classify_call(body: Body) -> Call[ClassifyResult]:
    """`POST /classify`."""
    fields = present_fields(body)
    request = parse_classify_request(fields)
    return Call("/classify", _json(fields), request.num_items, classify_result)


def embed_call(body: Body) -> Call[EmbedResult]:
    """`POST /v1/embeddings`; base64 keeps every bit of a float32."""
    fields = present_fields(body)
    request = parse_embed_request(fields)
    return Call("/v1/embeddings", _json({**fields, "encoding_format": "base64"}), request.num_items, embed_result)


def _json(fields: Body) -> bytes:
    return json.dumps(fields, default=_plain, separators=(",", ":")).encode()


def _plain(value: object) -> object:
    """Arrays, columns and NumPy's values, where JSON has none of its own; bfloat16 is one of them."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float32).tolist() if value.dtype.kind == "V" else value.tolist()
    found = plain(value)
    if found is not value:
        return found
    raise TypeError(f"expected text, numbers and lists of them, got {type(value).__name__}")


# Results


def score_result(request: ScoreRequest, body: Json) -> ScoreResult:
    """Of `POST /v1/score`."""
    states = body.get("pooled_hidden_states")
    ids = request.label_token_ids or ()
    return ScoreResult(
        scores=body["scores"],
        items=request.items if isinstance(request.items, tuple) else IdLists(request.items),
        labels=tuple(body.get("labels") or request.labels or (" ".join(map(str, label)) for label in ids)),
        score_mode=request.score_mode,
        model=body["model"],
        usage=_usage(body),
        truncated=_truncated(body),
        item_errors=tuple(ItemError(**each) for each in body.get("item_errors", ())),
        pooled_hidden_states=states and [None if each is None else np.array(each, np.float32) for each in states],
        are_classes="labels" in body,
        warnings=tuple(body.get("warnings", ())),
        debug=body.get("debug"),
    )


def rerank_result(request: RerankRequest, body: Json) -> RerankResult:
    """Of `POST /rerank`, asked for raw scores."""
    meta, truncated = body["meta"], _truncated(body["meta"])
    warnings = meta.get("warnings", [])
    return RerankResult(
        results=[
            RerankedDocument(
                each["index"], request.documents[each["index"]], each["relevance_score"], each["raw_score"]
            )
            for each in body["results"]
        ],
        model=body["model"],
        profile=meta["profile"],
        usage=_usage(body),
        truncated=truncated,
        warnings=tuple(warnings[:-1] if truncated else warnings),  # the last one says that documents were cut
        debug=meta.get("debug"),
    )


def judge_result(request: JudgeRequest, body: Json) -> JudgeResult:
    """Of `POST /v1/judge`."""
    return JudgeResult(
        results=[
            Judgement(item=None if request.items is None else request.items[each["index"]], **each)
            for each in body["results"]
        ],
        answers=tuple(body["answers"]),
        model=body["model"],
        usage=_usage(body),
        truncated=_truncated(body),
        warnings=tuple(body.get("warnings", ())),
        debug=body.get("debug"),
    )


def classify_result(body: Json) -> ClassifyResult:
    """Of `POST /classify`."""
    return ClassifyResult(
        results=[Classification(each["index"], each["label"], each["probs"]) for each in body["data"]],
        labels=tuple(body["labels"]),
        model=body["model"],
        usage=_usage(body),
        truncated=_truncated(body),
        warnings=tuple(body.get("warnings", ())),
    )


def embed_result(body: Json) -> EmbedResult:
    """Of `POST /v1/embeddings`, asked for base64."""
    rows = [np.frombuffer(b64decode(each["embedding"]), "<f4").astype(np.float32) for each in body["data"]]
    return EmbedResult(np.stack(rows), body["model"], _usage(body), _truncated(body))


def _usage(body: Json) -> Usage:
    usage = body["usage"]
    return Usage(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def _truncated(body: Json) -> tuple[Truncation, ...]:
    return tuple(Truncation(**each) for each in body.get("truncated", ()))


# Errors

_PLAIN: tuple[type[RequestError], ...] = (  # the first of a status is that of a page without a type
    InvalidRequestError,
    MissingParameterError,
    InvalidValueError,
    AuthenticationError,
    ForbiddenError,
    NotFoundError,
    ModelNotFoundError,
    MethodNotAllowedError,
    RequestTooLargeError,
    VocabularyError,
)
_SERVICE: Mapping[int, Callable[[str, str, int | None], ServiceError]] = {
    429: lambda message, code, wait: QueueFullError(message, retry_after=1 if wait is None else wait, code=code),
    500: lambda message, code, wait: InternalError(message),
    503: lambda message, code, wait: UnavailableError(message, code=code, retry_after=wait),
    504: lambda message, code, wait: DeadlineExceededError(message),
}


def error_of_response(status: int, text: str, retry_after: int | None) -> RequestError:
    """The error that a server raised, from its response; a proxy's page becomes one of the same kinds."""
    sent = _error_fields(text)
    message = str(sent.get("message") or f"the server answered {status}: {text[:200]}")
    code, kind, param = str(sent.get("code") or f"http_{status}"), sent.get("type"), sent.get("param")
    make = _SERVICE.get(status)
    if make is not None:
        return make(message, code, retry_after)
    of_status = [each for each in _PLAIN if each.status == status]
    fitting = [each for each in of_status if each.type == kind] or of_status
    if not fitting:
        error = ServiceError(message, code=code)
        error.status = status
        return error
    return fitting[0](message, code=code, param=param)


def _error_fields(text: str) -> Json:
    try:
        found = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
