"""The API as an OpenAPI 3.1 document, made from data: every route, every status that it can answer with."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from prefixwise._version import __version__
from prefixwise.server.jobs import LEAST_TIMEOUT
from prefixwise.server.openapi_errors import rows_of
from prefixwise.server.openapi_schemas import SCHEMAS

Document = dict[str, Any]

_IDS_EXAMPLE = {"query": [1, 2, 3], "items": [[4, 5], [6]], "label_token_ids": [7, 8], "apply_softmax": True}
_TEXT_EXAMPLE = {
    "query": "Is this about food? ",
    "items": ["pizza", "tax law"],
    "labels": [" yes", " no"],
    "label_scoring": "sequence",
    "apply_softmax": True,
}

_RERANK_EXAMPLE: dict[str, object] = {
    "query": "What is the capital of France?",
    "documents": ["Berlin is in Germany.", "Paris is the capital of France."],
}

_WORKING = (500, 503)  # of every route that needs the engine


_REPORT_NAME = {
    "name": "name",
    "in": "query",
    "required": True,
    "description": "As GET /reports/list has it.",
    "schema": {"type": "string"},
}


class Operation(NamedTuple):
    """One method of one path. A media type or a schema's name says what a 200 holds."""

    method: str
    path: str
    summary: str
    answer: str
    statuses: tuple[int, ...] = ()  # of errors
    request: str | None = None  # a schema's name
    examples: dict[str, object] = {}  # noqa: RUF012  # read only
    has_timeout: bool = False
    is_open: bool = False  # to those without a key
    parameters: tuple[Document, ...] = ()
    error: str = "Error"  # a schema's name


OPERATIONS = (
    Operation(
        "post",
        "/v1/score",
        "Score items against a query.",
        "ScoreResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "ScoreRequest",
        {"token ids": _IDS_EXAMPLE, "text": _TEXT_EXAMPLE},
        has_timeout=True,
    ),
    Operation(
        "post",
        "/v1/rerank",
        "Order documents by a query, as Cohere's first version and Jina do.",
        "RerankResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "RerankRequest",
        {"documents": {**_RERANK_EXAMPLE, "top_n": 1, "return_documents": True}},
        has_timeout=True,
    ),
    Operation(
        "post",
        "/v2/rerank",
        "Order documents by a query, as Cohere's second version does.",
        "RerankV2Response",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "RerankV2Request",
        {"documents": {**_RERANK_EXAMPLE, "max_tokens_per_doc": 512}},
        has_timeout=True,
    ),
    Operation(
        "post",
        "/rerank",
        "Order documents by a query, as Text Embeddings Inference does; with `documents`, as /v1/rerank.",
        "AnyRerankResponse",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "AnyRerankRequest",
        {
            "texts": {"query": _RERANK_EXAMPLE["query"], "texts": _RERANK_EXAMPLE["documents"], "return_text": True},
            "documents": _RERANK_EXAMPLE,
        },
        has_timeout=True,
        error="AnyError",
    ),
    Operation(
        "post",
        "/v1/prefix",
        "Compute a query's keys and values now, and keep them for the requests to come.",
        "Prefix",
        (400, 404, 413, 422, 429, *_WORKING, 504),
        "PrefixRequest",
        {
            "token ids": {"query": [1, 2, 3], "ttl_seconds": 60},
            "for reranking": {"query": _RERANK_EXAMPLE["query"], "profile": "default"},
        },
        has_timeout=True,
    ),
    Operation("get", "/v1/prefix", "List the prefixes that are kept.", "PrefixList", _WORKING),
    Operation(
        "delete", "/v1/prefix/{prefix_id}", "Let a prefix go before its time.", "PrefixReleased", (404, *_WORKING)
    ),
    Operation(
        "post",
        "/tokenize",
        "Which tokens a text is.",
        "TokenizeResponse",
        (400, 404, 413, *_WORKING, 504),
        "TokenizeRequest",
        {"one text": {"text": "Is this about food?"}, "many": {"text": ["pizza", "tax law"]}},
        has_timeout=True,
    ),
    Operation("get", "/v1/models", "The names under which the model is served.", "ModelList", (500,)),
    Operation("get", "/health", "200 when work is taken; 503 before and after.", "Health", _WORKING, is_open=True),
    Operation(
        "get",
        "/health_generate",
        "Score one tiny request, and say how long it took.",
        "HealthGenerate",
        (429, *_WORKING),
        is_open=True,
    ),
    Operation("get", "/info", "What is served, as Text Embeddings Inference tells it.", "TeiInfo", _WORKING),
    Operation("get", "/server_info", "Configuration, versions, devices, memory, figures.", "ServerInfo", (500,)),
    Operation("get", "/metrics", "Figures for Prometheus.", "text/plain", (500,)),
    Operation("get", "/openapi.json", "This document.", "application/json", (500,), is_open=True),
    Operation("get", "/docs", "This document as a page.", "text/html", (500,), is_open=True),
    Operation("get", "/", "The playground, for people.", "text/html", (500,), is_open=True),
    Operation("get", "/reports", "The report viewer, for people.", "text/html", (500,), is_open=True),
    Operation("get", "/reports/list", "The artifacts in the folder of reports.", "ReportList", (404, 500)),
    Operation(
        "get", "/reports/view", "One of them as a page.", "text/html", (400, 404, 500), parameters=(_REPORT_NAME,)
    ),
    Operation(
        "post", "/reports/view", "An artifact that is sent, as a page.", "text/html", (400, 404, 413, 500), "Artifact"
    ),
    Operation("get", "/page/{name}", "A file of the page.", "text/plain", (404, 500), is_open=True),
)

