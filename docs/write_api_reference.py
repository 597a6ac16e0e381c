"""Writes what docs/ has of the OpenAPI document: the page http-reference.md and the TypeScript types prefixwise.d.ts.

`make docs` runs it; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefixwise.server.openapi import openapi_document
from prefixwise.server.openapi_operations import OPERATIONS
from prefixwise.server.openapi_schemas import SCHEMAS

FOLDER = Path(__file__).parent
_INTRODUCTION = """\
# HTTP reference

Every operation and every field, from the OpenAPI document that a server has at `/openapi.json`. [HTTP API](http-api.md)
explains them with examples; [prefixwise.d.ts](prefixwise.d.ts) has the bodies as TypeScript types. `make docs` writes
this page.

Every response has the header `X-Request-Id`. [The table of errors](http-api.md#errors) explains statuses and codes.
"""
_HEAD = """\
// The bodies of prefixwise's HTTP API. Written by `make docs` from the OpenAPI document (/openapi.json); do not edit.
//
//   const body: ScoreRequest = { query: "Review: ", items: ["I loved it."], labels: [" positive", " negative"] };
//   const response = await fetch(`${url}/v1/score`, { method: "POST", body: JSON.stringify(body) });
//   const { scores } = (await response.json()) as ScoreResponse;
"""
_PRIMITIVES = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}
Schema = Mapping[str, Any]


def files() -> dict[str, str]:
    """The files of this folder that are written, by name."""
    return {"http-reference.md": page(), "prefixwise.d.ts": types()}


def page() -> str:
    """The page in Markdown."""
    document = openapi_document()
    groups = [
        line
        for tag in document["tags"]
        for line in (f"## {tag['name']}\n\n{tag['description']}\n", *_operations(document, tag["name"]))
    ]
    return "\n".join([_INTRODUCTION, *groups, "## Bodies\n", *map(_section, SCHEMAS, SCHEMAS.values())])


def _operations(document: Schema, tag: str) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if tag in operation["tags"]:
                yield f"### `{method.upper()} {path}`\n\n{operation['summary']}\n\n{_operation(operation)}\n"


def _operation(operation: Schema) -> str:
    """A table of what goes in and what comes out, and an example."""
    sent = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    rows = [
        (f"`{each['name']}` ({each['in']})", f"{_cell(each['schema'])}. {each['description']}")
        for each in operation.get("parameters", ())
    ]
    rows += [("body", _cell(sent["schema"]))] if sent else []
    (_, answer), *errors = ((status, _content(each)) for status, each in operation["responses"].items())
    rows.append(("response", answer))
    if errors:
        rows.append((f"errors {', '.join(status for status, _ in errors)}", errors[0][1]))
    table = ["| part | content |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
    examples = [json.dumps(each["value"], ensure_ascii=False) for each in sent.get("examples", {}).values()]
    return "\n".join([*table, *(f"\n```json\n{each}\n```" for each in examples[:1])])


def _content(response: Schema) -> str:
    ((media, content),) = response["content"].items()
    return _cell(content["schema"]) if "$ref" in content["schema"] else f"`{media}`"


def _section(name: str, schema: Schema) -> str:
    rows = [f"| {' | '.join(row)} |" for row in _rows(schema, "")]
    table = ["| field | type | default | meaning |", "|---|---|---|---|", *rows] if rows else [_cell(schema)]
    return "\n".join([f"### {name}\n", *(f"{each}\n" for each in [schema.get("description")] if each), *table, ""])


def _rows(schema: Schema, path: str) -> Iterator[tuple[str, str, str, str]]:
    """The fields of an object, of its objects, and of the objects in its lists."""
    inner = schema.get("items", {})
    if schema.get("type") == "array" and "properties" in inner:
        yield from _rows(inner, f"{path}[]")
    for name, each in schema.get("properties", {}).items():
        own = f"{path}.{name}".lstrip(".")
        default = "required" if name in schema.get("required", ()) else ""
        default = f"`{json.dumps(each['default'])}`" if each.get("default") is not None else default
        yield f"`{own}`", _cell(each), default, each.get("description", "").replace("|", "\\|")
        yield from _rows(each, own)


def _cell(schema: Schema) -> str:
    """A type in a table: a body's name is a link to its section."""
    if "anyOf" in schema and all("$ref" in each for each in schema["anyOf"]):
        return " or ".join(map(_cell, schema["anyOf"]))
    text = _type(schema, None)
    return f"[{text}](#{text.lower()})" if "$ref" in schema else f"`{text.replace(' | ', ' or ')}`"


def types() -> str:
    """The TypeScript types."""
    types = [_declaration(name, schema) for name, schema in SCHEMAS.items()]
    routes = [
        f"  {json.dumps(f'{each.method.upper()} {each.path}')}: "
        f"{{ request: {each.request or 'undefined'}; response: {each.answer} }};"
        for each in OPERATIONS
        if "/" not in each.answer  # a media type: no JSON, or any
    ]
    table = "\n".join(
        ["/** The bodies of every route that answers with JSON. */", "export interface Routes {", *routes, "}"]
    )
    return "\n".join([_HEAD, *types, table]) + "\n"


def _declaration(name: str, schema: Schema) -> str:
    return f"{_comment(schema, '')}export type {name} = {_type(schema, '')};\n"


def _type(schema: Schema, indent: str | None) -> str:
    """A schema as a type, with the fields of objects unless `indent` is None.

    What only narrows a type further (lengths, ranges, `allOf`) is left to the server.
    """
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if "anyOf" in schema:
        either = " | ".join(dict.fromkeys(_type(each, indent) for each in schema["anyOf"]))
        common = {name: value for name, value in schema.items() if name != "anyOf"}
        return f"{_type(common, indent)} & ({either})" if "properties" in schema else either
    kinds = schema.get("type", "object" if "properties" in schema else [])
    named = [_of_kind(kind, schema, indent) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    return " | ".join(named) or "unknown"


def _of_kind(kind: str, schema: Schema, indent: str | None) -> str:
    if kind == "array":
        return f"Array<{_type(schema.get('items', {}), indent)}>"
    if kind != "object":
        return _PRIMITIVES[kind]
    if indent is None:
        return "object"
    if "properties" not in schema:
        return "Record<string, unknown>"
    inner, required = indent + "  ", schema.get("required", ())
    lines = [
        f"{_comment(each, inner)}{inner}{name}{'' if name in required else '?'}: {_type(each, inner)};"
        for name, each in schema["properties"].items()
    ]
    return "\n".join(["{", *lines, indent + "}"])


def _comment(schema: Schema, indent: str) -> str:
    return f"{indent}/** {schema['description']} */\n" if "description" in schema else ""


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
