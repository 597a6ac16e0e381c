"""The API as an OpenAPI 3.1 document: every route, and every status of its responses."""

from __future__ import annotations

from functools import cache

from prefixwise._version import __version__
from prefixwise.server.context import HEALTH_PATHS
from prefixwise.server.openapi_errors import rows_of
from prefixwise.server.openapi_operations import OPERATIONS, TAGS, Document, Operation
from prefixwise.server.openapi_schemas import SCHEMAS
from prefixwise.server.scoring import LEAST_TIMEOUT

_REQUEST_ID = {
    "description": "The caller's, if it is printable and has at most 128 characters, else a new one.",
    "schema": {"type": "string"},
}
_WARNING = {
    "description": "Once for each warning, such as a field that is unknown and was ignored.",
    "schema": {"type": "string"},
}
_RETRY_AFTER = {"description": "Seconds to wait before a retry.", "schema": {"type": "integer", "minimum": 1}}
_TIMEOUT = {
    "name": "X-Request-Timeout",
    "in": "header",
    "required": False,
    "description": (
        "Seconds from arrival until the server responds with 504; the server's own limit holds if it is smaller. "
        f"Fractions down to {LEAST_TIMEOUT} are accepted too, and will often end in 504."
    ),
    "schema": {"type": "number", "minimum": 1},
}


def _path_parameter(name: str, description: str, pattern: str = "^[^/]+$") -> Document:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "minLength": 1, "pattern": pattern},
    }


_IN_PATH = (
    _path_parameter("prefix_id", "From the response of POST /v1/prefix."),
    _path_parameter("name", "The name of the file."),
    _path_parameter("model", "A name from GET /v1/models; it may hold slashes.", ".*"),
)
_TITLES = {
    400: "The request is not valid.",
    401: "The API key is missing or wrong.",
    403: "Another web page may have sent the request, or the server does not allow it.",
    404: "Not found.",
    413: "The body is too large.",
    422: "The model does not have a token id of the request.",
    429: "The queue is full.",
    500: "An unexpected error.",
    503: "The server is starting or shutting down.",
    504: "The deadline has passed.",
}


@cache
def openapi_document(*, has_key: bool = False) -> Document:
    """`has_key`: the server needs an API key. The document is cached; do not change it."""
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
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
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
    is_page_asked = not has_key and operation.path not in HEALTH_PATHS  # which web page sent it
    statuses = sorted({*operation.statuses, *((401,) if asks_for_key else (403,) if is_page_asked else ())})
    described: Document = {
        "tags": [operation.tag],
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
    headers = {"X-Request-Id": _REQUEST_ID, **({"X-Prefixwise-Warning": _WARNING} if operation.has_timeout else {})}
    return {"description": "Success.", "headers": headers, "content": {media: {"schema": schema}}}


def _error(status: int, schema: str) -> Document:
    codes = [code for row in rows_of(status) for code in row.codes]
    headers = {"X-Request-Id": _REQUEST_ID, **({"Retry-After": _RETRY_AFTER} if status in (429, 503) else {})}
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": f"{_TITLES[status]} Codes: {', '.join(codes)}.", "headers": headers, "content": content}


def _body(operation: Operation) -> Document:
    content: Document = {"schema": {"$ref": f"#/components/schemas/{operation.request}"}}
    content["examples"] = {name: {"value": value} for name, value in operation.examples.items()}
    return {"required": True, "content": {"application/json": content}}