_REQUEST_ID = {
    "description": "The caller's where it sent a printable one of at most 128 characters, else a new one.",
    "schema": {"type": "string"},
}
_RETRY_AFTER = {"description": "Seconds after which to come again.", "schema": {"type": "integer", "minimum": 1}}
_TIMEOUT = {
    "name": "X-Request-Timeout",
    "in": "header",
    "required": False,
    "description": (
        "Seconds from arrival after which the answer is 504; the server's own limit stays where it is less. "
        f"Fractions down to {LEAST_TIMEOUT} are taken too, and may well end so."
    ),
    "schema": {"type": "number", "minimum": 1},
}


def _path_parameter(name: str, description: str) -> Document:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "minLength": 1, "pattern": "^[^/]+$"},
    }


_IN_PATH = (
    _path_parameter("prefix_id", "As POST /v1/prefix has given it."),
    _path_parameter("name", "As the page names it."),
)
_TITLES = {
    400: "The request is at fault.",
    401: "The API key is missing or wrong.",
    404: "Not here.",
    413: "The body is too large.",
    422: "A token id that the model does not have.",
    429: "Too much is waiting.",
    500: "Something unforeseen.",
    503: "Warming up, or shutting down.",
    504: "The time is up.",
}


@cache
def openapi_document(*, has_key: bool = False) -> Document:
    """`has_key`: a key is asked for. To be read only: it is made once."""
    paths: Document = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, has_key)
    document: Document = {
        "openapi": "3.1.0",
        "info": {
            "title": "prefixwise",
            "version": __version__,
            "summary": "Score many items against one query with a language model, each exactly as if it were alone.",
        },
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }
    if has_key:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    return document


def _operation(operation: Operation, has_key: bool) -> Document:
    asks_for_key = has_key and not operation.is_open
    statuses = sorted({*operation.statuses, *((401,) if asks_for_key else ())})
    described: Document = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{operation.path.strip('/').translate(_TO_NAME) or 'home'}",
        "responses": {
            "200": _answer(operation),
            **{str(status): _error(status, operation.error) for status in statuses},
        },
    }
    in_path = [each for each in _IN_PATH if f"{{{each['name']}}}" in operation.path]
    parameters = [*([_TIMEOUT] if operation.has_timeout else []), *in_path, *operation.parameters]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        described["requestBody"] = _body(operation)
    if has_key and operation.is_open:
        described["security"] = []
    return described


_TO_NAME = str.maketrans({"/": "_", ".": "_", "{": "", "}": ""})


def _answer(operation: Operation) -> Document:
    is_media_type = "/" in operation.answer
    media = operation.answer if is_media_type else "application/json"
    schema = {} if is_media_type else {"$ref": f"#/components/schemas/{operation.answer}"}
    if media.startswith("text/"):
        schema = {"type": "string"}
    return {"description": "Done.", "headers": {"X-Request-Id": _REQUEST_ID}, "content": {media: {"schema": schema}}}


def _error(status: int, schema: str) -> Document:
    codes = [code for row in rows_of(status) for code in row.codes]
    headers = {"X-Request-Id": _REQUEST_ID, **({"Retry-After": _RETRY_AFTER} if status == 429 else {})}
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": f"{_TITLES[status]} Codes: {', '.join(codes)}.", "headers": headers, "content": content}


def _body(operation: Operation) -> Document:
    content: Document = {"schema": {"$ref": f"#/components/schemas/{operation.request}"}}
    content["examples"] = {name: {"value": value} for name, value in operation.examples.items()}
    return {"required": True, "content": {"application/json": content}}
