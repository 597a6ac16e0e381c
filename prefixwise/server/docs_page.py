"""The documentation page: the OpenAPI document as one HTML page without a script, in the look of the others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from typing import Any

import orjson

from prefixwise.server.openapi import Document, openapi_document
from prefixwise.server.openapi_errors import ERROR_TABLE


@cache
def docs_page(*, has_key: bool = False) -> str:
    """All routes, fields, statuses and errors."""
    document = openapi_document(has_key=has_key)
    routes = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    links = "".join(f'<li><a href="#{_anchor(each)}">{_title(each[0], each[1])}</a></li>' for each in routes)
    sections = "".join(_section(document, *each) for each in routes)
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(info['title'])} API</title>{_STYLE_SHEETS}</head><body>{_head(info)}"
        f'<main class="docs"><div class="card"><p>{escape(info["summary"])}</p>{_intro(has_key)}'
        f'<nav aria-label="Routes"><ul>{links}<li><a href="#errors">Errors</a></li></ul></nav></div>'
        f"{sections}{_errors()}</main></body></html>"
    )


_STYLE_SHEETS = '<link rel="icon" href="/page/icon.svg">' + "".join(
    f'<link rel="stylesheet" href="/page/{name}.css">' for name in ("look", "page", "docs")
)


def _head(info: Document) -> str:
    """As index.html and reports.html have it."""
    return (
        '<header class="top"><div class="brand"><img src="/page/icon.svg" alt="" width="36" height="36">'
        f'<h1>{escape(info["title"])}</h1><p class="faint">The HTTP API, version {escape(info["version"])}</p></div>'
        '<nav aria-label="Pages"><ul><li><a href="/">Playground</a></li><li><a href="/reports">Reports</a></li>'
        '<li><a href="/docs" aria-current="page">API</a></li></ul></nav></header>'
    )


def _intro(has_key: bool) -> str:
    shown = "<p>Every route but health and the pages asks for a key: <code>Authorization: Bearer KEY</code>.</p>"
    key = shown if has_key else ""
    return (
        f"{key}<p>Every response carries <code>X-Request-Id</code>. Fields that are not listed are ignored; "
        "<code>null</code> means absent. In the examples <code>$URL</code> stands for this server's address. "
        'As a program reads it: <a href="/openapi.json">openapi.json</a>.</p>'
    )


def _section(document: Document, method: str, path: str, operation: Document) -> str:
    parts = [
        f'<section class="card" id="{_anchor((method, path, operation))}"><h2>{_title(method, path)}</h2>',
        f"<p>{escape(operation['summary'])}</p>",
        _parameters(operation),
        _request(document, operation),
        *_curls(method, path, operation, asks_for_key="security" in document and "security" not in operation),
        _responses(document, operation),
        "</section>",
    ]
    return "".join(parts)


def _parameters(operation: Document) -> str:
    rows = [
        (
            f"<code>{escape(each['name'])}</code> ({escape(each['in'])})",
            _kind(each["schema"]),
            escape(each["description"]),
        )
        for each in operation.get("parameters", ())
    ]
    return _table(("parameter", "type", ""), rows) if rows else ""


def _request(document: Document, operation: Document) -> str:
    body = operation.get("requestBody")
    if body is None:
        return ""
    return "<h3>Request</h3>" + _shape(document, body["content"]["application/json"]["schema"], "application/json")


def _shape(document: Document, schema: Document, media: str) -> str:
    """A body: its fields, those of each of several shapes, those of a list's entries, or no more than its type."""
    schema = _resolve(document, schema)
    if "properties" in schema:
        return _fields(schema)
    if "anyOf" in schema:
        shapes = (_shape(document, each, media) for each in schema["anyOf"])
        return f"<p>{escape(schema['description'])}</p>" + "<p>or</p>".join(shapes)
    if schema.get("type") == "array":
        return f"<p>A list of these. {escape(schema['description'])}</p>" + _fields(schema["items"])
    return f"<p><code>{escape(media)}</code></p>"


def _fields(schema: Document) -> str:
    required = schema.get("required", ())
    rows = [(_name(name, name in required), _kind(field), _text(field)) for name, field in schema["properties"].items()]
    return _table(("field", "type", ""), rows)


def _name(name: str, is_required: bool) -> str:
    return f"<code>{escape(name)}</code>{' <b>required</b>' if is_required else ''}"


def _text(field: Document) -> str:
    default = field.get("default")
    shown = "" if default is None else f" Default: <code>{escape(_json(default))}</code>."
    return escape(field.get("description", "")) + shown


def _kind(schema: Document) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return escape(schema["$ref"].rpartition("/")[2])
    if "const" in schema:
        return f"<code>{escape(_json(schema['const']))}</code>"
    if "enum" in schema:
        return " | ".join(f"<code>{escape(_json(value))}</code>" for value in schema["enum"] if value is not None)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"] if each.get("type") != "null"))
    kinds = schema.get("type", "anything")
    names = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null"]
    if names == ["array"]:
        return f"list of {_kind(schema['items'])}"
    return escape(" or ".join(names))


def _curls(method: str, path: str, operation: Document, *, asks_for_key: bool) -> Iterator[str]:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    key = ' -H "Authorization: Bearer $KEY"' if asks_for_key else ""
    command = f"curl -s{'' if method == 'get' else f' -X {method.upper()}'} $URL{path}{key}"
    if not body:
        yield _code(command)
    for name, example in body.get("examples", {}).items():
        data = shlex.quote(_json(example["value"]))
        yield f'<p class="example">Example: {escape(name)}</p>' + _code(f"{command} -d {data}")


def _responses(document: Document, operation: Document) -> str:
    answer = operation["responses"]["200"]["content"]
    media, content = next(iter(answer.items()))
    fields = _shape(document, content["schema"], media)
    failures = [
        (f"<code>{status}</code>", escape(response["description"]))
        for status, response in operation["responses"].items()
        if status != "200"
    ]
    return f"<h3>Response 200</h3>{fields}<h3>Other responses</h3>{_table(('status', ''), failures)}"


def _errors() -> str:
    error = {"message": "...", "type": "...", "param": "...", "code": "..."}
    body: dict[str, object] = {"error": error, "detail": "...", "message": "..."}
    tei_body = {"error": "...", "error_type": "Validation"}
    rows = [
        (
            f"<code>{row.status}</code>",
            f"<code>{escape(row.type)}</code>",
            " ".join(f"<code>{escape(code)}</code>" for code in row.codes),
            escape(row.when),
        )
        for row in ERROR_TABLE
    ]
    return (
        f'<section class="card" id="errors"><h2>Errors</h2><p>The body:</p>{_code(_json(body))}'
        f"<p>A request to /rerank with <code>texts</code> gets this one:</p>{_code(_json(tei_body))}"
        f"{_table(('status', 'type', 'code', 'when'), rows)}</section>"
    )


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Cells are HTML already."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' if each else "<td></td>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _code(text: str) -> str:
    """In a box that scrolls, with the keyboard too."""
    return f'<pre tabindex="0">{escape(text)}</pre>'


def _resolve(document: Document, schema: Document) -> Document:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Document = document["components"]["schemas"][name] if name else schema
    return found


def _title(method: str, path: str) -> str:
    return f'<span class="method">{escape(method.upper())}</span> {escape(path)}'


def _anchor(route: tuple[str, str, Any]) -> str:
    return escape(route[2]["operationId"], quote=True)


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
